"""Choosing experts: from the router's logits to experts and weights, and each choice's place in the
queue of its expert.

With the scores s of a token's experts (their logits, softmax or sigmoid; `scores`):

    experts = top_k(s + bias), of experts in the token's best groups only, if there are groups
    weights = the experts' s, as a softmax of the chosen ones or divided by their sum, times a
              factor

The bias takes part in the choice alone. Of equal scores the first expert's is larger.

Shapes: T tokens, E experts, K choices, G groups of experts, e = E / G.
Papers: Mixtral (Jiang et al. 2024), DeepSeek-V2 (2024, section 2.2.2), DeepSeek-V3 (2024, section
2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.kernels import route_mosaic as mosaic
from mxjax.kernels.implementation import (
    Implementation,
    choose,
    mosaic_obstacle,
    shape_class,
    varying_alike,
)
from mxjax.kernels.permute import ranks_in_groups

LOWEST = -1e30
"""A logit whose power and sigmoid are zero."""


@dataclass(frozen=True)
class RoutingRule:
    """How experts are chosen; `moe:` of the configuration explains each."""

    topk: int
    score_function: Literal["softmax", "sigmoid"]
    pre_softmax: bool
    normalise: bool
    scaling: float
    num_groups: int | None = None
    group_topk: int = 1
    group_best: int = 1
    """A group's score is the sum of so many of its best."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routed:
    """Who goes where."""

    experts_TK: jax.Array
    """int32; -1 for a token that goes nowhere."""
    weights_TK: jax.Array
    """fp32; 0 for a token that goes nowhere."""
    ranks_TK: jax.Array
    """int32: choices of the same expert by tokens before. Anything for a token that goes
    nowhere."""
    counts_E: jax.Array
    """int32: choices of each expert."""


def route(
    logits_TE: jax.Array,
    bias_E: jax.Array,
    valid_T: jax.Array,
    rule: RoutingRule,
    *,
    implementation: Implementation | None = None,
) -> Routed:
    """Differentiable: the weights, in the logits.

    Args:
      logits_TE: fp32.
      valid_T: bool; the others go nowhere.
      implementation: see `implementation.py`. `mosaic` takes up to 256 experts, and groups
        whose size is a multiple of 8.

    Raises:
      ImplementationError: the named implementation cannot run this.
    """
    if kernel_runs(logits_TE, rule, implementation):
        return Routed(*_mosaic(*varying_alike(logits_TE, bias_E, valid_T), rule))
    experts_TK = choose_experts(scores(logits_TE, rule), bias_E, rule)
    weights_TK = expert_weights(scores(logits_TE, rule), experts_TK, rule)
    experts_TK = jnp.where(valid_T[:, None], experts_TK, -1)
    weights_TK = jnp.where(valid_T[:, None], weights_TK, 0)
    return Routed(experts_TK, weights_TK, *ranks_in_groups(experts_TK, logits_TE.shape[1]))


def kernel_runs(
    logits_TE: jax.Array, rule: RoutingRule, implementation: Implementation | None = None
) -> bool:
    """Whether `route` is a kernel there, not plain JAX."""
    T, E = logits_TE.shape
    choice = choose(
        "route",
        implementation,
        shape_class=shape_class(logits_TE.dtype, T, E, rule.topk),
        obstacles={"mosaic": _obstacle(E, rule)},
    )
    return choice.implementation == "mosaic"


def _obstacle(num_experts: int, rule: RoutingRule) -> str | None:
    if num_experts > mosaic.MOST_EXPERTS:
        return f"it takes up to {mosaic.MOST_EXPERTS} experts, not {num_experts}"
    if rule.num_groups and num_experts // rule.num_groups % mosaic.GROUP_MULTIPLE:
        return f"{num_experts} experts in {rule.num_groups} groups are no multiples of 8"
    return mosaic_obstacle()


def scores(logits_TE: jax.Array, rule: RoutingRule) -> jax.Array:
    """What top-k compares, without the bias."""
    if rule.score_function == "sigmoid":
        return jax.nn.sigmoid(logits_TE)
    return jax.nn.softmax(logits_TE, axis=-1) if rule.pre_softmax else logits_TE


def choose_experts(scores_TE: jax.Array, bias_E: jax.Array, rule: RoutingRule) -> jax.Array:
    """int32 [T, K], the best first."""
    compared_TE = lax.stop_gradient(scores_TE) + bias_E
    if rule.num_groups is not None:
        compared_TE = _limited_to_groups(compared_TE, rule)
    return lax.top_k(compared_TE, rule.topk)[1].astype(jnp.int32)


def _limited_to_groups(compared_TE: jax.Array, rule: RoutingRule) -> jax.Array:
    """Minus infinity outside of each token's best groups."""
    T, E = compared_TE.shape
    compared_TGe = compared_TE.reshape(T, rule.num_groups, E // rule.num_groups)
    score_TG = jnp.sum(lax.top_k(compared_TGe, rule.group_best)[0], axis=-1)
    chosen_TK = lax.top_k(score_TG, rule.group_topk)[1]
    allowed_TG = jnp.any(jax.nn.one_hot(chosen_TK, rule.num_groups, dtype=bool), axis=1)
    return jnp.where(allowed_TG[:, :, None], compared_TGe, -jnp.inf).reshape(T, E)


def expert_weights(scores_TE: jax.Array, experts_TK: jax.Array, rule: RoutingRule) -> jax.Array:
    """Of the chosen experts, fp32 [T, K]."""
    # A product with the one-hot choice: its gradient is dense and adds in a fixed order.
    pick_TKE = jax.nn.one_hot(experts_TK, scores_TE.shape[1], dtype=jnp.float32)
    weights = jnp.sum(pick_TKE * scores_TE[:, None, :], axis=-1)
    if rule.score_function == "softmax" and not rule.pre_softmax:
        weights = jax.nn.softmax(weights, axis=-1)
    elif rule.normalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * rule.scaling


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _mosaic(logits_TE, bias_E, valid_T, rule):
    (T, E), block = logits_TE.shape, mosaic.TOKENS
    rows, columns = -T % block, -E % mosaic.EXPERT_MULTIPLE
    logits = jnp.pad(logits_TE, ((0, rows), (0, columns)), constant_values=LOWEST)
    bias = jnp.pad(bias_E, (0, columns), constant_values=mosaic.NOT_ALLOWED)
    valid = jnp.pad(valid_T.astype(jnp.float32), (0, rows))
    experts, weights, numbers = mosaic.route(logits, bias, valid, E, rule)
    experts_TK, weights_TK = experts[:T], weights[:T]
    counts_BE = numbers[block - 1 :: block, :E].astype(jnp.int32)
    before_BE = jnp.cumsum(counts_BE, axis=0) - counts_BE
    token_T1 = jnp.arange(T)[:, None]
    expert_TK = jnp.maximum(experts_TK, 0)
    ranks_TK = numbers[token_T1, expert_TK].astype(jnp.int32) - 1
    ranks_TK += before_BE[token_T1 // block, expert_TK]
    return experts_TK, weights_TK, ranks_TK, jnp.sum(counts_BE, axis=0)


def _forward(logits_TE, bias_E, valid_T, rule):
    routed = _mosaic(logits_TE, bias_E, valid_T, rule)
    return routed, (logits_TE, routed[0])


def _backward(rule, residuals, grads):
    logits_TE, experts_TK = residuals

    def weights_of(logits_TE):
        return expert_weights(scores(logits_TE, rule), jnp.maximum(experts_TK, 0), rule)

    d_weights_TK = jnp.where(experts_TK < 0, 0, grads[1])
    (d_logits_TE,) = jax.vjp(weights_of, logits_TE)[1](d_weights_TK)
    return d_logits_TE, jnp.zeros_like(logits_TE[0]), None


_mosaic.defvjp(_forward, _backward)
