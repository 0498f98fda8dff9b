"""Causal attention against loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.kernels.attention import causal_attention

B, S, D = 2, 11, 8


def loops(q, k, v, segments):
    """Token by token, head by head."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    N, G = q.shape[2], k.shape[2]
    out = np.zeros_like(q)
    for b in range(B):
        for n in range(N):
            g = n // (N // G)
            for s in range(S):
                seen = [t for t in range(s + 1) if segments[b, t] == segments[b, s]]
                scores = np.array([q[b, s, n] @ k[b, t, g] for t in seen]) / np.sqrt(D)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[b, s, n] = sum(w * v[b, t, g] for w, t in zip(weights, seen, strict=True))
    return out


def inputs(heads, groups):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(B, S, heads, D), (B, S, groups, D), (B, S, groups, D)]
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equals_loops(groups):
    """Multi-query, grouped-query and full multi-head attention."""
    q, k, v = inputs(4, groups)
    got = causal_attention(q, k, v)
    np.testing.assert_allclose(got, loops(q, k, v, np.zeros((B, S))), rtol=1e-5, atol=1e-6)


def test_documents_do_not_see_each_other():
    segments = np.sort(np.random.default_rng(0).integers(0, 4, (B, S)), axis=1)
    q, k, v = inputs(4, 2)
    got = causal_attention(q, k, v, segment_ids_BS=jnp.asarray(segments))
    np.testing.assert_allclose(got, loops(q, k, v, segments), rtol=1e-5, atol=1e-6)


def test_gradient_flows_only_within_a_document():
    segments = jnp.asarray(np.repeat([[0] * 5 + [1] * 6], B, axis=0))
    q, k, v = inputs(2, 2)
    grad = jax.grad(lambda v: jnp.sum(causal_attention(q, k, v, segment_ids_BS=segments)[:, 5:]))(v)
    assert not np.any(np.asarray(grad)[:, :5])
    assert np.all(np.any(np.asarray(grad)[:, 5:] != 0, axis=(0, 2, 3)))


def test_dropout_follows_its_key_and_keeps_the_mean():
    q, k, v = inputs(2, 2)
    drop = jax.jit(lambda key: causal_attention(q, k, v, dropout_rate=0.5, dropout_key=key))
    keys = jax.random.split(jax.random.key(1), 2000)
    np.testing.assert_array_equal(drop(keys[0]), drop(keys[0]))
    assert np.any(drop(keys[0]) != drop(keys[1]))
    mean = jnp.mean(jax.vmap(drop)(keys), axis=0)
    # 2000 draws of values of size ~1: standard error about 0.02.
    np.testing.assert_allclose(mean, causal_attention(q, k, v), atol=0.12)


def test_a_named_implementation_that_cannot_run_says_why():
    with pytest.raises(ValueError, match=r"cudnn cannot run here: no NVIDIA GPU; use auto"):
        causal_attention(*inputs(2, 2), implementation="cudnn")
