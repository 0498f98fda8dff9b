"""Blocks of attention against loops in float64 and against JAX's own derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.kernels import attention_block as module
from mxjax.kernels.attention import causal_attention
from mxjax.kernels.attention_block import (
    MASKED,
    BlockOptions,
    attention_block,
    attention_block_gradient,
    tiled_causal_attention,
)
from mxjax.kernels.implementation import ImplementationError

B, Q, K, N, G, D, E = 2, 8, 12, 4, 2, 8, 6
OPTIONS = BlockOptions(scale=0.3)


def reference(q, k, v, ids, causal):
    """One query at a time: output and log-sum-exp."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full((B, N, q.shape[1]), MASKED)
    for b, s, n in np.ndindex(q.shape[:3]):
        last = s + 1 if causal else k.shape[1]
        seen = [t for t in range(last) if ids is None or ids[0][b, s] == ids[1][b, t]]
        if not seen:
            continue
        scores = 0.3 * k[b, seen, n // (N // G)] @ q[b, s, n]
        lse[b, n, s] = np.log(np.sum(np.exp(scores)))
        out[b, s, n] = np.exp(scores - lse[b, n, s]) @ v[b, seen, n // (N // G)]
    return out, lse


def sample(causal, packed):
    """Queries of documents 1 to 5 and keys of 1 to 4: those of document 5 see nothing."""
    rng = np.random.default_rng(0)
    keys = Q if causal else K
    q = rng.normal(size=(B, Q, N, D)).astype(np.float32)
    k = rng.normal(size=(B, keys, G, D)).astype(np.float32)
    v = rng.normal(size=(B, keys, G, E)).astype(np.float32)
    q_ids = np.sort(rng.integers(1, 6, (B, Q)), axis=1).astype(np.int32)
    q_ids[:, -1] = 5
    kv_ids = np.sort(rng.integers(1, 5, (B, keys)), axis=1).astype(np.int32)
    return q, k, v, (q_ids, kv_ids) if packed else None


CASES = pytest.mark.parametrize(
    ("causal", "packed"), [(True, False), (False, False), (True, True), (False, True)]
)
TILES = pytest.mark.parametrize("tile_rows", [512, 4], ids="tile {}".format)


@CASES
@TILES
def test_block_equals_loops(monkeypatch, causal, packed, tile_rows):
    """Also a row that sees nothing: 0, and the log-sum-exp that weighs nothing."""
    monkeypatch.setattr(module, "TILE_ROWS", tile_rows)
    inputs = sample(causal, packed)
    out, lse = attention_block(*inputs, None, causal=causal, options=OPTIONS)
    want_out, want_lse = reference(*inputs, causal)
    np.testing.assert_allclose(out, want_out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5)
    if packed:
        assert np.all(np.asarray(lse)[:, :, -1] == np.float32(MASKED))
        assert not np.any(np.asarray(out)[:, -1])


@CASES
@TILES
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_gradient_is_the_derivative_of_the_output(monkeypatch, causal, packed, tile_rows, rate):
    """Also under dropout, whose mask is the same in both passes."""
    monkeypatch.setattr(module, "TILE_ROWS", tile_rows)
    *qkv, ids = sample(causal, packed)
    key = jax.random.key(3) if rate else None
    options = BlockOptions(scale=0.3, dropout_rate=rate)

    def block(*qkv):
        return attention_block(*qkv, ids, key, causal=causal, options=options)

    (out, lse), pullback = jax.vjp(block, *qkv)
    d_out = np.random.default_rng(1).normal(size=out.shape).astype(np.float32)
    expected = pullback((d_out, jnp.zeros_like(lse)))
    got = attention_block_gradient(*qkv, ids, key, out, lse, d_out, causal=causal, options=options)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_dropout_leaves_out_its_share_of_the_probabilities_and_scales_up_the_rest():
    q, k, _, _ = sample(causal=False, packed=False)
    # With unit vectors as values the output is the row of probabilities.
    v = np.broadcast_to(np.eye(K, dtype=np.float32)[:, None], (B, K, G, K))

    def probs(rate, key):
        options = BlockOptions(scale=0.3, dropout_rate=rate)
        return attention_block(q, k, v, None, key, causal=False, options=options)[0]

    exact = probs(0.0, None)
    keys = jax.random.split(jax.random.key(0), 40)
    dropped = jax.vmap(lambda key: probs(0.25, key))(keys)
    kept = dropped != 0
    scaled = jnp.broadcast_to(exact / 0.75, kept.shape)
    np.testing.assert_allclose(dropped[kept], scaled[kept], rtol=1e-5)
    assert np.mean(kept) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_long_sequences_hold_no_square_of_scores(monkeypatch, rate):
    """8 rows of 64 instead of 64, in both passes; and the same result, without dropout."""
    S = 64
    monkeypatch.setattr(module, "TILE_ROWS", 8)
    rng = np.random.default_rng(0)
    q, w = rng.normal(size=(2, 1, S, N, D)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, S, G, D)).astype(np.float32)
    ids = np.sort(rng.integers(1, 4, (1, S)), axis=1).astype(np.int32)
    key = jax.random.key(0) if rate else None
    options = BlockOptions(D**-0.5, rate, "xla")

    def tiled(*qkv):
        return jnp.sum(w * tiled_causal_attention(*qkv, ids, key, options))

    def plain(*qkv):
        return jnp.sum(w * causal_attention(*qkv, segment_ids_BS=ids))

    gradients = jax.jit(jax.grad(tiled, argnums=(0, 1, 2)))
    if not rate:
        expected = jax.grad(plain, argnums=(0, 1, 2))(q, k, v)
        for a, b in zip(gradients(q, k, v), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jaxpr = str(jax.make_jaxpr(jax.grad(tiled, argnums=(0, 1, 2)))(q, k, v))
    assert f"{8 * N // G},{S}]" in jaxpr, "scores of a tile"
    assert f"{S * N // G},{S}]" not in jaxpr


def test_cudnn_on_cpu_is_an_error():
    q, k, v, _ = sample(causal=False, packed=False)
    options = BlockOptions(scale=1.0, implementation="cudnn")
    message = r"attention_implementation: cudnn .* no NVIDIA GPU"
    with pytest.raises(ImplementationError, match=message):
        attention_block(q, k, v, None, None, causal=False, options=options)
