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
    # llama3: full scaling for long wavelengths, none for short ones, a linear blend between.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return (keep * frequencies + (1 - keep) * frequencies / scaling.factor).astype(np.float32)


def rope_table(positions_BS: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos and sin of each position's angles, each [B, S, head_dim / 2] fp32."""
    angles = positions_BS[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x_BSND: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate each pair (x[i], x[i + D/2]) by its position's angle."""
    cos, sin = (part[:, :, None, :] for part in table)
    first, second = jnp.split(x_BSND.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BSND.dtype)
