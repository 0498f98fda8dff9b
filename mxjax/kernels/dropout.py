"""Inverted dropout."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero each element with probability `rate` and divide the rest by 1 - rate; off if no key."""
    if rate == 0 or key is None:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
