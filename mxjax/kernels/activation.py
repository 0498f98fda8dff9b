"""MLP non-linearities."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, computed in fp32 (Shazeer 2020)."""
    gate32 = gate.astype(jnp.float32)
    return (jax.nn.silu(gate32) * up.astype(jnp.float32)).astype(gate.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """GELU in its tanh form (GPT-2), computed in fp32."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)
