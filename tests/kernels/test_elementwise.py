"""Rotary embedding, dropout and lookup against plain formulas; see test_fused_ops.py too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.config import RopeScalingConfig
from mxjax.kernels import embedding
from mxjax.kernels.dropout import dropout
from mxjax.kernels.rope import apply_rope, rope_frequencies, rope_table

RNG = np.random.default_rng(0)


def test_rope_is_a_rotation_of_complex_pairs():
    """The pair (x[i], x[i + D/2]) is a complex number; position p turns it by p * theta^(-2i/D)."""
    positions = np.array([[0, 1, 2, 700, 3]])
    x = RNG.standard_normal((1, 5, 2, 8)).astype(np.float32)
    got = apply_rope(x, rope_table(positions, rope_frequencies(8, 10000.0, None)))
    angles = positions[..., None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    z = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, :, None, :]
    np.testing.assert_allclose(got, np.concatenate([z.real, z.imag], -1), rtol=1e-4, atol=1e-4)


def test_llama3_scaling_follows_the_published_rule():
    """As in Llama 3.1's reference code: by wavelength, three ranges."""
    scaling = RopeScalingConfig(factor=8, original_max_position_embeddings=8192)
    plain = rope_frequencies(128, 500000.0, None).astype(np.float64)
    want = []
    for frequency in plain:
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            want.append(frequency)
        elif wavelength > 8192 / 1:
            want.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            want.append((1 - smooth) * frequency / 8 + smooth * frequency)
    np.testing.assert_allclose(rope_frequencies(128, 500000.0, scaling), want, rtol=1e-5)


def test_linear_scaling_divides_positions():
    scaling = RopeScalingConfig(kind="linear", factor=4)
    np.testing.assert_allclose(
        rope_frequencies(8, 1e4, scaling), rope_frequencies(8, 1e4, None) / 4, rtol=1e-6
    )


def test_dropout_keeps_the_mean_and_follows_its_key():
    x = jnp.ones((400, 100))
    y = dropout(x, 0.25, jax.random.key(0))
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    assert abs(float(jnp.mean(y)) - 1) < 0.02
    np.testing.assert_array_equal(y, dropout(x, 0.25, jax.random.key(0)))
    assert np.any(y != dropout(x, 0.25, jax.random.key(1)))
    assert dropout(x, 0.25, None) is x


@pytest.mark.parametrize("one_hot_rows", [0, 4096], ids=["scatter", "one-hot"])
def test_lookup_and_its_gradient(monkeypatch, one_hot_rows):
    """Ids of other ranks, below zero or past the end, give zeros and no gradient."""
    monkeypatch.setattr(embedding, "ONE_HOT_ROWS", one_hot_rows)
    table = RNG.standard_normal((9, 4)).astype(np.float32)
    ids = RNG.integers(-4, 13, (3, 20))
    grad_out = RNG.standard_normal((3, 20, 4)).astype(np.float32)
    rows, pullback = jax.vjp(lambda t: embedding.lookup(t, jnp.asarray(ids)), jnp.asarray(table))
    want, want_grad = np.zeros((3, 20, 4), np.float32), np.zeros((9, 4))
    for at in np.ndindex(ids.shape):
        if 0 <= ids[at] < 9:
            want[at] = table[ids[at]]
            want_grad[ids[at]] += grad_out[at]
    np.testing.assert_array_equal(rows, want)
    np.testing.assert_allclose(pullback(grad_out)[0], want_grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("one_hot_rows", [0, 4096], ids=["scatter", "one-hot"])
def test_lookup_gradient_of_a_frequent_token_is_not_rounded_away(monkeypatch, one_hot_rows):
    """4096 bf16 ones add up to 4096; in bf16 the sum would stop at 256."""
    monkeypatch.setattr(embedding, "ONE_HOT_ROWS", one_hot_rows)
    table = jnp.zeros((8, 2), jnp.bfloat16)
    ids = jnp.full((4096,), 3)
    _, pullback = jax.vjp(lambda t: embedding.lookup(t, ids), table)
    (grad,) = pullback(jnp.ones((4096, 2), jnp.bfloat16))
    np.testing.assert_array_equal(grad[3], 4096)
