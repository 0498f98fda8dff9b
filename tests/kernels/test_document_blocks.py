"""Runs of blocks that see each other, against all pairs of tokens."""

import numpy as np
import pytest

from mxjax.kernels.document_blocks import runs_of_keys, runs_of_queries

S = 512
SIZES = pytest.mark.parametrize("sizes", [(128, 64), (64, 128), (128, 128)], ids=str)
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])


def documents(rng, num_tokens=S, padding=0):
    """Ids that never fall, each from 1 to the greatest for at least one token; then padding."""
    ids = 1 + np.cumsum(rng.random(num_tokens) < 0.01)
    ids[num_tokens - padding :] = 0
    return ids


def visible(q_ids, k_ids, causal):
    """Which keys each query sees, bool [queries, keys], of all pairs."""
    seen = q_ids[:, None] == k_ids
    return np.tril(seen) if causal else seen


def runs_and_pairs(q_ids, k_ids, sizes, causal):
    """Each run of both kinds, with whether some and whether all pairs of its block and each of the
    others see each other, bool [others].

    Args:
      q_ids, k_ids: [B, tokens].
      sizes: of blocks of queries and of keys.
    """
    of_keys = np.asarray(runs_of_keys(q_ids, k_ids, *sizes, causal))
    of_queries = np.asarray(runs_of_queries(q_ids, k_ids, *sizes, causal))
    for b in range(len(q_ids)):
        seen = visible(q_ids[b], k_ids[b], causal)
        shape = seen.shape[0] // sizes[0], sizes[0], seen.shape[1] // sizes[1], sizes[1]
        blocks = seen.reshape(shape)
        some, every = blocks.any((1, 3)), blocks.all((1, 3))
        yield from zip(of_keys[b], some, every, strict=True)
        yield from zip(of_queries[b], some.T, every.T, strict=True)


def assert_right(run, some, every):
    """All that sees each other is in the run, and in its plain part there is nothing else."""
    begin, plain_begin, plain_end, end = run
    assert 0 <= begin <= plain_begin <= plain_end <= end <= len(some)
    assert not some[:begin].any()
    assert not some[end:].any()
    assert every[plain_begin:plain_end].all()


@SIZES
@CAUSAL
@pytest.mark.parametrize("padding", [0, 70])
def test_documents_of_one_sequence(sizes, causal, padding):
    """The run begins and ends with blocks that see something of each other, whatever is padding."""
    rng = np.random.default_rng(0)
    ids = np.stack([documents(rng, padding=p) for p in (padding, 0, padding, S)]).astype(np.int32)
    num_plain = 0
    for run, some, every in runs_and_pairs(ids, ids, sizes, causal):
        assert_right(run, some, every)
        begin, plain_begin, plain_end, end = run
        assert some[begin]
        assert some[end - 1]
        # Of the blocks that all see, those are found that lie together.
        assert (plain_end > plain_begin) == every.any()
        assert every.sum() == plain_end - plain_begin
        num_plain += plain_end - plain_begin
    assert num_plain > 0


@SIZES
@CAUSAL
def test_queries_and_keys_of_different_documents(sizes, causal):
    """Those of other parts of a sequence, of another length; some blocks see nothing."""
    rng = np.random.default_rng(1)
    q_ids = np.stack([documents(rng, S, padding) + first for padding, first in ((0, 2), (40, 0))])
    k_ids = np.stack([documents(rng, S // 2), documents(rng, S // 2)])
    q_ids[0, -128:] = 99
    empty = 0
    for run, some, every in runs_and_pairs(
        *(x.astype(np.int32) for x in (q_ids, k_ids)), sizes, causal
    ):
        assert_right(run, some, every)
        empty += not some.any()
    assert empty > 0


@SIZES
@CAUSAL
def test_ids_in_any_order(sizes, causal):
    rng = np.random.default_rng(2)
    blocks = np.repeat(rng.integers(0, 3, (2, 4, S // 64)), 64, axis=2)
    q_ids, k_ids = np.where(rng.random(blocks.shape) < 0.002, 1, blocks).astype(np.int32)
    for run, some, every in runs_and_pairs(q_ids, k_ids, sizes, causal):
        assert_right(run, some, every)


@SIZES
@CAUSAL
def test_nothing_to_see_is_an_empty_run(sizes, causal):
    q_ids, k_ids = np.full((2, S), 1, np.int32), np.full((2, S), 2, np.int32)
    for runs in (runs_of_keys, runs_of_queries):
        begin, plain_begin, plain_end, end = np.moveaxis(runs(q_ids, k_ids, *sizes, causal), -1, 0)
        for stop in (plain_begin, plain_end, end):
            np.testing.assert_array_equal(begin, stop)


def test_the_largest_id_there_is_and_padding_are_apart():
    """Padding counts as the last document; it is not the document with the last id."""
    ids = np.repeat([[2**31 - 1, 0]], 128, axis=1).astype(np.int32)
    for run, some, every in runs_and_pairs(ids, ids, (128, 128), True):
        assert_right(run, some, every)
