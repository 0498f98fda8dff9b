"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016) over the last dim, in fp32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * scale; result in the dtype of x."""
    x32 = x.astype(jnp.float32)
    rstd = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    return (x32 * rstd * scale.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias; result in the dtype of x."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    rstd = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
    y = centred * rstd * scale.astype(jnp.float32) + bias.astype(jnp.float32)
    return y.astype(x.dtype)
