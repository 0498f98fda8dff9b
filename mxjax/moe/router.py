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
from mxjax.models.parts import param


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


class Router(nnx.Module):
    """A linear layer in fp32 and top-k.

    A router of one's own (`moe.router`) overrides one of its methods; see `docs/tutorial.md`.
    """

    def __init__(self, model: ModelConfig, moe: MoEConfig, rngs: nnx.Rngs):
        self.moe = moe
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
        logits_TE = self._logits(x_BsH.reshape(-1, H).astype(jnp.float32))
        valid_T1 = valid_Bs.reshape(-1, 1)
        scores_TE, full_TE = self._scores(logits_TE)
        experts_TK = self._choose(scores_TE, bias_E)
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

    def _logits(self, x_TH: jax.Array) -> jax.Array:
        """Affinity of each token (fp32) to each expert."""
        return x_TH @ self.weight[...].astype(jnp.float32)

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
        compared_TE = lax.stop_gradient(scores_TE) + bias_E
        if self.moe.num_groups is not None:
            compared_TE = self._limit_to_groups(compared_TE)
        return lax.top_k(compared_TE, K)[1].astype(jnp.int32)

    def _limit_to_groups(self, compared_TE: jax.Array) -> jax.Array:
        """Group-limited routing (DeepSeek-V2, 2024, section 2.2.2; DeepSeek-V3, section 2.1.2):
        minus infinity outside of each token's best groups."""
        moe, (T, E) = self.moe, compared_TE.shape
        compared_TGe = compared_TE.reshape(T, moe.num_groups, E // moe.num_groups)
        best = 1 if moe.group_score == "max" else moe.router_topk // moe.group_topk
        score_TG = jnp.sum(lax.top_k(compared_TGe, best)[0], axis=-1)
        chosen_TK = lax.top_k(score_TG, moe.group_topk)[1]
        allowed_TG = jnp.any(jax.nn.one_hot(chosen_TK, moe.num_groups, dtype=bool), axis=1)
        return jnp.where(allowed_TG[:, :, None], compared_TGe, -jnp.inf).reshape(T, E)

    def _weights(self, scores_TE: jax.Array, experts_TK: jax.Array) -> jax.Array:
        moe = self.moe
        # A product with the one-hot choice: its gradient is dense and adds in a fixed order.
        pick_TKE = jax.nn.one_hot(experts_TK, moe.num_experts, dtype=jnp.float32)
        weights = jnp.sum(pick_TKE * scores_TE[:, None, :], axis=-1)
        if moe.score_function == "softmax" and not moe.router_pre_softmax:
            weights = jax.nn.softmax(weights, axis=-1)
        elif moe.norm_topk_prob:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * moe.routed_scaling_factor
