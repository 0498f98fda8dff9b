"""Cross entropy over a split vocabulary, against the formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from mxjax.kernels.cross_entropy import vocab_parallel_cross_entropy

T, V = 24, 16
Z_COEFF = 0.01


def reference(logits, targets, weights):
    """Sum of weights * (nll + Z_COEFF lse^2) over real targets, its gradient, nll and lse."""
    logits = logits.astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    probs = np.exp(logits - lse[:, None])
    real = targets >= 0
    one_hot = np.eye(V)[targets] * real[:, None]
    nll = np.where(real, lse - (one_hot * logits).sum(axis=1), 0)
    d_nll = probs - one_hot
    d_z = 2 * Z_COEFF * lse[:, None] * probs
    grad = (weights * real)[:, None] * (d_nll + d_z)
    lse = np.where(real, lse, 0)
    return np.sum(weights * (nll + Z_COEFF * lse**2)), grad, nll, lse


def sharded(logits, targets, weights, ranks):
    """The same with the vocabulary split over `ranks`."""

    def loss(logits_TV, targets_T, weights_T):
        nll_T, lse_T = vocab_parallel_cross_entropy(logits_TV, targets_T)
        # The value is equal on all ranks and the program's loss is the sum over them.
        total = jnp.sum(weights_T * (nll_T + Z_COEFF * lse_T**2)) / ranks
        return total, (total * ranks, nll_T, lse_T)

    def run(*arrays):
        grad, (total, nll_T, lse_T) = jax.grad(loss, has_aux=True)(*arrays)
        return total, grad, nll_T, lse_T

    split, whole = PartitionSpec(None, "tp"), PartitionSpec()
    function = jax.shard_map(
        run,
        mesh=Mesh(np.asarray(jax.devices()[:ranks]), ("tp",)),
        in_specs=(split, whole, whole),
        out_specs=(whole, split, whole, whole),
        check_vma=False,
    )
    return jax.jit(function)(logits, targets, weights)


def sample(scale):
    rng = np.random.default_rng(0)
    logits = (scale * rng.normal(size=(T, V))).astype(np.float32)
    targets = rng.integers(0, V, T).astype(np.int32)
    targets[::5] = -1
    return logits, targets, rng.normal(size=T).astype(np.float32)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loss_z_loss_and_gradient(ranks):
    """Every fifth token has no target: no loss and no gradient."""
    arrays = sample(scale=3)
    for got, expected in zip(sharded(*arrays, ranks), reference(*arrays), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_large_logits_do_not_overflow(ranks):
    arrays = sample(scale=1e4)
    for got, expected in zip(sharded(*arrays, ranks), reference(*arrays), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-3)


def test_bf16_logits_are_summed_in_fp32():
    """Loss as of fp32 logits with the same values; the gradient comes in the logits' precision."""
    logits, targets, weights = sample(scale=3)
    logits = jnp.asarray(logits, jnp.bfloat16)
    total, grad, nll, _ = sharded(logits, targets, weights, ranks=2)
    exact = reference(np.asarray(logits, np.float32), targets, weights)
    np.testing.assert_allclose(total, exact[0], rtol=1e-5)
    np.testing.assert_allclose(nll, exact[2], rtol=1e-5, atol=1e-6)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(grad, np.float32), exact[1], rtol=2**-8, atol=1e-6)
