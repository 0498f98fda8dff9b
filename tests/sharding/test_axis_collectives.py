"""Collectives by axis name agree with where `PartitionSpec` puts things, and cost nothing alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mxjax.config import ParallelConfig
from mxjax.sharding import collectives, tensor_parallel
from mxjax.sharding.mesh import build_mesh

PAIR = ("dp", "ep")
X = np.arange(24.0).reshape(8, 3)


def per_rank(function, x=X, in_spec=None, out_spec=None):
    """`function` in a `shard_map` over dp 2 x ep 2 x tp 2; every rank holds all of `x` unless
    `in_spec` splits it, and results are put side by side, tp innermost."""
    mesh = build_mesh(ParallelConfig(dp=2, ep=2, tp=2))
    run = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_spec or PartitionSpec(),
        out_specs=out_spec or PartitionSpec(mesh.axis_names),
        check_vma=False,
    )
    return np.asarray(jax.jit(run)(x))


@pytest.mark.parametrize("axes", ["tp", PAIR, ("ep", "dp"), ("dp", "cp", "sp")], ids=str)
def test_shard_takes_the_part_that_a_partition_spec_gives(axes):
    """Also of several axes together, the first outermost; axes of size 1 do not matter."""
    parts = per_rank(lambda x: collectives.shard(x, axes, dim=0))
    placed = per_rank(lambda x: x, in_spec=PartitionSpec(axes))
    np.testing.assert_array_equal(parts, placed)


@pytest.mark.parametrize("axes", ["tp", PAIR, ("ep", "dp")], ids=str)
def test_all_gather_undoes_shard_and_reduce_scatter_sums_it(axes):
    size = 2 if axes == "tp" else 4

    def local(x):
        part = collectives.shard(x, axes, dim=0)
        summed = collectives.reduce_scatter(x, axes, dim=0)
        return collectives.all_gather(part, axes, dim=0), summed - size * part

    gathered, difference = (
        per_rank(lambda x, i=i: local(x)[i]).reshape(8, -1, 3) for i in range(2)
    )
    np.testing.assert_array_equal(gathered, np.broadcast_to(X, (8, 8, 3)))
    assert not difference.any()


def test_all_to_all_swaps_sender_and_receiver():
    """Entry d of rank r arrives as entry r of rank d."""

    def local(_):
        rank = collectives.axis_index(PAIR)
        return collectives.all_to_all(10 * rank + jnp.arange(4), PAIR)

    received = per_rank(local).reshape(4, 2, 4)[:, 0]  # tp ranks hold the same
    np.testing.assert_array_equal(received, [[10 * r + d for r in range(4)] for d in range(4)])


def test_reductions_are_over_the_named_axes():
    def local(_):
        rank = collectives.axis_index(("dp", "ep", "tp"))
        return jnp.stack([collectives.psum(rank, PAIR), collectives.pmax(rank, "tp")])[None]

    ranks = np.arange(8).reshape(4, 2)
    expected = np.stack([np.broadcast_to(ranks.sum(0), (4, 2)), ranks | 1], axis=-1)
    np.testing.assert_array_equal(per_rank(local), expected.reshape(8, 2))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_gradient_of_a_tensor_parallel_region_is_that_of_one_device(sequence_parallel):
    """A column-parallel and a row-parallel matrix between `enter` and `leave`, [B, S, H]."""
    rng = np.random.default_rng(0)
    x, up, down = rng.normal(size=(2, 4, 3)), rng.normal(size=(3, 6)), rng.normal(size=(6, 3))
    weight = rng.normal(size=x.shape)

    def plain(x, up, down):
        return jnp.sum(weight * (jnp.sin(x @ up) @ down))

    def share(x, up, down, weight):
        inner = jnp.sin(tensor_parallel.enter(x, sequence_parallel) @ up)
        out = tensor_parallel.leave(inner @ down, sequence_parallel)
        return jnp.sum(weight * out) / (1 if sequence_parallel else 2)

    def local(*inputs):
        d_x, d_up, d_down = jax.grad(share, argnums=(0, 1, 2))(*inputs)
        # Copies of a replicated value have each a part of its gradient.
        return d_x if sequence_parallel else collectives.psum(d_x, "tp"), d_up, d_down

    stream = PartitionSpec(None, "tp" if sequence_parallel else None)
    specs = (stream, PartitionSpec(None, "tp"), PartitionSpec("tp"))
    mesh = build_mesh(ParallelConfig(dp=1, tp=2), jax.devices()[:2])
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(*specs, stream), out_specs=specs, check_vma=False
    )
    got = jax.jit(run)(x, up, down, weight)
    for a, b in zip(got, jax.grad(plain, argnums=(0, 1, 2))(x, up, down), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_axes_of_size_one_leave_no_trace():
    def local(x):
        for axes in ("tp", PAIR):
            x = collectives.all_gather(x, axes, 0) + collectives.shard(x, axes, 0)
            x = collectives.psum(x, axes) + collectives.pmax(x, axes)
            x = collectives.reduce_scatter(x, axes, 0) + collectives.axis_index(axes)
            x = collectives.all_to_all(x, axes)
        return x

    mesh = build_mesh(ParallelConfig(dp=1), jax.devices()[:1])
    spec = PartitionSpec()
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    jaxpr = str(jax.make_jaxpr(run)(X))
    for name in ("all_gather", "psum", "pmax", "reduce_scatter", "axis_index", "all_to_all"):
        assert name not in jaxpr
