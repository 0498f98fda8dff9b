"""Rotary position embedding (Su et al. 2021), first half paired with second half (Megatron, HF)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.config.schema import RopeScalingConfig


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScalingConfig | None) -> np.ndarray:
    """Radians per position of each pair, [head_dim / 2] fp32."""
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies.astype(np.float32)
    if scaling.kind == "linear":
        return (frequencies / scaling.factor).astype(np.float32)
    if scaling.kind == "yarn":
        keep = _yarn_keep(head_dim, theta, scaling)
        return (keep * frequencies + (1 - keep) * frequencies / scaling.factor).astype(np.float32)
    # llama3: full scaling for long wavelengths, none for short ones, a linear blend between.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return (keep * frequencies + (1 - keep) * frequencies / scaling.factor).astype(np.float32)


def _yarn_keep(head_dim: int, theta: float, scaling: RopeScalingConfig) -> np.ndarray:
    """YaRN (Peng et al. 2023, section 3.2, as in the code of its authors and of DeepSeek): 1 for
    the pairs that keep their frequency, 0 for those divided by `factor`, a ramp between."""

    def pair_that_turns(times: float) -> float:
        length = scaling.original_max_position_embeddings
        return head_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.beta_slow)), head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / max(high - low, 0.001)
    return 1 - np.clip(ramp, 0, 1)


def _yarn_temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1


def rope_amplitude(scaling: RopeScalingConfig | None) -> float:
    """What cos and sin are multiplied by: 1, except for YaRN."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    temperature = _yarn_temperature(scaling.factor, scaling.mscale)
    return temperature / _yarn_temperature(scaling.factor, scaling.mscale_all_dim)


def attention_scale(head_dim: int, scaling: RopeScalingConfig | None) -> float:
    """What scores q k^T are multiplied by: 1 / sqrt(head_dim), with YaRN's correction."""
    scale = 1 / math.sqrt(head_dim)
    if scaling is None or scaling.kind != "yarn":
        return scale
    return scale * _yarn_temperature(scaling.factor, scaling.mscale_all_dim) ** 2


def rope_table(
    positions_BS: jax.Array, frequencies: np.ndarray, amplitude: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of each position's angles, each [B, S, head_dim / 2] fp32, times `amplitude`."""
    angles = positions_BS[..., None].astype(jnp.float32) * frequencies
    return amplitude * jnp.cos(angles), amplitude * jnp.sin(angles)


def apply_rope(x_BSND: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate each pair (x[i], x[i + D/2]) by its position's angle."""
    cos, sin = (part[:, :, None, :] for part in table)
    first, second = jnp.split(x_BSND.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BSND.dtype)
