"""Rotary position embedding (Su et al. 2021): first half paired with second half (Megatron, HF), or
neighbours."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.config.schema import RopeScalingConfig
from mxjax.kernels.implementation import Implementation, choose, shape_class, varying_alike
from mxjax.kernels.rope_mosaic import RopeBlocks, rope_obstacle, rotate


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


def apply_rope(
    x_BSND: jax.Array,
    table: tuple[jax.Array, jax.Array],
    *,
    interleaved: bool = False,
    implementation: Implementation | None = None,
    blocks: RopeBlocks | None = None,
) -> jax.Array:
    """Turn each pair of columns by its position's angle, computed in fp32.

    The gradient is the turn back: nothing but the table is kept.

    Args:
      x_BSND: queries or keys.
      table: cos and sin of `rope_table`, [B, S, P]. With 2 P < D only the first 2 P columns turn.
      interleaved: pairs are (x[2i], x[2i + 1]), as in the paper and DeepSeek's checkpoints; else
        (x[i], x[i + P]).
      implementation: `xla` or `mosaic`; None: by configuration and tuning table.
      blocks: of the Mosaic kernel; None: as measured, or its defaults.

    Returns:
      [B, S, N, D] in the dtype of x.

    Raises:
      ImplementationError: `implementation` cannot run this call.
    """
    P = table[0].shape[-1]
    choice = choose(
        "rope",
        implementation,
        shape_class=shape_class(x_BSND.dtype, x_BSND.shape[-1]),
        obstacles={"mosaic": rope_obstacle(x_BSND, P, interleaved)},
    )
    mosaic = choice.mosaic(blocks, RopeBlocks)
    return _turn(*varying_alike(x_BSND, *table), interleaved, mosaic)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _turn(x_BSND, cos_BSP, sin_BSP, interleaved: bool, mosaic: RopeBlocks | None):
    if mosaic is not None:
        N, D = x_BSND.shape[2:]
        flat = (part.reshape(-1, part.shape[-1]) for part in (cos_BSP, sin_BSP))
        turned = rotate(x_BSND.reshape(-1, N, D), *flat, interleaved, mosaic)
        return turned.reshape(x_BSND.shape)
    cos, sin = (part[:, :, None, :] for part in (cos_BSP, sin_BSP))
    P = cos.shape[-1]
    x, rest = x_BSND[..., : 2 * P].astype(jnp.float32), x_BSND[..., 2 * P :]
    pair_dim = x.ndim if interleaved else x.ndim - 1
    shape = (*x.shape[:-1], P, 2) if interleaved else (*x.shape[:-1], 2, P)
    first, second = jnp.unstack(x.reshape(shape), axis=pair_dim)
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=pair_dim)
    turned = turned.reshape(x.shape).astype(x_BSND.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def _turn_forward(x, cos, sin, interleaved, mosaic):
    return _turn(x, cos, sin, interleaved, mosaic), (cos, sin)


def _turn_backward(interleaved, mosaic, table, d_out):
    cos, sin = table
    return _turn(d_out, cos, -sin, interleaved, mosaic), None, None


_turn.defvjp(_turn_forward, _turn_backward)
