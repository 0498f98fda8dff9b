"""The mixture-of-experts block: router, dispatch, experts, combine, shared expert.

Shapes: B batch, s sequence of the residual stream, T = B s tokens, R rows at the experts,
E experts, K choices, H hidden.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mxjax.config.schema import ModelConfig, MoEConfig
from mxjax.models.context import LayerContext
from mxjax.models.mlp import MLP
from mxjax.moe.dispatch import DispatchedRows, Dispatcher, needed_factor, places
from mxjax.moe.dispatch_allgather import AllGatherDispatcher
from mxjax.moe.dispatch_alltoall import AllToAllDispatcher
from mxjax.moe.experts import Experts
from mxjax.moe.router import RouterStatistics
from mxjax.moe.router_class import router_class
from mxjax.remat.names import named
from mxjax.sharding import collectives


class MoE(nnx.Module):
    """Routed experts and an optional shared one in place of a dense MLP.

    `expert_tensor_parallel`: each expert's width is split over `tp`; else whole experts are spread
    over `ep` and `tp` together (Megatron's parallel folding).
    `capacity_factor`: size of the buffers in multiples of perfect balance; inf holds any routing.
    """

    def __init__(
        self,
        model: ModelConfig,
        moe: MoEConfig,
        expert_tensor_parallel: bool,
        capacity_factor: float,
        rngs: nnx.Rngs,
    ):
        self.moe = moe
        self.expert_tensor_parallel = expert_tensor_parallel
        self.capacity_factor = capacity_factor
        self.router = router_class(moe.router)(model, moe, rngs)
        self.experts = Experts(model, moe, rngs)
        if moe.shared_expert_intermediate_size:
            width = moe.shared_expert_intermediate_size
            self.shared = MLP(model, width, False, rngs, name="shared_expert")

    def __call__(
        self, x_BsH: jax.Array, ctx: LayerContext, bias_E: jax.Array
    ) -> tuple[jax.Array, RouterStatistics, jax.Array]:
        """Output, router statistics, and the least capacity factor that nothing overflows with."""
        B, s, H = x_BsH.shape
        experts_TK, weights_TK, statistics = self.router(x_BsH, ctx.valid_Bs, bias_E)
        x_TH = x_BsH.reshape(-1, H)
        folded = not self.expert_tensor_parallel
        # Folding wants different tokens on each tp rank; without a split sequence, deal them out.
        deal = folded and not ctx.sequence_parallel
        if deal:
            x_TH, experts_TK, weights_TK = (
                collectives.shard(value, "tp", dim=0) for value in (x_TH, experts_TK, weights_TK)
            )
        axes = ("ep", "tp") if folded else ("ep",)
        dispatcher = self._dispatcher(axes)
        rows, state = dispatcher.dispatch(x_TH, experts_TK, weights_TK)
        gather_tp = not folded and ctx.sequence_parallel
        tokens = x_TH.shape[0] * collectives.axis_size((*axes, "tp") if gather_tp else axes)
        out_RH, needed = self._run_experts(rows, tokens, gather_tp)
        out_TH = dispatcher.combine(out_RH, state)
        if deal:
            out_TH = collectives.all_gather(out_TH, "tp", dim=0)
        elif not folded and not ctx.sequence_parallel:
            out_TH = collectives.psum(out_TH, "tp")
        out_BsH = out_TH.reshape(B, s, H)
        if self.moe.shared_expert_intermediate_size:
            out_BsH += self.shared(x_BsH, ctx.sequence_parallel)
        return out_BsH, statistics, jnp.maximum(needed, state.needed)

    def _dispatcher(self, axes) -> Dispatcher:
        E = self.moe.num_experts
        # Without other ranks there is nothing to send: tokens need no buffer either.
        if self.moe.dispatcher == "allgather" or collectives.axis_size(axes) == 1:
            return AllGatherDispatcher(axes, E)
        return AllToAllDispatcher(axes, E, self.capacity_factor)

    def _run_experts(
        self, rows: DispatchedRows, tokens: int, gather_tp: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Experts on the rows of this rank; with `gather_tp` on those of all `tp` ranks, each of
        which computes a part of the inner width. `tokens` is the number that share the experts."""
        if gather_tp:
            rows = jax.tree.map(lambda value: collectives.all_gather(value, "tp", dim=0), rows)
        rows = named(rows, "dispatched_rows")
        experts, choices = self.experts, self.moe.router_topk
        sharing = experts.num_experts // experts.num_buffers  # experts that share a buffer
        balanced = tokens * choices * sharing / self.moe.num_experts
        capacity = places(balanced, self.capacity_factor, most=tokens * min(choices, sharing))
        out_RH, counts = experts(rows.rows_RH, rows.experts_RK, rows.weights_RK, capacity)
        if gather_tp:
            out_RH = collectives.reduce_scatter(out_RH, "tp", dim=0)
        return out_RH, needed_factor(counts, balanced, capacity, self.capacity_factor)
