"""Each token crosses once to every rank that holds one of its experts, and its result once back.

The receiver computes all of the token's local experts and returns their weighted sum, so that a
token with several experts on one rank travels once (against K times in a plain all-to-all). Send
buffers have a fixed number of places per rank pair; `needed` tells when that was too few.

Shapes: T tokens of this rank, D ranks, C places per rank pair, R = D C, K choices, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mxjax.kernels.permute import PermutePlan, permute, plan_permute, unpermute
from mxjax.moe.dispatch import DispatchedRows, needed_factor, places
from mxjax.remat.names import named
from mxjax.sharding import collectives
from mxjax.sharding.collectives import Axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AllToAllState:
    """Where each token's copies went, and the capacity factor that would have held them."""

    plan: PermutePlan
    needed: jax.Array


@dataclass(frozen=True)
class AllToAllDispatcher:
    """See the module."""

    axes: Axes
    num_experts: int
    capacity_factor: float

    def dispatch(self, x_TH, experts_TK, weights_TK):
        """Rows that other ranks sent here, with their choices among this rank's experts."""
        T, K = experts_TK.shape
        D = collectives.axis_size(self.axes)
        local = self.num_experts // D
        balanced = T * K / D
        capacity = places(balanced, self.capacity_factor, most=T)
        rank_TK = jnp.where(experts_TK >= 0, experts_TK // local, -1)
        plan = named(plan_permute(_first_of_each(rank_TK), D, capacity), "permute_plan")
        sent_DCH = permute(x_TH, plan)
        # So narrow that no kernel takes it.
        weights_DCK = permute(weights_TK, plan, implementation="xla")
        experts_DCK = experts_TK.at[plan.source // K].get(mode="fill", fill_value=-1)
        to_rank_D = jnp.arange(D)[:, None, None]
        experts_DCK = jnp.where(
            (experts_DCK >= 0) & (experts_DCK // local == to_rank_D), experts_DCK % local, -1
        )
        received = [
            collectives.all_to_all(value, self.axes)
            for value in (sent_DCH, experts_DCK, weights_DCK)
        ]
        rows = DispatchedRows(*(value.reshape(D * capacity, -1) for value in received))
        needed = needed_factor(plan.counts_G, balanced, capacity, self.capacity_factor)
        return rows, AllToAllState(plan, needed)

    def combine(self, out_RH, state):
        """Sum of each token's results over the ranks it went to."""
        D, C = state.plan.source.shape
        back_DCH = collectives.all_to_all(out_RH.reshape(D, C, -1), self.axes)
        return unpermute(back_DCH, None, state.plan)


def _first_of_each(rank_TK: jax.Array) -> jax.Array:
    """Keep the first of equal entries in a row, -1 for the others."""
    K = rank_TK.shape[1]
    earlier = jnp.tril(jnp.ones((K, K), bool), k=-1)
    repeated = (rank_TK[:, :, None] == rank_TK[:, None, :]) & earlier
    return jnp.where(jnp.any(repeated, axis=-1), -1, rank_TK)
