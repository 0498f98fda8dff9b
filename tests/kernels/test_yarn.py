"""YaRN against the formulas of Hugging Face's transformers and of DeepSeek's own model code."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.config.schema import RopeScalingConfig
from mxjax.kernels.rope import attention_scale, rope_amplitude, rope_frequencies, rope_table


def published_frequencies(dim, base, factor, beta_fast, beta_slow, length):
    """Pair by pair: blend of the extrapolated and the interpolated frequency."""

    def correction_dim(rotations):
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(correction_dim(beta_fast)), 0)
    high = min(math.ceil(correction_dim(beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    result = []
    for pair in range(dim // 2):
        extrapolated = 1 / base ** (2 * pair / dim)
        ramp = min(max((pair - low) / (high - low), 0), 1)
        mask = 1 - ramp
        result.append(extrapolated / factor * (1 - mask) + extrapolated * mask)
    return np.array(result)


@pytest.mark.parametrize(
    ("dim", "base", "factor", "beta_fast", "beta_slow", "length"),
    [
        (64, 10000.0, 40.0, 32.0, 1.0, 4096),  # DeepSeek-V2 and V3
        (128, 1e6, 4.0, 32.0, 1.0, 32768),  # Qwen3 with YaRN
        (4, 10000.0, 4.0, 32.0, 1.0, 64),
        (8, 10000.0, 8.0, 4.0, 3.9, 4),  # both ends of the ramp at the first pair
    ],
)
def test_frequencies_are_the_published_ones(dim, base, factor, beta_fast, beta_slow, length):
    scaling = RopeScalingConfig(
        kind="yarn",
        factor=factor,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        original_max_position_embeddings=length,
    )
    want = published_frequencies(dim, base, factor, beta_fast, beta_slow, length)
    np.testing.assert_allclose(rope_frequencies(dim, base, scaling), want, rtol=1e-6)


def test_default_temperature_is_the_papers():
    """cos and sin carry 0.1 ln(s) + 1 (equation 22: its square is 1 / t), scores nothing more."""
    scaling = RopeScalingConfig(kind="yarn", factor=16.0)
    assert rope_amplitude(scaling) == pytest.approx(0.1 * math.log(16) + 1)
    assert attention_scale(64, scaling) == pytest.approx(1 / 8)
    cos, sin = rope_table(jnp.zeros((1, 1), jnp.int32), np.ones(3, np.float32), 1.5)
    np.testing.assert_array_equal(cos, np.full((1, 1, 3), 1.5))
    np.testing.assert_array_equal(sin, np.zeros((1, 1, 3)))


def test_deepseek_puts_the_temperature_into_the_scores():
    """V2-Lite: mscale = mscale_all_dim = 0.707, factor 40, heads of 128 + 64."""
    scaling = RopeScalingConfig(kind="yarn", factor=40.0, mscale=0.707, mscale_all_dim=0.707)
    assert rope_amplitude(scaling) == 1
    m = 0.1 * 0.707 * math.log(40) + 1
    assert attention_scale(192, scaling) == pytest.approx(192**-0.5 * m * m)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_other_scalings_leave_temperature_alone(kind):
    scaling = RopeScalingConfig(kind=kind, mscale_all_dim=1.0)
    assert rope_amplitude(scaling) == 1
    assert attention_scale(64, scaling) == 1 / 8
