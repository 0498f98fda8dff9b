"""The Mosaic kernels on a GPU: against plain formulas in fp32, and the same bits twenty times."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.kernels.attention import causal_attention
from mxjax.kernels.grouped_matmul import (
    grouped_matmul,
    grouped_matmul_input_gradient,
    grouped_matmul_weight_gradient,
)
from mxjax.kernels.permute import permute, plan_row_groups, unpermute
from mxjax.kernels.route import RoutingRule, route
from mxjax.kernels.row_groups import row_groups, sufficient_rows
from tests.kernels.fused_ops import OPS, value_and_gradients

pytestmark = pytest.mark.gpu

REPEATS = 20
TILE = 128


def same_bits(function, *arguments):
    """What it returns, after it has returned that so many times."""
    run = jax.jit(function)
    first = run(*arguments)
    for _ in range(REPEATS):
        jax.tree.map(np.testing.assert_array_equal, run(*arguments), first)
    return first


def assert_near(got, want, tolerance):
    """`tolerance` in multiples of the largest value."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", OPS)
def test_fused_op(name, dtype):
    """Forward and gradients, with the default blocks, on many rows of an odd number."""
    if name.startswith("rope_pairs") and dtype == "float32":
        pytest.skip("the kernel turns neighbours in bf16 only")
    op = OPS[name]
    rows = op.shapes if name.startswith("rope") else [
        (1023, *s[1:]) if s[0] == 3 else s for s in op.shapes
    ]  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(rows))
    arguments = [jax.random.normal(k, s, jnp.dtype(dtype)) for k, s in zip(keys, rows, strict=True)]
    run = partial(op.run, implementation="mosaic")
    got = same_bits(lambda *a: value_and_gradients(run, a), *arguments)
    exact = tuple(x.astype(jnp.float32) for x in arguments)
    want = jax.jit(lambda *a: value_and_gradients(op.formula, a))(*exact)
    assert_near(got, want, 2**-7 if dtype == "bfloat16" else 2e-5)


def counts_of(kind: str, E: int, rows: int) -> np.ndarray:
    """Rows of each expert: alike, skewed with empty ones and odd numbers, or all of one."""
    counts = np.full(E, rows // E, np.int32)
    if kind == "skewed":
        shares = 1 / np.arange(1, E + 1)
        counts = np.floor(rows * shares / shares.sum()).astype(np.int32)
        counts[E // 2] = 0
    elif kind == "one":
        counts[:] = 0
    counts[1] += rows - counts.sum()
    return counts


@pytest.mark.parametrize("kind", ["balanced", "skewed", "one"])
@pytest.mark.parametrize("sizes", [(8, 4096, 1024, 1408), (64, 8192, 2048, 704)], ids=str)
def test_grouped_matmul(sizes, kind):
    """Products and both gradients; N is no multiple of a tile's width."""
    E, rows, K, N = sizes
    counts = counts_of(kind, E, rows)
    R = sufficient_rows(rows, E, TILE)
    groups = row_groups(jnp.asarray(counts), R, TILE)
    tiles = -(-counts // TILE) * TILE
    starts = np.cumsum(tiles) - tiles
    filled = np.zeros(R, bool)
    for start, count in zip(starts, counts, strict=True):
        filled[start : start + count] = True
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (
        jnp.where(filled[:, None], jax.random.normal(k, (R, n), jnp.bfloat16), 0)
        for k, n in zip(keys[:2], (K, N), strict=True)
    )
    w = jax.random.normal(keys[2], (E, K, N), jnp.bfloat16)

    def products(x, dy, w):
        named = {"implementation": "mosaic"}
        return (
            grouped_matmul(x, w, groups, **named),
            grouped_matmul_input_gradient(dy, w, groups, **named),
            grouped_matmul_weight_gradient(x, dy, groups, **named),
        )

    used = int(tiles.sum())
    results = same_bits(lambda *a: _without_unused(products(*a), used), x, dy, w)
    y, dx, dw, x, dy, w = (np.asarray(a, np.float32) for a in (*results, x, dy, w))
    for e, (start, count) in enumerate(zip(starts, counts, strict=True)):
        here = slice(start, start + count)
        if count:
            assert_near(y[here], x[here] @ w[e], 2**-8)
            assert_near(dx[here], dy[here] @ w[e].T, 2**-8)
            assert_near(dw[e], x[here].T @ dy[here], 2e-5)
        else:
            assert not np.any(dw[e])


def _without_unused(results, used: int):
    """Rows of unused tiles hold anything."""
    y, dx, dw = results
    return y[:used], dx[:used], dw


@pytest.mark.parametrize("sizes", [(4096, 64, 6, 2048), (2048, 8, 2, 4096)], ids=str)
def test_permute_and_unpermute(sizes):
    assert_moves_rows_as_xla("mosaic", *sizes)


def assert_moves_rows_as_xla(implementation: str, T: int, E: int, K: int, H: int):
    """There and back, with gradients of rows and weights."""
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((T, E)) * np.linspace(0.5, 1, E), axis=1)[:, :K]
    rows = sufficient_rows(T * K, E, TILE)
    x = jnp.asarray(rng.normal(size=(T, H)), jnp.bfloat16)
    weights = jnp.asarray(rng.random((T, K)), jnp.float32)
    # Not made of `out`: one bf16 step there is several here.
    d_out = jnp.asarray(rng.normal(size=(T, H)), jnp.bfloat16)

    def there_and_back(implementation, x, weights):
        plan, _ = plan_row_groups(jnp.asarray(experts, jnp.int32), E, rows, TILE)

        def function(x, weights):
            y = permute(x, plan, implementation=implementation)
            return unpermute(y * 0.5, weights, plan, implementation=implementation)

        out, pullback = jax.vjp(function, x, weights)
        return out, pullback(d_out)

    got = same_bits(partial(there_and_back, implementation), x, weights)
    want = jax.jit(partial(there_and_back, "xla"))(x, weights)
    assert_near(got, want, 2**-7)


@pytest.mark.parametrize(
    ("T", "E", "rule"),
    [
        (8192, 64, RoutingRule(6, "softmax", False, False, 1.0)),
        (
            4096,
            256,
            RoutingRule(8, "sigmoid", False, True, 2.5, num_groups=8, group_topk=4, group_best=2),
        ),
    ],
    ids=["deepseek_v2_lite", "deepseek_v3"],
)
def test_route(T, E, rule):
    """Choices, weights, places and counts are those of the form without a kernel."""
    logits = jax.random.normal(jax.random.key(0), (T, E), jnp.float32)
    bias = 0.1 * jax.random.normal(jax.random.key(1), (E,))
    valid = jnp.arange(T) % 7 != 0

    def routed(implementation, logits):
        found = route(logits, bias, valid, rule, implementation=implementation)
        # The places of tokens that go nowhere hold anything.
        ranks_TK = jnp.where(valid[:, None], found.ranks_TK, 0)
        return found.experts_TK, ranks_TK, found.counts_E, found.weights_TK

    *places, weights = same_bits(partial(routed, "mosaic"), logits)
    *expected, expected_weights = jax.jit(partial(routed, "xla"))(logits)
    for a, b in zip(places, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5)


@pytest.mark.parametrize(
    ("S", "N", "G", "D", "E"),
    [(2048, 8, 2, 128, 128), (1024, 8, 8, 192, 128), (1024, 8, 1, 64, 64)],
    ids=["grouped", "latent", "narrow"],
)
def test_document_attention(S, N, G, D, E):
    """Output and gradients of bf16 are those of plain attention in fp32 but for bf16's rounding,
    relative to the norm of all. A sequence of many documents and padding, and one of few."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (N, D), (G, D), (G, E), (N, E)
    arrays = [
        jax.random.normal(key, (2, S, *shape), jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]
    borders = np.random.default_rng(0).random((2, S)) < np.array([[20 / S], [2 / S]])
    ids = 1 + np.cumsum(borders, axis=1)
    ids[0, -S // 10 :] = 0

    def run(implementation, q, k, v, d_out):
        options = {"segment_ids_BS": jnp.asarray(ids, jnp.int32), "implementation": implementation}
        out, pullback = jax.vjp(partial(causal_attention, **options), q, k, v)
        return out, *pullback(d_out)

    got = same_bits(partial(run, "mosaic"), *arrays)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(partial(run, "xla"))(*(x.astype(jnp.float32) for x in arrays))
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.linalg.norm(a - b) < 6e-3 * np.linalg.norm(b)
