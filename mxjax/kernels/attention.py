"""Causal attention with grouped queries and document masks.

Shapes: B batch, S sequence, N query heads, G key/value heads (N a multiple of G), D width of query
and key heads, E width of value heads (D except in multi-head latent attention).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mxjax.kernels.attention_block import (
    RESULTS,
    BlockOptions,
    SegmentIds,
    check_shapes,
    document_ids,
    document_mask,
    grouped,
    named_results,
    same_segment,
    tiled_causal_attention,
    ungrouped,
)
from mxjax.kernels.attention_choice import Implementation, choose_attention
from mxjax.kernels.attention_cudnn import (
    CudnnCall,
    cudnn_forward,
    cudnn_gradient,
)
from mxjax.kernels.attention_mosaic import DocumentCall
from mxjax.kernels.attention_mosaic_forward import document_attention
from mxjax.kernels.attention_mosaic_gradient import document_attention_gradient
from mxjax.kernels.dropout import dropout
from mxjax.kernels.implementation import plans, varying_alike
from mxjax.scoped import scoped

LONG_SEQUENCE = 4096
"""Above it the XLA form computes scores again in the backward pass instead of keeping them."""


def always_tiled() -> AbstractContextManager[None]:
    """What is traced inside keeps no scores where a kernel would run, whatever the length: for
    plans of a GPU from shapes."""
    return scoped(plans, "shapes")


def stand_in() -> AbstractContextManager[None]:
    """What is traced inside has, where cuDNN's attention would run, a kernel of its sizes that does
    nothing: for plans from programs that are compiled where cuDNN is not, and never run."""
    return scoped(plans, "program")


def causal_attention(
    q_BSND: jax.Array,
    k_BSGD: jax.Array,
    v_BSGE: jax.Array,
    *,
    segment_ids_BS: jax.Array | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: Implementation = "auto",
    deterministic: bool = False,
) -> jax.Array:
    """softmax(scale * q k^T) v over earlier tokens of the same segment, [B, S, N, E].

    Args:
      scale: None: 1 / sqrt(D).
      segment_ids_BS: a token sees only tokens with its own id; None: one segment.
      dropout_rate, dropout_key: dropout of the probabilities; off without a key.
      implementation: `cudnn` needs an NVIDIA GPU, 16-bit inputs and no dropout; `mosaic`, which
        passes over what segments exclude, a Hopper GPU, bfloat16 and no dropout; `auto` takes the
        first that can run: `mosaic` for segments, `cudnn`, `xla`.
      deterministic: `auto` takes `mosaic` in the place of cuDNN, whose gradients vary a little from
        run to run.

    Raises:
      ValueError: shapes do not fit each other.
      ImplementationError: an implementation was named that cannot run this call.
    """
    check_shapes(q_BSND, k_BSGD, v_BSGE, _pair(segment_ids_BS))
    scale = 1 / math.sqrt(q_BSND.shape[-1]) if scale is None else scale
    has_dropout = dropout_rate > 0 and dropout_key is not None
    chosen = choose_attention(
        implementation,
        q_BSND,
        k_BSGD,
        v_BSGE,
        documents=segment_ids_BS is not None,
        dropout=has_dropout,
        scale=scale,
        deterministic=deterministic,
    ).implementation
    rate, key = (dropout_rate, dropout_key) if has_dropout else (0.0, None)
    if chosen != "xla" and plans.get() != "shapes":
        operands = varying_alike(q_BSND, k_BSGD, v_BSGE, segment_ids_BS)
        if chosen == "mosaic":
            return _mosaic_attention(*operands, DocumentCall.of(q_BSND, scale, causal=True))
        call = CudnnCall(scale, causal=True, stand_in=plans.get() == "program")
        return _cudnn_attention(*operands, call)
    if chosen != "xla" or q_BSND.shape[1] > LONG_SEQUENCE:
        options = BlockOptions(scale, rate, "xla")
        return tiled_causal_attention(q_BSND, k_BSGD, v_BSGE, segment_ids_BS, key, options)
    out = _xla_attention(q_BSND, k_BSGD, v_BSGE, segment_ids_BS, scale, rate, key)
    return checkpoint_name(out, RESULTS[0])


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _mosaic_attention(
    q_BSND: jax.Array,
    k_BSGD: jax.Array,
    v_BSGE: jax.Array,
    segment_ids_BS: jax.Array | None,
    call: DocumentCall,
) -> jax.Array:
    """As `causal_attention`. What is kept for the backward pass is what it returns."""
    return _mosaic_forward(q_BSND, k_BSGD, v_BSGE, segment_ids_BS, call)[0]


def _mosaic_forward(q, k, v, segment_ids, call):
    ids = document_ids(_pair(segment_ids), q, k)
    out, lse = named_results(*document_attention(q, k, v, *ids, call))
    return out, (q, k, v, segment_ids, out, lse)


def _mosaic_backward(call, residuals, d_out):
    q, k, v, segment_ids, *results = residuals
    ids = document_ids(_pair(segment_ids), q, k)
    grads = document_attention_gradient(q, k, v, *ids, (*results, d_out), call)
    return *grads, None


_mosaic_attention.defvjp(_mosaic_forward, _mosaic_backward)


def _pair(segment_ids_BS: jax.Array | None) -> SegmentIds | None:
    """Of the queries and of the keys."""
    return None if segment_ids_BS is None else (segment_ids_BS, segment_ids_BS)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cudnn_attention(
    q_BSND: jax.Array,
    k_BSGD: jax.Array,
    v_BSGE: jax.Array,
    segment_ids_BS: jax.Array | None,
    call: CudnnCall,
) -> jax.Array:
    """As `causal_attention`. What is kept for the backward pass is what it returns."""
    mask = document_mask(_pair(segment_ids_BS))
    return cudnn_forward(q_BSND, k_BSGD, v_BSGE, mask, call, with_lse=False)[0]


def _cudnn_attention_forward(q, k, v, ids, call):
    out, lse = named_results(*cudnn_forward(q, k, v, document_mask(_pair(ids)), call))
    return out, (q, k, v, ids, out, lse)


def _cudnn_attention_backward(call, residuals, d_out):
    q, k, v, ids, *results = residuals
    grads = cudnn_gradient(q, k, v, document_mask(_pair(ids)), (*results, d_out), call)
    return *grads, None


_cudnn_attention.defvjp(_cudnn_attention_forward, _cudnn_attention_backward)


def _xla_attention(q_BSND, k_BSGD, v_BSGE, segment_ids_BS, scale, dropout_rate, dropout_key):
    """The reference: scores in fp32, of size [B, N, S, S]."""
    S, G = q_BSND.shape[1], k_BSGD.shape[2]
    # Heads first and the heads of a group as more rows: plain batched matrix products.
    q_BGXD = grouped(q_BSND, G)
    k_BGSD, v_BGSE = k_BSGD.transpose(0, 2, 1, 3), v_BSGE.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bgxd,bgtd->bgxt", q_BGXD, k_BGSD, preferred_element_type=jnp.float32)
    scores = scores.reshape(*scores.shape[:2], -1, S, S) * scale
    mask_BST = jnp.tril(jnp.ones((S, S), bool))[None]
    if segment_ids_BS is not None:
        mask_BST = mask_BST & same_segment(segment_ids_BS, segment_ids_BS)
    scores = jnp.where(mask_BST[:, None, None], scores, jnp.finfo(jnp.float32).min)
    probs = dropout(jax.nn.softmax(scores, axis=-1), dropout_rate, dropout_key)
    probs_BGXT = probs.reshape(*q_BGXD.shape[:3], S).astype(v_BSGE.dtype)
    return ungrouped(jnp.einsum("bgxt,bgte->bgxe", probs_BGXT, v_BGSE), S)
