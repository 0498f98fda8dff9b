"""Permute and unpermute against products with a dense 0/1 matrix."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.kernels.implementation import interpreted
from mxjax.kernels.permute import (
    permute,
    plan_permute,
    plan_row_groups,
    unpermute,
    weights_of_places,
)

T, K, G, H = 11, 3, 5, 128


def groups(seed, empty_group=None):
    """[T, K] distinct groups per row, some choices absent."""
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(G)[:K] for _ in range(T)]).astype(np.int32)
    chosen[rng.random((T, K)) < 0.2] = -1
    if empty_group is not None:
        chosen[chosen == empty_group] = -1
    return chosen


def dense_places(group_TK, starts):
    """one[p, t, k] = 1 where choice k of row t sits at place p, in row order; and choices of each
    group."""
    one = np.zeros((starts[-1], T, K), np.float32)
    filled = np.zeros(G, int)
    for t, k in np.argwhere(group_TK >= 0):
        g = group_TK[t, k]
        place = starts[g] + filled[g]
        if place < starts[g + 1]:
            one[place, t, k] = 1
        filled[g] += 1
    return one, filled


def equal_places(group_TK, capacity):
    """A plan with so many places for each group, and the first place of each."""
    return plan_permute(jnp.asarray(group_TK), G, capacity), np.arange(G + 1) * capacity


def tiled_places(group_TK, num_rows):
    """A plan with tiles of 8 places, and the first place of each group."""
    counts = np.bincount(group_TK[group_TK >= 0], minlength=G)
    starts = np.minimum(np.append(0, np.cumsum(-(-counts // 8) * 8)), num_rows)
    plan, row_groups = plan_row_groups(jnp.asarray(group_TK), G, num_rows, 8)
    np.testing.assert_array_equal(row_groups.first_G1 * 8, starts)
    tiles = [g for g in range(G) for _ in range(starts[g], starts[g + 1], 8)]
    np.testing.assert_array_equal(row_groups.group_N[: len(tiles)], tiles)
    return plan, starts


@pytest.mark.parametrize(
    ("places", "size", "empty_group", "implementation"),
    [
        (equal_places, 11, 2, "xla"),
        (equal_places, 3, None, "xla"),
        (equal_places, 3, None, "mosaic"),
        (tiled_places, 24, None, "xla"),
        (tiled_places, 64, 2, "xla"),
        (tiled_places, 64, 2, "mosaic"),
    ],
)
def test_both_directions_equal_the_dense_reference(places, size, empty_group, implementation):
    """Values and gradients, in places of equal groups and of groups in tiles; some overflow and
    leave the later rows out. What is behind the last group matters to nobody."""
    group_TK = groups(size, empty_group)
    plan, starts = places(group_TK, size)
    one, filled = dense_places(group_TK, starts)
    rng = np.random.default_rng(size)
    x, g_out = (jnp.asarray(rng.standard_normal((T, H)), jnp.float32) for _ in range(2))
    weights = jnp.asarray(rng.random((T, K)), jnp.float32)
    np.testing.assert_array_equal(plan.counts_G, filled)

    def run(x, weights):
        rows = permute(x, plan, implementation=implementation)
        out = unpermute(jnp.sin(rows), weights, plan, implementation=implementation)
        return out, rows.reshape(-1, H)

    def reference(x, weights):
        rows = jnp.einsum("ptk,th->ph", one, x)
        return jnp.einsum("ptk,tk,ph->th", one, weights, jnp.sin(rows)), rows

    def with_gradients(run, x, weights):
        out, pullback, rows = jax.vjp(run, x, weights, has_aux=True)
        return rows[: starts[-1]], out, pullback(g_out)

    with interpreted():
        got = jax.jit(partial(with_gradients, run))(x, weights)
    for a, b in zip(
        jax.tree.leaves(got), jax.tree.leaves(with_gradients(reference, x, weights)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_weights_may_be_given_to_places_instead(implementation):
    """Values and gradients of rows that are weighted in their places and then added up."""
    plan = plan_permute(jnp.asarray(groups(0)), G, 3)
    rng = np.random.default_rng(0)
    y = jnp.asarray(rng.standard_normal((G, 3, H)), jnp.float32)
    weights, g_out = (jnp.asarray(rng.random(shape), jnp.float32) for shape in ((T, K), (T, H)))

    def run(y, weights):
        weighted = y * weights_of_places(weights, plan)[..., None]
        return unpermute(weighted, None, plan, implementation=implementation)

    def with_gradients(run):
        out, pullback = jax.vjp(run, y, weights)
        return out, *pullback(g_out)

    with interpreted():
        got = jax.jit(lambda: with_gradients(run))()
    expected = with_gradients(lambda y, weights: unpermute(y, weights, plan, implementation="xla"))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_places_that_nobody_fills_get_zero_gradients(implementation):
    """Matrix products over whole tiles add them up."""
    plan, groups = plan_row_groups(jnp.array([[0], [2], [0]]), 3, 32, 8)
    with interpreted():
        grad = jax.jit(
            jax.grad(
                lambda y: jnp.sum(
                    unpermute(y, jnp.ones((3, 1)), plan, implementation=implementation)
                )
            )
        )(jnp.full((32, 128), jnp.nan))
    used = int(groups.first_G1[-1]) * 8
    np.testing.assert_array_equal(grad[:used, 0], [1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])


def test_gradients_have_no_scatter_of_rows():
    """The backward passes are gathers: only the small index table is scattered."""
    plan = plan_permute(jnp.asarray(groups(0)), G, 16)

    def loss(x, weights):
        rows = permute(x, plan) * weights_of_places(weights, plan)[..., None]
        return jnp.sum((unpermute(rows, weights, plan) + unpermute(rows, None, plan)) ** 2)

    jaxpr = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(jnp.ones((T, H)), jnp.ones((T, K))))
    assert "gather" in jaxpr
    assert "scatter" not in jaxpr


def test_rows_may_have_more_choices_than_there_are_groups():
    """As in the all-to-all dispatcher: four experts of a token on two ranks, repeats taken out."""
    group_TK = jnp.array([[0, -1, 1, -1], [-1, -1, -1, 1], [-1, -1, -1, -1], [1, 0, -1, -1]])
    plan = plan_permute(group_TK, num_groups=2, capacity=3)
    x = jnp.arange(1.0, 5.0)[:, None]
    np.testing.assert_array_equal(permute(x, plan)[..., 0], [[1, 4, 0], [1, 2, 4]])
    np.testing.assert_array_equal(plan.counts_G, [2, 3])
    back = unpermute(permute(x, plan), jnp.ones(group_TK.shape), plan)
    np.testing.assert_array_equal(back, x * jnp.array([[2], [1], [0], [2]]))
