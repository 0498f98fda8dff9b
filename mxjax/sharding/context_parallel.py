"""Attention over a sequence that `cp` and `sp` split.

`cp` (context parallel) splits queries: each rank computes the attention of its own part of the
sequence and gets the keys and values of the others, by a ring or by an all-gather
(`blockwise_attention.py`). `sp` (Ulysses, Jacobs et al. 2023) splits heads: an all-to-all trades
heads for sequence before attention and back after it. Together, `sp` splits what `cp` leaves.

Causal attention makes the later part of a sequence dearer. So the sequence is cut into 2 cp chunks
and `cp` rank r holds chunks r and 2 cp - 1 - r (Llama 3, 2024, section 3.3.2): equal work for all.
The host puts each batch into that order (`sequence_order`); then a plain split along the sequence
is the right one, over `cp`, within it over `sp`, within that over `tp`. What a token is worth
elsewhere hangs on its position and document, which come with the batch, not on its place.

Shapes: B batch, s this rank's part of the sequence, S that of its `cp` rank, N query heads, G
key/value heads, D width of query and key heads, E width of value heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.kernels.attention import causal_attention
from mxjax.kernels.attention_block import BlockOptions, Implementation
from mxjax.sharding import collectives
from mxjax.sharding.blockwise_attention import AllGather, Ring, blockwise_attention


@dataclass(frozen=True)
class ContextParallel:
    """How keys and values reach the other `cp` ranks; `ParallelConfig` describes the choices."""

    method: Literal["ring", "allgather"] = "ring"
    rotation: Literal["ppermute", "alltoall"] = "ppermute"


RING = ContextParallel()


def sequence_order(seq_length: int, cp: int) -> np.ndarray:
    """Which token of a sequence stands at each place of it, [seq_length] int.

    `x[..., sequence_order(...)]` is the order that the `cp` ranks want; `np.argsort` of it undoes
    that. With one rank it is the natural order.

    Raises:
      ValueError: the sequence does not divide into 2 * cp chunks.
    """
    if cp == 1:
        return np.arange(seq_length)
    if seq_length % (2 * cp):
        raise ValueError(
            f"training.seq_length: {seq_length} is not a multiple of 2 * parallel.cp = {2 * cp}; "
            "change one of them"
        )
    chunks = np.arange(seq_length).reshape(2 * cp, -1)
    return np.concatenate([chunks[[rank, 2 * cp - 1 - rank]] for rank in range(cp)]).reshape(-1)


def attend(
    q_BsND: jax.Array,
    k_BsGD: jax.Array,
    v_BsGE: jax.Array,
    *,
    segment_ids_Bs: jax.Array | None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: Implementation = "auto",
    deterministic: bool = False,
    context_parallel: ContextParallel = RING,
) -> jax.Array:
    """Causal attention of the whole sequence, [B, s, N, E]; arguments as `causal_attention`.

    N must be a multiple of `sp`. `dropout_key` must differ between ranks.
    """
    k_BsGD, v_BsGE = _enough_groups(k_BsGD), _enough_groups(v_BsGE)
    q_BSND, k_BSGD, v_BSGE = (_heads_to_sequence(x) for x in (q_BsND, k_BsGD, v_BsGE))
    ids_BS = segment_ids_Bs
    if ids_BS is not None:
        ids_BS = collectives.all_gather(ids_BS, "sp", dim=1)
    if collectives.axis_size("cp") == 1:
        out_BSNE = causal_attention(
            q_BSND,
            k_BSGD,
            v_BSGE,
            segment_ids_BS=ids_BS,
            scale=scale,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
            implementation=implementation,
            deterministic=deterministic,
        )
    else:
        dropout = dropout_rate > 0 and dropout_key is not None
        options = BlockOptions(
            scale=1 / math.sqrt(q_BsND.shape[-1]) if scale is None else scale,
            dropout_rate=dropout_rate if dropout else 0.0,
            implementation=implementation,
            deterministic=deterministic,
        )
        key = dropout_key if dropout else None
        transport = _transport(context_parallel, collectives.axis_size("cp"))
        out_BSNE = blockwise_attention(q_BSND, k_BSGD, v_BSGE, ids_BS, key, options, transport)
    return _sequence_to_heads(out_BSNE)


def _transport(choice: ContextParallel, size: int) -> Ring | AllGather:
    return AllGather(size) if choice.method == "allgather" else Ring(size, choice.rotation)


def _enough_groups(x_BsGD: jax.Array) -> jax.Array:
    """Key/value heads repeated until `sp` divides their number, and no further."""
    G = x_BsGD.shape[2]
    return jnp.repeat(x_BsGD, math.lcm(G, collectives.axis_size("sp")) // G, axis=2)


def _heads_to_sequence(x_BsND: jax.Array) -> jax.Array:
    """[B, s, N, D] -> [B, s * sp, N / sp, D]."""
    ranks = collectives.axis_size("sp")
    if ranks == 1:
        return x_BsND
    B, s, N, D = x_BsND.shape
    parts = jnp.moveaxis(x_BsND.reshape(B, s, ranks, N // ranks, D), 2, 0)
    return jnp.moveaxis(collectives.all_to_all(parts, "sp"), 0, 1).reshape(B, -1, N // ranks, D)


def _sequence_to_heads(x_BSND: jax.Array) -> jax.Array:
    """[B, s * sp, N / sp, D] -> [B, s, N, D]."""
    ranks = collectives.axis_size("sp")
    if ranks == 1:
        return x_BSND
    B, S, N, D = x_BSND.shape
    parts = jnp.moveaxis(x_BSND.reshape(B, ranks, S // ranks, N, D), 1, 0)
    return jnp.moveaxis(collectives.all_to_all(parts, "sp"), 0, 2).reshape(B, S // ranks, -1, D)
