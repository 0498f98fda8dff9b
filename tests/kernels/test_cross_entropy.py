"""Vocabulary-parallel cross entropy against the plain one, value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from mxjax.kernels.cross_entropy import vocab_parallel_cross_entropy

T, V = 12, 32


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equals_log_softmax_over_the_whole_vocabulary(tp):
    rng = np.random.default_rng(0)
    logits = (4 * rng.standard_normal((T, V))).astype(np.float32)
    targets = rng.integers(0, V, T).astype(np.int32)
    targets[::5] = -1
    weight = rng.standard_normal(T).astype(np.float32)

    def plain(logits):
        lse = jax.nn.logsumexp(logits, axis=1)
        nll = lse - logits[jnp.arange(T), jnp.maximum(targets, 0)]
        real = targets >= 0
        return jnp.sum(jnp.where(real, weight * nll + 0.1 * lse**2, 0))

    def local(logits):
        def share(logits):
            nll, lse = vocab_parallel_cross_entropy(logits, targets)
            return jnp.sum(weight * nll + 0.1 * lse**2) / tp

        value, grad = jax.value_and_grad(share)(logits)
        return jax.lax.psum(value, "tp"), grad

    mesh = Mesh(np.array(jax.devices()[:tp]), ("tp",))
    split = PartitionSpec(None, "tp")
    run = jax.shard_map(
        local, mesh=mesh, in_specs=split, out_specs=(PartitionSpec(), split), check_vma=False
    )
    value, grad = jax.jit(run)(logits)
    want_value, want_grad = jax.value_and_grad(plain)(logits)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    np.testing.assert_allclose(grad, want_grad, rtol=1e-5, atol=1e-6)
    assert not np.any(np.asarray(grad)[::5])


def test_large_logits_do_not_overflow():
    logits = np.float32([[500.0, -500.0, 499.0]])
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    spec = PartitionSpec()
    run = jax.shard_map(
        lambda x: vocab_parallel_cross_entropy(x, np.int32([2])),
        mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False,
    )  # fmt: skip
    nll, lse = run(logits)
    np.testing.assert_allclose(nll, np.log1p(np.exp(1.0)), rtol=1e-6)
    np.testing.assert_allclose(lse, 500 + np.log1p(np.exp(-1.0)), rtol=1e-6)
