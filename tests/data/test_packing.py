"""Packing is judged from outside, on a corpus in which token t is the t-th token of all, so that
each number in a sample says which document and place it came from."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from mxjax.data.packing import PackedSamples, padding_sample
from mxjax.data.store import TokenStore

LENGTHS = [7, 2, 31, 2, 2, 11, 5, 3, 64, 19]


def corpus(lengths=LENGTHS):
    lengths = np.array(lengths)
    return TokenStore(
        np.arange(lengths.sum(), dtype=np.uint16), np.cumsum(lengths) - lengths, lengths
    )


def packed(seq_length=8, lengths=LENGTHS, document_mask=True, shuffle_seed=0, num_epochs=None):
    return PackedSamples(
        corpus(lengths),
        seq_length,
        document_mask=document_mask,
        shuffle_seed=shuffle_seed,
        num_epochs=num_epochs,
    )


def epoch_of(samples, epoch=0):
    n = samples.samples_per_epoch
    return [samples[i] for i in range(epoch * n, (epoch + 1) * n)]


def real(sample, name):
    return sample[name][sample["segment_ids"] > 0].tolist()


def document_of(token, lengths=LENGTHS):
    return int(np.searchsorted(np.cumsum(lengths), token, side="right"))


def is_last_of_document(token, lengths=LENGTHS):
    return token + 1 in np.cumsum(lengths)


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


SEQ_LENGTHS = [1, 2, 5, 8, 29, 145, 146, 200]  # the corpus has 146 tokens


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("seq_length", SEQ_LENGTHS)
def test_each_token_is_an_input_exactly_once_per_epoch(seq_length, epoch):
    """But for the one that ends the epoch: it has no successor."""
    inputs = [t for sample in epoch_of(packed(seq_length), epoch) for t in real(sample, "tokens")]
    (missing,) = set(range(sum(LENGTHS))) - set(inputs)
    assert len(inputs) == len(set(inputs)) == sum(LENGTHS) - 1
    assert is_last_of_document(missing)


@pytest.mark.parametrize("seq_length", SEQ_LENGTHS)
def test_targets_are_next_tokens_and_stop_at_the_end_of_a_document(seq_length):
    targets = []
    for sample in epoch_of(packed(seq_length)):
        for token, target in zip(real(sample, "tokens"), real(sample, "targets"), strict=True):
            assert target == (-1 if is_last_of_document(token) else token + 1)
            targets.append(target)
    starts = np.cumsum(LENGTHS) - LENGTHS
    assert sorted(t for t in targets if t >= 0) == sorted(set(range(sum(LENGTHS))) - set(starts))


@pytest.mark.parametrize("seq_length", SEQ_LENGTHS)
def test_segments_are_documents_and_positions_count_from_their_start_in_the_sample(seq_length):
    for sample in epoch_of(packed(seq_length)):
        tokens, segments, positions = (
            real(sample, name) for name in ("tokens", "segment_ids", "positions")
        )
        assert segments[0] == 1
        for i, token in enumerate(tokens):
            new_document = i > 0 and document_of(token) != document_of(tokens[i - 1])
            assert i == 0 or segments[i] == segments[i - 1] + new_document
            assert positions[i] == (0 if i == 0 or new_document else positions[i - 1] + 1)


def test_a_sample_by_hand():
    """Documents 0 1 2 | 3 4 | 5 6 7 8, not shuffled, in windows of 4 inputs and their targets."""
    first, second = epoch_of(packed(4, [3, 2, 4], shuffle_seed=None))
    assert_same(
        first,
        {
            "tokens": [0, 1, 2, 3],
            "targets": [1, 2, -1, 4],
            "segment_ids": [1, 1, 1, 2],
            "positions": [0, 1, 2, 0],
        },
    )
    assert_same(
        second,
        {
            "tokens": [4, 5, 6, 7],
            "targets": [-1, 6, 7, 8],
            "segment_ids": [1, 2, 2, 2],
            "positions": [0, 0, 1, 2],
        },
    )


def test_without_a_document_mask_a_sample_is_one_segment():
    first, second = epoch_of(packed(5, [3, 2, 4], document_mask=False, shuffle_seed=None))
    assert_same(
        first,
        {
            "tokens": [0, 1, 2, 3, 4],
            "targets": [1, 2, 3, 4, 5],
            "segment_ids": [1] * 5,
            "positions": [0, 1, 2, 3, 4],
        },
    )
    assert_same(
        second,
        {
            "tokens": [5, 6, 7, 0, 0],
            "targets": [6, 7, 8, -1, -1],
            "segment_ids": [1, 1, 1, 0, 0],
            "positions": [0, 1, 2, 0, 0],
        },
    )


def test_the_last_window_of_an_epoch_is_padded():
    samples = epoch_of(packed(8, [20], shuffle_seed=None))
    assert [len(real(s, "tokens")) for s in samples] == [8, 8, 3]
    assert_same({name: array[3:] for name, array in samples[-1].items()}, padding_sample(5))


def test_a_corpus_shorter_than_a_sample_is_one_padded_sample():
    samples = packed(50, [4, 3], num_epochs=1)
    assert samples.num_samples == 1
    assert len(real(samples[0], "tokens")) == 6


def test_arrays_are_int32_and_of_full_length():
    for sample in epoch_of(packed(8)):
        assert sample.keys() == {"tokens", "targets", "segment_ids", "positions"}
        for array in sample.values():
            assert (array.dtype, array.shape) == (np.int32, (8,))


def test_reading_in_any_order_and_from_threads_gives_the_same_samples():
    """Sample i depends on i alone: not on what was read before, even across epochs."""
    expected = [packed()[i] for i in range(80)]  # a new object for each: nothing remembered
    samples = packed()
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(80), 3))
    with ThreadPoolExecutor(8) as pool:
        for i, sample in zip(order, pool.map(samples.__getitem__, map(int, order)), strict=True):
            assert_same(sample, expected[i])


def test_epochs_and_seeds_differ():
    def inputs(samples, epoch):
        return tuple(t for s in epoch_of(samples, epoch) for t in s["tokens"].tolist())

    orders = {
        inputs(packed(), 0),
        inputs(packed(), 1),
        inputs(packed(), 2),
        inputs(packed(shuffle_seed=1), 0),
    }
    assert len(orders) == 4


def test_documents_and_windows_are_shuffled():
    """Other documents meet in a window in each epoch, and consecutive windows are visited apart."""
    samples = packed(8, [5] * 200)
    neighbours = [
        {
            (document_of(a, [5] * 200), document_of(b, [5] * 200))
            for s in epoch_of(samples, e)
            for a, b in zip(s["tokens"][:-1].tolist(), s["tokens"][1:].tolist(), strict=True)
        }
        for e in (0, 1)
    ]
    different = [{pair for pair in pairs if pair[0] != pair[1]} for pairs in neighbours]
    assert len(different[0] & different[1]) < 10
    epoch = epoch_of(samples)
    follow = sum(int(a["targets"][-1]) == int(b["tokens"][0]) for a, b in pairwise(epoch))
    assert follow < 10


def test_without_shuffling_every_epoch_follows_the_store():
    samples = packed(8, shuffle_seed=None)
    for epoch in (0, 1):
        tokens = [t for s in epoch_of(samples, epoch) for t in real(s, "tokens")]
        assert tokens == list(range(sum(LENGTHS) - 1))


def test_samples_end_with_the_last_epoch():
    samples = packed(num_epochs=2)
    per_epoch = samples.samples_per_epoch
    assert per_epoch == 19  # 145 pairs of input and target
    assert samples.num_samples == 2 * per_epoch
    assert [samples.epoch(i) for i in (0, per_epoch - 1, per_epoch)] == [0, 0, 1]
    for index in (-1, 2 * per_epoch):
        with pytest.raises(IndexError, match=f"no sample {index}: .*to 37"):
            samples[index]


def test_endless_samples_have_no_number():
    assert packed().num_samples is None
    assert len(real(packed()[10**12], "tokens")) > 0


def test_fingerprint_changes_with_all_that_changes_a_sample():
    changed_token = corpus()
    changed_token.tokens[100] = 0
    variants = [
        packed(),
        packed(shuffle_seed=1),
        packed(shuffle_seed=None),
        packed(seq_length=9),
        packed(document_mask=False),
        packed(lengths=[9, *LENGTHS[2:]]),
        PackedSamples(changed_token, 8, document_mask=True, shuffle_seed=0, num_epochs=None),
    ]
    assert len({s.fingerprint for s in variants}) == len(variants)
    assert packed().fingerprint == packed(num_epochs=3).fingerprint


def test_reading_a_sample_does_not_walk_the_corpus():
    """It reads the tokens of its window; an order is made once per epoch and kept, the one before
    it too, because readers run ahead."""
    reads = []

    class CountedTokens:
        def __getitem__(self, positions):
            reads.append(positions.stop - positions.start)
            return np.zeros(reads[-1], np.uint16)

    lengths = np.full(400_000, 50)
    store = TokenStore(CountedTokens(), np.cumsum(lengths) - lengths, lengths)
    samples = PackedSamples(store, 128, document_mask=True, shuffle_seed=0, num_epochs=None)
    orders = []
    make_order = samples._make_order
    samples._make_order = lambda epoch: orders.append(epoch) or make_order(epoch)
    for i in range(100):
        samples[samples.samples_per_epoch + i]
        samples[samples.samples_per_epoch - 1 - i]
    assert sum(reads) == 129 * 200
    assert orders == [1, 0]
