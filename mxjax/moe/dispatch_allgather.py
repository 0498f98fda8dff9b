"""Every rank sees every token of its expert group and keeps those of its own experts.

One all-gather and one reduce-scatter of whole token sets; nothing can overflow. Best for few ranks
or many choices per token, where most tokens go everywhere anyway.

Shapes: T tokens of this rank, R = ranks x T, K choices, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mxjax.moe.dispatch import DispatchedRows
from mxjax.sharding import collectives
from mxjax.sharding.collectives import Axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AllGatherState:
    """`needed`: capacity factor that this exchange needed; it has no buffers to overflow."""

    needed: jax.Array


@dataclass(frozen=True)
class AllGatherDispatcher:
    """See the module."""

    axes: Axes
    num_experts: int

    def dispatch(self, x_TH, experts_TK, weights_TK):
        """All tokens of the group, with the choices that fall on this rank."""
        local = self.num_experts // collectives.axis_size(self.axes)
        rows_RH, experts_RK, weights_RK = (
            collectives.all_gather(value, self.axes, dim=0)
            for value in (x_TH, experts_TK, weights_TK)
        )
        first = collectives.axis_index(self.axes) * local
        mine_RK = (experts_RK >= first) & (experts_RK < first + local)
        rows = DispatchedRows(rows_RH, jnp.where(mine_RK, experts_RK - first, -1), weights_RK)
        return rows, AllGatherState(needed=jnp.zeros((), jnp.float32))

    def combine(self, out_RH, state):
        """Sum over ranks of what each made of this rank's tokens."""
        return collectives.reduce_scatter(out_RH, self.axes, dim=0)
