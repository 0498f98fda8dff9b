"""Attention over a split sequence against attention on one device, and the order of the split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mxjax.config import ParallelConfig
from mxjax.kernels.attention import causal_attention
from mxjax.sharding.context_parallel import RING, ContextParallel, attend, sequence_order
from mxjax.sharding.mesh import SEQUENCE_AXES, build_mesh

B, S, N, G, D, E = 2, 32, 4, 2, 8, 6
GATHER = ContextParallel("allgather")
SWAP = ContextParallel("ring", "alltoall")


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_rank_r_holds_the_chunks_r_and_its_mirror_image(cp):
    order = sequence_order(48, cp)
    chunks = np.arange(48).reshape(2 * cp, -1)
    for rank, part in enumerate(order.reshape(cp, -1)):
        expected = [*chunks[rank], *chunks[2 * cp - 1 - rank]]
        assert part.tolist() == expected
    # Equal work: a query's index is the number of keys that it sees.
    assert len(set(order.reshape(cp, -1).sum(axis=1))) == 1
    np.testing.assert_array_equal(order[np.argsort(order)], np.arange(48))


def test_one_rank_leaves_the_order_alone_and_an_odd_length_is_an_error():
    np.testing.assert_array_equal(sequence_order(7, 1), np.arange(7))
    with pytest.raises(ValueError, match=r"training.seq_length: 12 .* 2 \* parallel.cp = 8"):
        sequence_order(12, 4)


def sample():
    """Documents of odd lengths, one of them alone in its sequence; padding at an end."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(B, S, N, D)).astype(np.float32)
    k = rng.normal(size=(B, S, G, D)).astype(np.float32)
    v = rng.normal(size=(B, S, G, E)).astype(np.float32)
    w = rng.normal(size=(B, S, N, E)).astype(np.float32)
    ids = np.repeat([1, 2, 3, 4, 0], [7, 1, 14, 5, 5])
    return q, k, v, w, np.stack([ids, np.ones(S)]).astype(np.int32)


def outputs_and_gradients(attention, q, k, v, w):
    def weighted(q, k, v):
        out = attention(q, k, v)
        return jnp.sum(out * w), out

    grads, out = jax.grad(weighted, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return out, *grads


def split(cp, sp, choice, packed=True, **options):
    """Output and gradients of `attend` on cp x sp devices, in the order of the sequence."""
    order = sequence_order(S, cp)
    spec = PartitionSpec(None, SEQUENCE_AXES)

    def local(q, k, v, w, ids):
        attention = functools.partial(
            attend, segment_ids_Bs=ids if packed else None, context_parallel=choice, **options
        )
        return outputs_and_gradients(attention, q, k, v, w)

    mesh = build_mesh(ParallelConfig(dp=1, cp=cp, sp=sp), jax.devices()[: cp * sp])
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    results = jax.jit(run)(*(x[:, order] for x in sample()))
    return [np.asarray(x)[:, np.argsort(order)] for x in results]


@functools.cache
def plain(packed):
    *inputs, ids = sample()
    attention = functools.partial(causal_attention, segment_ids_BS=ids if packed else None)
    return outputs_and_gradients(attention, *inputs)


@pytest.mark.parametrize(
    ("cp", "sp", "choice", "packed"),
    [
        (2, 1, RING, True),
        (4, 1, RING, True),
        (4, 1, RING, False),
        (4, 1, SWAP, True),
        (8, 1, SWAP, True),
        (4, 1, GATHER, True),
        (2, 1, GATHER, False),
        (1, 2, RING, True),
        (1, 4, RING, True),
        (2, 4, GATHER, True),
        (4, 2, RING, True),
    ],
    ids=str,
)
def test_attention_is_that_of_one_device(cp, sp, choice, packed):
    """Forward and gradients; with `sp` 4 there are more ranks than key/value heads."""
    for got, expected in zip(split(cp, sp, choice, packed), plain(packed), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("choice", [RING, GATHER], ids=str)
def test_dropout_has_the_same_mask_in_both_passes(choice):
    """Under a given key the output is linear in v: <w, out> = <v, dv>. And it follows the key."""
    options = {"dropout_rate": 0.5}
    runs = [split(2, 1, choice, dropout_key=jax.random.key(i), **options) for i in (0, 0, 1)]
    _, _, v, w, _ = sample()
    out, *_, d_v = runs[0]
    assert np.sum(w * out) == pytest.approx(np.sum(v * d_v), rel=1e-4)
    assert np.array_equal(out, runs[1][0])
    assert not np.allclose(out, runs[2][0])
    assert not np.allclose(out, plain(True)[0])


def test_a_ring_needs_the_memory_of_a_few_blocks_however_long_the_sequence_becomes():
    """With a part of fixed length per rank, more ranks cost nothing; an all-gather's memory grows."""
    spec = PartitionSpec(None, SEQUENCE_AXES)

    def temporary_bytes(cp, choice):
        def local(q, k, v, w):
            attention = functools.partial(attend, segment_ids_Bs=None, context_parallel=choice)
            return outputs_and_gradients(attention, q, k, v, w)

        mesh = build_mesh(ParallelConfig(dp=1, cp=cp), jax.devices()[:cp])
        run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        x = jax.ShapeDtypeStruct(
            (1, 8 * cp, 1, 512), jnp.float32, sharding=NamedSharding(mesh, spec)
        )
        return jax.jit(run).lower(x, x, x, x).compile().memory_analysis().temp_size_in_bytes

    block = 2 * 8 * 512 * 4  # keys and values
    assert temporary_bytes(8, RING) < temporary_bytes(4, RING) + block / 4
    assert temporary_bytes(8, GATHER) > temporary_bytes(4, GATHER) + 4 * block
