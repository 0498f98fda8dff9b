"""Vocabulary projection and cross entropy, a part of the tokens at a time, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from mxjax.kernels import linear_cross_entropy as module
from mxjax.kernels.linear_cross_entropy import linear_cross_entropy

T, H, V = 24, 8, 16
FACTOR = 0.7
"""What the loss is multiplied by afterwards."""


def reference(x, weight, targets, z_loss_coeff):
    """Sums over real targets, and the gradients of FACTOR times the first."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    logits = x @ weight
    top = logits.max(axis=1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    probs = np.exp(logits - lse[:, None])
    real = targets >= 0
    one_hot = np.eye(V)[targets] * real[:, None]
    nll = np.where(real, lse - (one_hot * logits).sum(axis=1), 0)
    squared = np.where(real, lse**2, 0)
    d_logits = real[:, None] * (probs - one_hot + 2 * z_loss_coeff * lse[:, None] * probs)
    sums = nll.sum() + z_loss_coeff * squared.sum(), nll.sum(), squared.sum()
    return sums, (FACTOR * d_logits @ weight.T, FACTOR * x.T @ d_logits)


def sharded(x, weight, targets, z_loss_coeff, ranks=1, tied=False, differentiated=True):
    """The same with the vocabulary split over `ranks`."""

    def loss(x, weight, targets):
        sums = linear_cross_entropy(x, weight, targets, z_loss_coeff, tied)
        # The value is equal on all ranks and the program's loss is the sum over them.
        return FACTOR * sums[0] / ranks, sums

    def run(x, weight, targets):
        if not differentiated:
            return loss(x, weight, targets)[1]
        (d_x, d_weight), sums = jax.grad(loss, (0, 1), has_aux=True)(x, weight, targets)
        return sums, (jax.lax.psum(d_x, "tp"), d_weight)

    split = PartitionSpec("tp") if tied else PartitionSpec(None, "tp")
    whole = PartitionSpec()
    function = jax.shard_map(
        run,
        mesh=Mesh(np.asarray(jax.devices()[:ranks]), ("tp",)),
        in_specs=(whole, split, whole),
        out_specs=(whole, (whole, split)) if differentiated else whole,
        check_vma=False,
    )
    result = jax.jit(function)(x, weight.T if tied else weight, targets)
    if not differentiated:
        return result
    sums, (d_x, d_weight) = result
    return sums, (d_x, d_weight.T if tied else d_weight)


def sample(scale, dtype=jnp.float32):
    """Every fifth token has no target."""
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=shape) for shape in ((T, H), (H, V)))
    targets = rng.integers(0, V, T).astype(np.int32)
    targets[::5] = -1
    return jnp.asarray(scale * x, dtype), jnp.asarray(weight, dtype), targets


def exact(sample, z_loss_coeff):
    x, weight, targets = sample
    return reference(
        np.asarray(x, np.float32), np.asarray(weight, np.float32), targets, z_loss_coeff
    )


@pytest.fixture(params=[2**30, 7 * V * 4], ids=["at once", "in parts of unequal fill"])
def logits_bytes(request, monkeypatch):
    monkeypatch.setattr(module, "LOGITS_BYTES", request.param)


@pytest.mark.parametrize(
    ("ranks", "tied", "z_loss_coeff"), [(1, False, 0.0), (2, True, 0.01), (4, False, 0.01)]
)
def test_losses_and_gradients(logits_bytes, ranks, tied, z_loss_coeff):
    arrays = sample(scale=1)
    got = sharded(*arrays, z_loss_coeff, ranks, tied)
    for a, b in zip(
        jax.tree.leaves(got), jax.tree.leaves(exact(arrays, z_loss_coeff)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)


def test_losses_alone_are_the_same():
    arrays = sample(scale=1)
    got, _ = sharded(*arrays, 0.01, 2)
    alone = sharded(*arrays, 0.01, 2, differentiated=False)
    np.testing.assert_allclose(alone, got, rtol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_large_logits_do_not_overflow(ranks):
    arrays = sample(scale=1e4)
    (_, nll, _), grads = sharded(*arrays, 0.0, ranks)
    (_, expected, _), expected_grads = exact(arrays, 0.0)
    np.testing.assert_allclose(nll, expected, rtol=1e-5)
    for a, b in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_bf16_is_summed_in_fp32():
    """Logits, and what is handed on of them, are rounded to bf16; nothing else is."""
    arrays = sample(scale=1, dtype=jnp.bfloat16)
    sums, grads = sharded(*arrays, 0.0, 2)
    expected, expected_grads = exact(arrays, 0.0)
    np.testing.assert_allclose(sums[1], expected[1], rtol=2**-9)
    for a, b in zip(grads, expected_grads, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=2**-7 * np.abs(b).max())


def test_no_logits_of_all_tokens_exist(monkeypatch):
    """Neither in the forward nor in the backward pass."""
    monkeypatch.setattr(module, "LOGITS_BYTES", 8 * V * 4)
    x, weight, targets = sample(scale=1)
    jaxpr = str(jax.make_jaxpr(lambda *a: sharded(*a, 0.0))(x, weight, targets))
    assert f"f32[8,{V}]" in jaxpr
    assert f"f32[{T},{V}]" not in jaxpr
