"""Entering and leaving a tensor-parallel region (Megatron-LM; Korthikanti et al. 2022, section 4).

Between regions the residual stream is split over `tp` along the sequence (`sequence_parallel`) or
equal on all its ranks. Inside, each rank sees all of the sequence and a part of the heads or of
the inner width.

Shapes: B batch, S sequence inside a region, s sequence of the residual stream (S / tp or S), H.
"""

from __future__ import annotations

import jax

from mxjax.sharding import collectives


def enter(x_BsH: jax.Array, sequence_parallel: bool) -> jax.Array:
    """Residual stream -> input of a column-parallel matrix, [B, S, H]."""
    return collectives.all_gather(x_BsH, "tp", dim=1) if sequence_parallel else x_BsH


def leave(partial_BSH: jax.Array, sequence_parallel: bool) -> jax.Array:
    """Partial sums of a row-parallel matrix -> residual stream, [B, s, H]."""
    if sequence_parallel:
        return collectives.reduce_scatter(partial_BSH, "tp", dim=1)
    return collectives.psum(partial_BSH, "tp")
