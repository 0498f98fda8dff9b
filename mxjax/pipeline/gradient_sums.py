"""Sums of gradients over microbatches, in fp32 or better."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def sum_dtype(like: Any) -> jnp.dtype:
    """Precision of the sum of such gradients."""
    return jnp.promote_types(like.dtype, jnp.float32)


def zero_sums(like: Any) -> Any:
    """A sum of none, for gradients (or weights) like these."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, sum_dtype(a)), like)


def add(total: Any, grads: Any) -> Any:
    """`total` with the gradients of one more microbatch."""
    return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
