"""Causal attention with grouped queries and document masks.

Shapes: B batch, S sequence, N query heads, G key/value heads (N a multiple of G), D head width.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp

Implementation = Literal["auto", "cudnn", "xla"]


def causal_attention(
    q_BSND: jax.Array,
    k_BSGD: jax.Array,
    v_BSGD: jax.Array,
    *,
    segment_ids_BS: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v over earlier tokens of the same segment, [B, S, N, D].

    Args:
      segment_ids_BS: a token sees only tokens with its own id; None: one segment.
      dropout_rate, dropout_key: dropout of the probabilities; off without a key.
      implementation: `cudnn` needs an NVIDIA GPU, 16-bit inputs and no dropout; `auto` takes it
        where it can run, else `xla`.

    Raises:
      ValueError: `cudnn` was named and cannot run this call.
    """
    dropout = dropout_rate > 0 and dropout_key is not None
    obstacle = _cudnn_obstacle(q_BSND, dropout)
    if implementation == "cudnn" and obstacle:
        raise ValueError(f"attention_implementation: cudnn cannot run here: {obstacle}; use auto")
    if implementation == "xla" or obstacle:
        return _xla_attention(
            q_BSND, k_BSGD, v_BSGD, segment_ids_BS, dropout_rate if dropout else 0.0, dropout_key
        )
    mask = None if segment_ids_BS is None else _same_segment(segment_ids_BS)[:, None]
    return jax.nn.dot_product_attention(
        q_BSND, k_BSGD, v_BSGD, mask=mask, is_causal=True, implementation="cudnn"
    )


def _cudnn_obstacle(q_BSND: jax.Array, dropout: bool) -> str | None:
    if jax.default_backend() != "gpu":
        return "no NVIDIA GPU"
    if q_BSND.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in 16 bits, not {q_BSND.dtype}"
    head_dim = q_BSND.shape[-1]
    if head_dim % 8 or head_dim > 256:
        return f"head_dim {head_dim} is not a multiple of 8 up to 256"
    return "attention dropout" if dropout else None


def _same_segment(segment_ids_BS: jax.Array) -> jax.Array:
    return segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]


def _xla_attention(q_BSND, k_BSGD, v_BSGD, segment_ids_BS, dropout_rate, dropout_key):
    """The reference: scores in fp32, of size [B, N, S, S]."""
    B, S, N, D = q_BSND.shape
    G = k_BSGD.shape[2]
    R = N // G
    # Heads first and the R heads of a group as more rows: plain batched matrix products.
    q_BGXD = q_BSND.reshape(B, S, G, R, D).transpose(0, 2, 3, 1, 4).reshape(B, G, R * S, D)
    k_BGSD, v_BGSD = k_BSGD.transpose(0, 2, 1, 3), v_BSGD.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bgxd,bgtd->bgxt", q_BGXD, k_BGSD, preferred_element_type=jnp.float32)
    scores = scores.reshape(B, G, R, S, S) / math.sqrt(D)
    mask_BST = jnp.tril(jnp.ones((S, S), bool))[None]
    if segment_ids_BS is not None:
        mask_BST = mask_BST & _same_segment(segment_ids_BS)
    scores = jnp.where(mask_BST[:, None, None], scores, jnp.finfo(jnp.float32).min)
    probs = jax.nn.softmax(scores, axis=-1)
    if dropout_rate:
        keep = jax.random.bernoulli(dropout_key, 1 - dropout_rate, probs.shape)
        probs = jnp.where(keep, probs / (1 - dropout_rate), 0)
    probs_BGXT = probs.reshape(B, G, R * S, S).astype(v_BSGD.dtype)
    out_BGXD = jnp.einsum("bgxt,bgtd->bgxd", probs_BGXT, v_BGSD)
    return out_BGXD.reshape(B, G, R, S, D).transpose(0, 3, 1, 2, 4).reshape(B, S, N, D)
