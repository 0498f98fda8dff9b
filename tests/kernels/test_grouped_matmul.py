"""Grouped and batched matrix products, and their gradients, against numpy in fp32."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from mxjax.kernels.batched_matmul import batched_matmul
from mxjax.kernels.grouped_matmul import (
    WEIGHT_GRADIENT,
    grouped_matmul,
    grouped_matmul_weight_gradient,
)
from mxjax.kernels.grouped_matmul_mosaic import MatmulBlocks
from mxjax.kernels.implementation import ImplementationError, interpreted
from mxjax.kernels.row_groups import row_groups, sufficient_rows
from mxjax.pipeline.split import split_layer

TILE, ROWS = 64, 256
IMPLEMENTATIONS = ["xla", "mosaic"]


def problem(counts, K, N, dtype, rows=ROWS, tile=TILE, seed=0):
    """x and dy with zeros between the groups and NaN behind them, w, and the groups."""
    rng = np.random.default_rng(seed)
    groups = row_groups(jnp.array(counts, jnp.int32), rows, tile)
    first = np.array(groups.first_G1) * tile
    x, dy = np.zeros((rows, K), np.float32), np.zeros((rows, N), np.float32)
    for start, count in zip(first[:-1], counts, strict=True):
        x[start : start + count] = rng.normal(size=(count, K))
        dy[start : start + count] = rng.normal(size=(count, N))
    x[first[-1] :] = dy[first[-1] :] = np.nan
    w = rng.normal(size=(len(counts), K, N))
    return *(jnp.asarray(a, dtype) for a in (x, w, dy)), groups


def reference(x, w, dy, groups):
    """y, dx, dw in fp32; zeros behind the groups."""
    x, w, dy = (np.array(a, np.float32) for a in (x, w, dy))
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    first = np.array(groups.first_G1) * groups.tile
    for g, (a, b) in enumerate(itertools.pairwise(first)):
        y[a:b], dx[a:b], dw[g] = x[a:b] @ w[g], dy[a:b] @ w[g].T, x[a:b].T @ dy[a:b]
    return y, dx, dw


def assert_results(got, want, groups):
    used = int(groups.first_G1[-1]) * groups.tile
    for value, expected, rows in zip(got, want, (used, used, None), strict=True):
        assert value.dtype in (jnp.bfloat16, jnp.float32)
        tolerance = 2e-5 if value.dtype == jnp.float32 else 1e-2
        value, expected = np.array(value, np.float32)[:rows], expected[:rows]
        np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance * np.abs(want[0]).max())


def all_three(x, w, dy, groups, implementation):
    y, pullback = jax.vjp(
        lambda x, w: grouped_matmul(x, w, groups, implementation=implementation), x, w
    )
    return y, *pullback(dy)


# An interpreted kernel takes a second or more of compilation: one shape covers several cases.
@pytest.mark.parametrize(
    ("implementation", "dtype", "counts", "widths"),
    [
        ("xla", jnp.float32, (5, 0, 70, 64), (72, 40)),
        ("xla", jnp.bfloat16, (0, 130, 0), (24, 24)),
        ("mosaic", jnp.bfloat16, (5, 0, 70), (64, 320)),
    ],
)
def test_product_and_gradients(implementation, dtype, counts, widths):
    """Groups that are empty, odd, or have all rows; widths that are no whole tiles; and rows behind
    the last group that are not numbers."""
    x, w, dy, groups = problem(counts, *widths, dtype)
    with interpreted():
        got = jax.jit(lambda *args: all_three(*args, implementation))(x, w, dy, groups)
    assert_results(got, reference(x, w, dy, groups), groups)


@pytest.mark.parametrize(
    ("implementation", "blocks"),
    [("xla", None), ("mosaic", None), ("mosaic", MatmulBlocks(stages=2))],
    ids=["xla", "sums read ahead", "no memory to read far ahead"],
)
def test_weight_gradient_adds_into_a_given_one(implementation, blocks):
    """In fp32, and leaves the part of an empty group as it is, bit for bit."""
    x, w, dy, groups = problem((5, 0, 70), 64, 192, jnp.bfloat16)
    into = np.random.default_rng(1).normal(size=w.shape).astype(np.float32)
    with interpreted():
        total = jax.jit(
            lambda x, dy, groups, into: grouped_matmul_weight_gradient(
                x, dy, groups, into_GKN=into, implementation=implementation, blocks=blocks
            )
        )(x, dy, groups, into)
    assert total.dtype == jnp.float32
    np.testing.assert_array_equal(total[1], into[1])
    np.testing.assert_allclose(total, into + reference(x, w, dy, groups)[2], rtol=0, atol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_in_shard_map_with_types(implementation):
    """Rows that differ over an axis, and weights that do not, whose gradient is summed over it.
    (JAX interprets kernels on one device only.)"""
    x, w, dy, groups = problem((5, 66), 64, 64, jnp.bfloat16, rows=192)
    ranks, alike = PartitionSpec("ranks"), PartitionSpec()
    specs = (ranks, alike, ranks, jax.tree.map(lambda _: ranks, groups))
    run = jax.shard_map(
        partial(all_three, implementation=implementation),
        mesh=Mesh(np.array(jax.devices()[:1]), ("ranks",)),
        in_specs=specs,
        out_specs=(ranks, ranks, alike),
    )
    with interpreted():
        assert_results(jax.jit(run)(x, w, dy, groups), reference(x, w, dy, groups), groups)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_results_do_not_depend_on_where_groups_lie_or_on_the_run(implementation):
    """Bit for bit: groups in another order, with other neighbours, and again."""
    x, w, dy, groups = problem((66, 5), 64, 64, jnp.bfloat16, rows=192)
    order = jnp.array([1, 0])
    rows = jnp.concatenate([jnp.arange(128, 192), jnp.arange(128)])
    moved = row_groups(jnp.array([5, 66]), 192, TILE)
    run = jax.jit(lambda *args: all_three(*args, implementation))
    with interpreted():
        y, dx, dw = run(x, w, dy, groups)
        y_moved, dx_moved, dw_moved = run(x[rows], w[order], dy[rows], moved)
        again = run(x, w, dy, groups)
    jax.tree.map(np.testing.assert_array_equal, again, (y, dx, dw))
    jax.tree.map(
        np.testing.assert_array_equal,
        (y_moved, dx_moved, dw_moved),
        (y[rows], dx[rows], dw[order]),
    )


@pytest.mark.parametrize(("implementation", "name"), [("xla", "scan"), ("mosaic", "mpmd_map")])
def test_a_pipeline_can_put_the_gradient_of_the_weights_off(implementation, name):
    """Forward, input gradient and weight gradient are one call each, in F, B and W."""
    x, w, _, groups = problem((5, 70), 64, 64, jnp.bfloat16)

    def layer(w, x, groups):
        return grouped_matmul(x, w, groups, implementation=implementation), jnp.float32(0), ()

    with interpreted():
        split = split_layer(layer, w, x, groups)
    adds = implementation == "xla"  # an interpreted kernel does not
    for part in "FBW":
        names = [operation.name for operation in split.programs[part].operations]
        expected = WEIGHT_GRADIENT if part == "W" and adds else name
        assert names.count(expected) == 1, (part, names)
    assert len(split.adding) == adds


@pytest.mark.parametrize(
    ("dtype", "widths", "tile", "message"),
    [
        (jnp.float32, (64, 64), 64, "16-bit type, not float32"),
        (jnp.bfloat16, (64, 72), 64, "width 72 is no multiple of 64"),
        (jnp.bfloat16, (64, 64), 32, "tiles of 64 or 128 rows, not 32"),
    ],
)
def test_what_the_kernel_cannot_run_is_refused(dtype, widths, tile, message):
    x, w, _, groups = problem((5,), *widths, dtype, tile=tile)
    with interpreted(), pytest.raises(ImplementationError, match=message):
        grouped_matmul(x, w, groups, implementation="mosaic")


def test_rows_suffice_for_any_groups():
    """The least number that does, by trying all ways to deal a few rows to groups."""
    for rows, num_groups, tile in itertools.product(range(8), (1, 2, 3), (1, 2, 3)):
        ways = itertools.product(range(rows + 1), repeat=num_groups)
        needed = max(
            sum(-(-count // tile) * tile for count in counts)
            for counts in ways
            if sum(counts) == rows
        )
        assert sufficient_rows(rows, num_groups, tile) == needed


@pytest.mark.parametrize(("implementation", "rows"), [("xla", 5), ("mosaic", 64)])
def test_equal_groups(implementation, rows):
    """`batched_matmul` and its gradients."""
    rng = np.random.default_rng(0)
    x, w, dy = (
        jnp.asarray(rng.normal(size=size), jnp.bfloat16)
        for size in ((2, rows, 64), (2, 64, 64), (2, rows, 64))
    )

    def run(x, w, dy):
        product = partial(batched_matmul, implementation=implementation)
        y, pullback = jax.vjp(product, x, w)
        return y, *pullback(dy)

    with interpreted():
        got = jax.jit(run)(x, w, dy)
    x, w, dy = (np.array(a, np.float32) for a in (x, w, dy))
    want = x @ w, dy @ w.transpose(0, 2, 1), x.transpose(0, 2, 1) @ dy
    for value, expected in zip(got, want, strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(np.array(value, np.float32), expected, atol=1e-2 * scale)


def test_equal_groups_that_are_no_whole_tiles_are_refused():
    x, w = jnp.ones((2, 40, 64), jnp.bfloat16), jnp.ones((2, 64, 64), jnp.bfloat16)
    with interpreted(), pytest.raises(ImplementationError, match="40 rows of a group"):
        batched_matmul(x, w, implementation="mosaic")
