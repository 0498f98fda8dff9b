"""Choosing experts, and the numbers that balancing needs.

Shapes: B batch, s sequence of the residual stream, T = B s tokens, E experts, K chosen experts.
Papers: Switch Transformer (Fedus et al. 2021, section 2.2), ST-MoE (Zoph et al. 2022, section 2),
Mixtral (Jiang et al. 2024), DeepSeek-V2 (2024), DeepSeek-V3 (2024, section 2.1.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mxjax.config.schema import ModelConfig, MoEConfig
from mxjax.kernels.route import RoutingRule, choose_experts, expert_weights, kernel_runs, route
from mxjax.models.parts import param
from mxjax.remat.names import named


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterStatistics:
    """This rank's sums over its tokens, from which losses, bias update and load are made."""

    counts_BE: jax.Array
    """Tokens of each sequence sent to each expert, fp32."""
    score_sums_BE: jax.Array
    """Sums of the scores over all experts, normalised per token, fp32."""
    z_sum: jax.Array
    """Sum of squared log-sum-exp of the logits."""


def _rule(moe: MoEConfig) -> RoutingRule:
    grouped = moe.num_groups is not None
    return RoutingRule(
        topk=moe.router_topk,
        score_function=moe.score_function,
        pre_softmax=moe.router_pre_softmax,
        normalise=moe.norm_topk_prob,
        scaling=moe.routed_scaling_factor,
        num_groups=moe.num_groups,
        group_topk=moe.group_topk if grouped else 1,
        group_best=moe.router_topk // moe.group_topk if grouped and moe.group_score == "sum" else 1,
    )


class Router(nnx.Module):
    """A linear layer in fp32 and top-k.

    A router of one's own (`moe.router`) overrides one of its methods; see `docs/tutorial.md`.
    """

    def __init__(self, model: ModelConfig, moe: MoEConfig, rngs: nnx.Rngs):
        self.moe = moe
        self.rule = _rule(moe)
        self.weight = param(
            rngs,
            (model.hidden_size, moe.num_experts),
            ("hidden", None),
            std=model.init_method_std,
            keep_precision=True,
        )

    def __call__(
        self, x_BsH: jax.Array, valid_Bs: jax.Array, bias_E: jax.Array
    ) -> tuple[jax.Array, jax.Array, RouterStatistics]:
        """Experts and weights of each token.

        Args:
          valid_Bs: false for padding, which goes nowhere and counts nowhere.
          bias_E: added to the scores for the choice only (aux-loss-free balancing).

        Returns:
          experts_TK int32 (-1 for padding), weights_TK fp32, statistics.
        """
        moe, (B, s, H) = self.moe, x_BsH.shape
        E = moe.num_experts
        x_TH = x_BsH.reshape(-1, H)
        if self._overrides("_logits"):  # the router's own product takes both dtypes
            x_TH = x_TH.astype(jnp.float32)
        logits_TE = self._logits(x_TH)
        logits_TE = named(logits_TE, "router_logits")
        valid_T1 = valid_Bs.reshape(-1, 1)
        scores_TE, full_TE = self._scores(logits_TE)
        if self._is_as_configured() and kernel_runs(logits_TE, self.rule):
            routed = route(logits_TE, bias_E, valid_T1[:, 0], self.rule)
            experts_TK = named(routed.experts_TK, "router_experts")
            weights_TK = routed.weights_TK
        else:
            experts_TK = named(self._choose(scores_TE, bias_E), "router_experts")
            weights_TK = self._weights(scores_TE, experts_TK)
        experts_TK = jnp.where(valid_T1, experts_TK, -1)
        chosen_TE = jnp.sum(jax.nn.one_hot(experts_TK, E, dtype=jnp.float32), axis=1)
        z_T = jnp.square(jax.nn.logsumexp(logits_TE, axis=-1))
        statistics = RouterStatistics(
            counts_BE=jnp.sum(chosen_TE.reshape(B, s, E), axis=1),
            score_sums_BE=jnp.sum(jnp.where(valid_T1, full_TE, 0).reshape(B, s, E), axis=1),
            z_sum=jnp.sum(jnp.where(valid_T1[:, 0], z_T, 0)),
        )
        return experts_TK, jnp.where(valid_T1, weights_TK, 0), statistics

    def _is_as_configured(self) -> bool:
        """No subclass chooses in a way of its own, and the choice is the router's."""
        own = self._overrides("_scores", "_choose", "_weights")
        return not own and not self.moe.force_balanced

    def _overrides(self, *methods: str) -> bool:
        return any(getattr(type(self), name) is not getattr(Router, name) for name in methods)

    def _logits(self, x_TH: jax.Array) -> jax.Array:
        """Affinity of each token to each expert, in fp32. One's own gets the tokens in fp32."""
        weight_HE = self.weight[...].astype(jnp.float32)
        # Of tokens cast to fp32 first, the backward pass would keep the cast ones as well.
        contracted = ((1,), (0,)), ((), ())
        return lax.dot_general(x_TH, weight_HE, contracted, preferred_element_type=jnp.float32)

    def _scores(self, logits_TE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What top-k compares, and the same normalised over all experts for the aux loss."""
        if self.moe.score_function == "sigmoid":
            scores = jax.nn.sigmoid(logits_TE)
            return scores, scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
        full = jax.nn.softmax(logits_TE, axis=-1)
        return (full if self.moe.router_pre_softmax else logits_TE), full

    def _choose(self, scores_TE: jax.Array, bias_E: jax.Array) -> jax.Array:
        T, E = scores_TE.shape
        K = self.moe.router_topk
        if self.moe.force_balanced:
            # Dealt in turn, with a stride that spreads a token's experts over all ranks.
            stride = next(s for s in range(max(1, E // K), E + 1) if math.gcd(s, E) == 1 or E == 1)
            dealt = jnp.arange(T)[:, None] * K + jnp.arange(K)
            return (dealt * stride % E).astype(jnp.int32)
        return choose_experts(scores_TE, bias_E, self.rule)

    def _weights(self, scores_TE: jax.Array, experts_TK: jax.Array) -> jax.Array:
        return expert_weights(scores_TE, experts_TK, self.rule)
