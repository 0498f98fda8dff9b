"""What every dispatcher offers, and the sizes of its buffers.

A dispatcher moves token rows to the ranks that hold their experts and brings results back:

    rows, state = dispatcher.dispatch(x_TH, experts_TK, weights_TK)
    ... experts work on rows ...
    out_TH = dispatcher.combine(out_RH, state)

`dispatch_allgather.py` and `dispatch_alltoall.py` have one each.

Shapes: T tokens of this rank, R rows received, K choices, H hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

PLACE_MULTIPLE = 8
"""Buffers hold a multiple of this many rows: matrix units want whole tiles."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DispatchedRows:
    """Rows on the rank of their experts."""

    rows_RH: jax.Array
    experts_RK: jax.Array
    """Local expert of each choice; -1: not on this rank, or no row."""
    weights_RK: jax.Array


class Dispatcher(Protocol):
    """Brings rows to experts and back. Both calls are differentiable."""

    def dispatch(
        self, x_TH: jax.Array, experts_TK: jax.Array, weights_TK: jax.Array
    ) -> tuple[DispatchedRows, Any]:
        """Rows for the local experts, and what `combine` needs.

        The state's `needed` is the least capacity factor that this exchange would have needed.
        """

    def combine(self, out_RH: jax.Array, state: Any) -> jax.Array:
        """Sum of the expert ranks' results for each token of this rank, [T, H]."""


def places(balanced: float, capacity_factor: float, most: int) -> int:
    """Rows in a buffer that holds `balanced` rows on average and can never get more than `most`."""
    if math.isinf(capacity_factor):
        return most
    wanted = math.ceil(balanced * capacity_factor / PLACE_MULTIPLE) * PLACE_MULTIPLE
    return min(most, wanted)


def needed_factor(
    counts: jax.Array, balanced: float, capacity: int, capacity_factor: float
) -> jax.Array:
    """Least capacity factor whose buffers hold `counts` rows; above `capacity_factor` exactly if
    the present ones, of `capacity` rows, do not. (Being rounded up, they may hold a little more.)
    """
    worst = jnp.max(counts).astype(jnp.float32)
    factor = worst / balanced
    return jnp.where(worst <= capacity, jnp.minimum(factor, capacity_factor), factor)
