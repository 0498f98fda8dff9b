"""One block of attention, some queries against some keys, and its gradient.

Attention over a long sequence can be made of blocks (Rabe and Staats 2021; Dao 2023, section 3.1).
With scores s = scale * q k^T of a block and L = log sum exp(s) of each of its rows, the rows of two
blocks x and y are together

    L = log(exp(L_x) + exp(L_y)),   out = exp(L_x - L) out_x + exp(L_y - L) out_y

and with the L and `out` of the *whole* row each block's part of the gradient follows by itself:

    p = exp(s - L),   dv = p^T dout,   ds = p * (dout v^T - sum(dout * out)),
    dq = scale * ds k,   dk = scale * ds^T q

With dropout p is masked and scaled up in `out`, dv and in front of dout v^T, and nowhere else.

Shapes: B batch, Q queries, K keys, N query heads, G key/value heads (N a multiple of G), R = N / G,
D width of query and key heads, E width of value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mxjax.kernels.attention_choice import Implementation, choose_attention
from mxjax.kernels.attention_cudnn import CudnnCall, cudnn_forward, cudnn_gradient, sees_nothing
from mxjax.kernels.attention_mosaic import LOG2_E, MASKED, DocumentCall
from mxjax.kernels.attention_mosaic_forward import document_attention
from mxjax.kernels.attention_mosaic_gradient import document_attention_gradient
from mxjax.kernels.dropout import dropout
from mxjax.kernels.implementation import plans

TILE_ROWS = 512
"""The XLA form holds the scores of so many queries at a time, if that divides their number."""

RESULTS = ("attention_out", "attention_log_sum_exp")
"""Names, for recompute policies, of what the backward pass needs and is dear to compute again."""

type SegmentIds = tuple[jax.Array, jax.Array]
"""int32 of the queries [B, Q] and of the keys [B, K]."""


@dataclass(frozen=True)
class BlockOptions:
    """What all blocks of an attention have in common."""

    scale: float
    """Multiplies the scores."""
    dropout_rate: float = 0.0
    """Of the probabilities; needs a key."""
    implementation: Implementation = "auto"
    deterministic: bool = False
    """Both as for `causal_attention`."""


def attention_block(
    q_BQND: jax.Array,
    k_BKGD: jax.Array,
    v_BKGE: jax.Array,
    segment_ids: SegmentIds | None,
    key: jax.Array | None,
    *,
    causal: bool,
    options: BlockOptions,
) -> tuple[jax.Array, jax.Array]:
    """Output [B, Q, N, E] and log-sum-exp [B, N, Q] of a block, both fp32. Not differentiable.

    A query sees the keys with its own segment id and, with `causal`, only those with an index up to
    its own. If it sees nothing, its output is 0 and its log-sum-exp `MASKED`.

    Raises:
      ImplementationError: the implementation was named and cannot run this.
    """
    check_shapes(q_BQND, k_BKGD, v_BKGE, segment_ids)
    chosen = _choose(q_BQND, k_BKGD, v_BKGE, segment_ids, options)
    if chosen == "mosaic":
        ids = document_ids(segment_ids, q_BQND, k_BKGD)
        call = DocumentCall.of(q_BQND, options.scale, causal)
        out, lse2 = document_attention(q_BQND, k_BKGD, v_BKGE, *ids, call)
        lse = jnp.where(lse2 == MASKED, MASKED, lse2 / LOG2_E)
        return out.astype(jnp.float32), lse
    tile = _tile_rows(q_BQND.shape[1])
    q_BQND, segment_ids, indices = _tied(q_BQND, segment_ids, q_BQND.shape[1] // tile)
    if chosen == "cudnn":
        return _cudnn_forward(q_BQND, k_BKGD, v_BKGE, segment_ids, causal, options)

    def rows(index):
        q, mask, tile_key = _tile(index, tile, q_BQND, k_BKGD, segment_ids, key, causal)
        return _xla_forward(q, k_BKGD, v_BKGE, mask, tile_key, options)

    if len(indices) == 1:
        return rows(indices[0])
    out, lse = lax.map(rows, indices)
    return _join(out, 1), _join(lse, 2)


def attention_block_gradient(
    q_BQND: jax.Array,
    k_BKGD: jax.Array,
    v_BKGE: jax.Array,
    segment_ids: SegmentIds | None,
    key: jax.Array | None,
    out_BQNE: jax.Array,
    lse_BNQ: jax.Array,
    d_out_BQNE: jax.Array,
    *,
    causal: bool,
    options: BlockOptions,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This block's part of the gradients of q, k and v, fp32.

    Args:
      out_BQNE, lse_BNQ: of the whole rows, of which this block may be a part.
      d_out_BQNE: gradient of `out_BQNE`.
      The rest as it was given to `attention_block`.
    """
    check_shapes(q_BQND, k_BKGD, v_BKGE, segment_ids)
    chosen = _choose(q_BQND, k_BKGD, v_BKGE, segment_ids, options)
    if chosen == "mosaic":
        ids = document_ids(segment_ids, q_BQND, k_BKGD)
        call, results = (
            DocumentCall.of(q_BQND, options.scale, causal),
            (out_BQNE, lse_BNQ * LOG2_E, d_out_BQNE),
        )
        grads = document_attention_gradient(q_BQND, k_BKGD, v_BKGE, *ids, results, call)
        return tuple(x.astype(jnp.float32) for x in grads)
    tile = _tile_rows(q_BQND.shape[1])
    q_BQND, segment_ids, indices = _tied(q_BQND, segment_ids, q_BQND.shape[1] // tile)
    if chosen == "cudnn":
        call = CudnnCall(options.scale, causal)
        results = out_BQNE, lse_BNQ, d_out_BQNE
        grads = cudnn_gradient(q_BQND, k_BKGD, v_BKGE, document_mask(segment_ids), results, call)
        return tuple(x.astype(jnp.float32) for x in grads)

    def rows(index):
        q, mask, tile_key = _tile(index, tile, q_BQND, k_BKGD, segment_ids, key, causal)
        out, d_out = (_cut(x, index, tile, 1) for x in (out_BQNE, d_out_BQNE))
        results = (out, _cut(lse_BNQ, index, tile, 2), d_out)
        return _xla_gradient(q, k_BKGD, v_BKGE, mask, tile_key, results, options)

    if len(indices) == 1:
        return rows(indices[0])

    def add(total, index):
        d_q, d_k, d_v = rows(index)
        return (total[0] + d_k, total[1] + d_v), d_q

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (k_BKGD, v_BKGE)]
    (d_k, d_v), d_q = lax.scan(add, tuple(zeros), indices)
    return _join(d_q, 1), d_k, d_v


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def tiled_causal_attention(
    q_BSND: jax.Array,
    k_BSGD: jax.Array,
    v_BSGE: jax.Array,
    segment_ids_BS: jax.Array | None,
    key: jax.Array | None,
    options: BlockOptions,
) -> jax.Array:
    """Causal attention, [B, S, N, E], that never holds more than `TILE_ROWS` rows of scores."""
    return _tiled_forward(q_BSND, k_BSGD, v_BSGE, segment_ids_BS, key, options)[0]


def _tiled_forward(q, k, v, ids, key, options):
    pair = None if ids is None else (ids, ids)
    out, lse = attention_block(q, k, v, pair, key, causal=True, options=options)
    out, lse = named_results(out.astype(q.dtype), lse)
    return out, (q, k, v, ids, key, out, lse)


def _tiled_backward(options, residuals, d_out):
    q, k, v, ids, key, out, lse = residuals
    pair = None if ids is None else (ids, ids)
    grads = attention_block_gradient(
        q, k, v, pair, key, out, lse, d_out, causal=True, options=options
    )
    return *(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)), None, None


tiled_causal_attention.defvjp(_tiled_forward, _tiled_backward)


def named_results(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two under the names that recompute policies know."""
    return tuple(checkpoint_name(x, name) for x, name in zip((out, lse), RESULTS, strict=True))


def _tied(q_BQND, segment_ids, num_tiles):
    """Queries, segment ids and indices of tiles, as if all came from the queries.

    JAX moves what is the same for all layers out of the loop over layers. A mask is, if it is made
    of segment ids alone; and those of all tiles and blocks together are as large as all scores.
    """
    return lax.optimization_barrier((q_BQND, segment_ids, jnp.arange(num_tiles)))


def same_segment(q_ids_BQ: jax.Array, kv_ids_BK: jax.Array) -> jax.Array:
    """Whether query and key are of one segment, bool [B, Q, K]."""
    return q_ids_BQ[:, :, None] == kv_ids_BK[:, None, :]


# XLA: scores in fp32


def _tile_rows(num_queries: int) -> int:
    fits = num_queries > TILE_ROWS and num_queries % TILE_ROWS == 0
    return TILE_ROWS if fits else num_queries


def _cut(x: jax.Array, index, tile: int, dim: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, index * tile, tile, dim)


def _join(tiles: jax.Array, dim: int) -> jax.Array:
    """[tiles, ..., rows, ...] -> [..., tiles * rows, ...], `dim` counted in the result."""
    moved = jnp.moveaxis(tiles, 0, dim)
    shape = moved.shape
    return moved.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


def _tile(index, tile, q_BQND, k_BKGD, segment_ids, key, causal):
    """Queries, mask [B or 1, tile, K] (None: all seen) and key of some rows."""
    K = k_BKGD.shape[1]
    mask = None
    if causal:
        mask = (index * tile + jnp.arange(tile))[:, None] >= jnp.arange(K)
        mask = mask[None]
    if segment_ids is not None:
        q_ids, kv_ids = segment_ids
        same = same_segment(_cut(q_ids, index, tile, 1), kv_ids)
        mask = same if mask is None else mask & same
    key = None if key is None else jax.random.fold_in(key, index)
    return _cut(q_BQND, index, tile, 1), mask, key


def grouped(x_BQND: jax.Array, G: int) -> jax.Array:
    """Heads first, and the R heads of a group as more rows: [B, G, R * Q, D]."""
    B, Q, N, D = x_BQND.shape
    return x_BQND.reshape(B, Q, G, N // G, D).transpose(0, 2, 3, 1, 4).reshape(B, G, -1, D)


def ungrouped(x_BGXD: jax.Array, Q: int) -> jax.Array:
    """The inverse of `grouped`, [B, Q, N, D]."""
    B, G, X, D = x_BGXD.shape
    return x_BGXD.reshape(B, G, X // Q, Q, D).transpose(0, 3, 1, 2, 4).reshape(B, Q, -1, D)


def _product(spec: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)


def _exponentials(scores_BGXK, mask, offset_BGX1):
    """exp(scores - offset), 0 where nothing is seen."""
    weights = jnp.exp(scores_BGXK - offset_BGX1)
    return weights if mask is None else jnp.where(mask, weights, 0)


def _masked_scores(q_BGXD, k_BKGD, mask_BQK, scale):
    """Scores [B, G, X, K] and the mask as it broadcasts to them."""
    scores = _product("bgxd,bkgd->bgxk", q_BGXD, k_BKGD) * scale
    if mask_BQK is None:
        return scores, None
    R = q_BGXD.shape[2] // mask_BQK.shape[1]
    mask = jnp.tile(mask_BQK, (1, R, 1))[:, None]
    return jnp.where(mask, scores, MASKED), mask


def _xla_forward(q_BQND, k_BKGD, v_BKGE, mask_BQK, key, options: BlockOptions):
    (B, Q, N, _), G = q_BQND.shape, k_BKGD.shape[2]
    q_BGXD = grouped(q_BQND, G)
    scores, mask = _masked_scores(q_BGXD, k_BKGD, mask_BQK, options.scale)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = _exponentials(scores, mask, top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    seen = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    weights = dropout(weights, options.dropout_rate, key)
    out_BGXE = _product("bgxk,bkge->bgxe", weights.astype(v_BKGE.dtype), v_BKGE) / seen
    lse_BGX1 = jnp.where(total > 0, top + jnp.log(seen), MASKED)
    return ungrouped(out_BGXE, Q), lse_BGX1.reshape(B, N, Q)


def _xla_gradient(q_BQND, k_BKGD, v_BKGE, mask_BQK, key, results, options: BlockOptions):
    out_BQNE, lse_BNQ, d_out_BQNE = results
    (B, Q, _, _), G, rate = q_BQND.shape, k_BKGD.shape[2], options.dropout_rate
    q_BGXD, d_out_BGXE = grouped(q_BQND, G), grouped(d_out_BQNE, G)
    delta = _product("bgxe,bgxe->bgx", grouped(out_BQNE, G), d_out_BGXE)[..., None]
    scores, mask = _masked_scores(q_BGXD, k_BKGD, mask_BQK, options.scale)
    probs = _exponentials(scores, mask, lse_BNQ.reshape(B, G, -1, 1))
    kept = dropout(probs, rate, key).astype(d_out_BQNE.dtype)
    d_v = _product("bgxk,bgxe->bkge", kept, d_out_BGXE)
    # The same key: dropped in the same places.
    d_probs = dropout(_product("bgxe,bkge->bgxk", d_out_BGXE, v_BKGE), rate, key)
    d_scores = (probs * (d_probs - delta) * options.scale).astype(q_BQND.dtype)
    d_q = _product("bgxk,bkgd->bgxd", d_scores, k_BKGD)
    d_k = _product("bgxk,bgxd->bkgd", d_scores, q_BGXD)
    return ungrouped(d_q, Q), d_k, d_v


# Kernels


def check_shapes(
    q_BQND: jax.Array, k_BKGD: jax.Array, v_BKGE: jax.Array, segment_ids: SegmentIds | None
) -> None:
    """Kernels read memory by sizes of some of their operands.

    Raises:
      ValueError: shapes do not fit each other.
    """
    (B, Q, N, D), (_, K, G, _) = q_BQND.shape, k_BKGD.shape
    fits = k_BKGD.shape == (B, K, G, D) and v_BKGE.shape[:3] == (B, K, G) and N % G == 0
    if segment_ids is not None:
        fits = fits and tuple(ids.shape for ids in segment_ids) == ((B, Q), (B, K))
    if not fits:
        shapes = [x.shape for x in (q_BQND, k_BKGD, v_BKGE, *(segment_ids or ()))]
        raise ValueError(f"attention: queries, keys, values and ids do not fit together: {shapes}")


def _choose(
    q_BQND, k_BKGD, v_BKGE, segment_ids, options: BlockOptions
) -> Literal["cudnn", "mosaic", "xla"]:
    chosen = choose_attention(
        options.implementation,
        q_BQND,
        k_BKGD,
        v_BKGE,
        documents=segment_ids is not None,
        dropout=options.dropout_rate > 0,
        scale=options.scale,
        deterministic=options.deterministic,
    )
    # In plans that form takes the place of every kernel.
    return chosen.implementation if plans.get() == "no" else "xla"


def document_ids(
    segment_ids: SegmentIds | None, q_BQND: jax.Array, k_BKGD: jax.Array
) -> SegmentIds:
    """As kernels take them, int32: without segments all is one."""
    if segment_ids is not None:
        return tuple(ids.astype(jnp.int32) for ids in segment_ids)
    return tuple(jnp.zeros(x.shape[:2], jnp.int32) for x in (q_BQND, k_BKGD))


def _cudnn_forward(q_BQND, k_BKGD, v_BKGE, segment_ids, causal, options: BlockOptions):
    call = CudnnCall(options.scale, causal)
    out, lse_BNQ = cudnn_forward(q_BQND, k_BKGD, v_BKGE, document_mask(segment_ids), call)
    empty_BNQ = sees_nothing(lse_BNQ, q_BQND.dtype)
    out = jnp.where(empty_BNQ.transpose(0, 2, 1)[..., None], 0, out.astype(jnp.float32))
    return out, jnp.where(empty_BNQ, MASKED, lse_BNQ)


def document_mask(segment_ids: SegmentIds | None) -> jax.Array | None:
    """As cuDNN's calls take it, bool [B, Q, K]; None: nothing is masked."""
    return None if segment_ids is None else same_segment(*segment_ids)
