"""Causal attention with grouped queries and document masks.

Shapes: B batch, S sequence, N query heads, G key/value heads (N a multiple of G), D width of query
and key heads, E width of value heads (D except in multi-head latent attention).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mxjax.kernels.attention_block import (
    MASKED,
    RESULTS,
    STAND_IN,
    BlockOptions,
    Implementation,
    cudnn_obstacle,
    grouped,
    same_segment,
    takes_cudnn,
    tiled_causal_attention,
    ungrouped,
    widened,
)
from mxjax.kernels.dropout import dropout
from mxjax.kernels.implementation import mosaic_kernel, plans
from mxjax.scoped import scoped

LONG_SEQUENCE = 4096
"""Above it the XLA form computes scores again in the backward pass instead of keeping them."""


def always_tiled() -> AbstractContextManager[None]:
    """What is traced inside keeps no scores where cuDNN's attention would run, whatever the length:
    for plans of a GPU from shapes."""
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
) -> jax.Array:
    """softmax(scale * q k^T) v over earlier tokens of the same segment, [B, S, N, E].

    Args:
      scale: None: 1 / sqrt(D).
      segment_ids_BS: a token sees only tokens with its own id; None: one segment.
      dropout_rate, dropout_key: dropout of the probabilities; off without a key.
      implementation: `cudnn` needs an NVIDIA GPU, 16-bit inputs and no dropout; `auto` takes it
        where it can run, else `xla`.

    Raises:
      ValueError: `cudnn` was named and cannot run this call.
    """
    has_dropout = dropout_rate > 0 and dropout_key is not None
    cudnn = takes_cudnn(implementation, cudnn_obstacle(q_BSND, has_dropout))
    if cudnn and plans.get() == "program":
        return _stand_in_attention(q_BSND, k_BSGD, v_BSGE, segment_ids_BS)
    scale = 1 / math.sqrt(q_BSND.shape[-1]) if scale is None else scale
    if not cudnn or plans.get() == "shapes":
        rate, key = (dropout_rate, dropout_key) if has_dropout else (0.0, None)
        options = BlockOptions(scale, rate, "xla")
        if cudnn:
            wide = widened(v_BSGE, q_BSND.shape[-1])
            out = tiled_causal_attention(q_BSND, k_BSGD, wide, segment_ids_BS, key, options)
            return out[..., : v_BSGE.shape[-1]]
        if q_BSND.shape[1] > LONG_SEQUENCE:
            return tiled_causal_attention(q_BSND, k_BSGD, v_BSGE, segment_ids_BS, key, options)
        out = _xla_attention(q_BSND, k_BSGD, v_BSGE, segment_ids_BS, scale, rate, key)
        return checkpoint_name(out, RESULTS[0])
    mask = None
    if segment_ids_BS is not None:
        mask = same_segment(segment_ids_BS, segment_ids_BS)[:, None]
    # cuDNN through JAX wants values as wide as keys: zeros in, zeros out.
    wide = widened(v_BSGE, q_BSND.shape[-1])
    out = jax.nn.dot_product_attention(
        q_BSND, k_BSGD, wide, mask=mask, scale=scale, is_causal=True, implementation="cudnn"
    )
    return out[..., : v_BSGE.shape[-1]]


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


def _stand_in_attention(q_BSND, k_BSGD, v_BSGE, segment_ids_BS):
    """Arrays as the call of cuDNN has them, forward and backward, of any content."""
    bias_BST = None
    if segment_ids_BS is not None:
        mask_BST = same_segment(segment_ids_BS, segment_ids_BS)
        bias_BST = jnp.where(mask_BST, 0, MASKED).astype(q_BSND.dtype)
    wide = widened(v_BSGE, q_BSND.shape[-1])
    return _sizes_of_cudnn(q_BSND, k_BSGD, wide, bias_BST)[..., : v_BSGE.shape[-1]]


@jax.custom_vjp
def _sizes_of_cudnn(q_BSND, k_BSGD, v_BSGD, bias_BST):
    return _sizes_forward(q_BSND, k_BSGD, v_BSGD, bias_BST)[0]


def _sizes_forward(q_BSND, k_BSGD, v_BSGD, bias_BST):
    B, S, N, _ = q_BSND.shape
    statistics = jax.ShapeDtypeStruct((B, N, S), jnp.float32)
    operands = [x for x in (q_BSND, k_BSGD, v_BSGD, bias_BST) if x is not None]
    results = _nothing((q_BSND, statistics), *operands)
    out, statistics = (checkpoint_name(x, STAND_IN) for x in results)
    return out, (q_BSND, k_BSGD, v_BSGD, bias_BST, out, statistics)


def _sizes_backward(residuals, d_out):
    q, k, v, *_ = residuals
    # It adds the gradient of the queries up in fp32.
    scratch = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    operands = [x for x in (*residuals, d_out) if x is not None]
    *grads, _ = _nothing((q, k, v, scratch), *operands)
    return *grads, None


_sizes_of_cudnn.defvjp(_sizes_forward, _sizes_backward)


def _nothing(outs, *operands):
    types = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outs]
    kernel = mosaic_kernel(lambda *_: None, out_type=types, grid=(1,), grid_names=("block",))
    return kernel(*operands)
