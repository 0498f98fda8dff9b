"""Permute and unpermute against products with a dense 0/1 matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.kernels.permute import permute, plan_permute, unpermute

T, K, G, H = 23, 3, 5, 7


def groups(seed, empty_group=None):
    """[T, K] distinct groups per row, some choices absent."""
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(G)[:K] for _ in range(T)]).astype(np.int32)
    chosen[rng.random((T, K)) < 0.2] = -1
    if empty_group is not None:
        chosen[chosen == empty_group] = -1
    return chosen


def dense_places(group_TK, capacity):
    """one[g, c, t, k] = 1 where choice k of row t sits at place c of group g, in row order."""
    one = np.zeros((G, capacity, T, K), np.float32)
    filled = np.zeros(G, int)
    for t in range(T):
        for k in range(K):
            g = group_TK[t, k]
            if g >= 0:
                if filled[g] < capacity:
                    one[g, filled[g], t, k] = 1
                filled[g] += 1
    return one, filled


@pytest.mark.parametrize(
    ("seed", "capacity", "empty_group"), [(0, 16, None), (1, 23, 2), (2, 4, None)]
)
def test_both_directions_equal_the_dense_reference(seed, capacity, empty_group):
    """Values and gradients; capacity 4 overflows and leaves the later rows out."""
    group_TK = groups(seed, empty_group)
    one, filled = dense_places(group_TK, capacity)
    rng = np.random.default_rng(seed)
    x, g_out = (jnp.asarray(rng.standard_normal((T, H)), jnp.float32) for _ in range(2))
    weights = jnp.asarray(rng.random((T, K)), jnp.float32)
    plan = plan_permute(jnp.asarray(group_TK), G, capacity)
    np.testing.assert_array_equal(plan.counts_G, filled)

    def run(x, weights):
        rows = permute(x, plan)
        return unpermute(jnp.sin(rows), weights, plan)

    def reference(x, weights):
        rows = jnp.einsum("gctk,th->gch", one, x)
        return jnp.einsum("gctk,tk,gch->th", one, weights, jnp.sin(rows))

    np.testing.assert_allclose(permute(x, plan), jnp.einsum("gctk,th->gch", one, x), rtol=1e-6)
    got, pullback = jax.vjp(run, x, weights)
    want, reference_pullback = jax.vjp(reference, x, weights)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(pullback(g_out), reference_pullback(g_out), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_have_no_scatter_of_rows():
    """The backward passes are gathers: only the small index table is scattered."""
    plan = plan_permute(jnp.asarray(groups(0)), G, 16)

    def loss(x, weights):
        return jnp.sum(unpermute(permute(x, plan), weights, plan) ** 2)

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
