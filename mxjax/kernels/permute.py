"""Moving token rows into equal-length groups and back, with gathers only, in both directions.

A row goes to up to K groups (experts, or ranks that hold experts). Each group has C places, filled
in row order; the rest are zero. XLA would turn the gradient of a gather into a scatter-add, which
is slow on GPUs and adds in no fixed order; here the gradient of each direction is the gather of
the other.

Shapes: T rows, K choices of a row, G groups, C places of a group, H row width.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PermutePlan:
    """Who sits where."""

    place_TK: jax.Array
    """Flat place g * C + c of each choice, or G * C: nowhere."""
    source_GC: jax.Array
    """Flat choice t * K + k in each place, or T * K: empty."""
    counts_G: jax.Array
    """Rows that each group was asked to hold; more than C means overflow."""


def plan_permute(group_TK: jax.Array, num_groups: int, capacity: int) -> PermutePlan:
    """Assign places to choices.

    Args:
      group_TK: int32 group of each choice, negative for none; no group twice in one row.
      capacity: C. Choices past it get no place: callers compare `counts_G` with C.
    """
    T, K = group_TK.shape
    member_TG = jnp.sum(jax.nn.one_hot(group_TK, num_groups, dtype=jnp.int32), axis=1)
    rank_TG = jnp.cumsum(member_TG, axis=0) - member_TG
    rank_TK = jnp.take_along_axis(rank_TG, jnp.maximum(group_TK, 0), axis=1)
    placed_TK = (group_TK >= 0) & (rank_TK < capacity)
    place_TK = jnp.where(placed_TK, group_TK * capacity + rank_TK, num_groups * capacity)
    source = jnp.full((num_groups * capacity,), T * K, jnp.int32)
    choices = jnp.arange(T * K, dtype=jnp.int32)
    source = source.at[place_TK.reshape(-1)].set(choices, mode="drop")
    return PermutePlan(place_TK, source.reshape(num_groups, capacity), jnp.sum(member_TG, axis=0))


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] with zeros where the index is past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def permute(x_TH: jax.Array, plan: PermutePlan) -> jax.Array:
    """Rows at their places, [G, C, H]; empty places are zero."""
    K = plan.place_TK.shape[1]
    return _rows(x_TH, plan.source_GC // K)


def _permute_fwd(x_TH, plan):
    return permute(x_TH, plan), plan


def _permute_bwd(plan, grad_GCH):
    ones_TK = jnp.ones(plan.place_TK.shape, jnp.float32)
    return _combine(grad_GCH, ones_TK, plan), None


permute.defvjp(_permute_fwd, _permute_bwd)


def _combine(y_GCH: jax.Array, weights_TK: jax.Array, plan: PermutePlan) -> jax.Array:
    y_PH = y_GCH.reshape(-1, y_GCH.shape[-1])
    T, K = plan.place_TK.shape
    total = jnp.zeros((T, y_PH.shape[1]), jnp.float32)
    for k in range(K):
        total += weights_TK[:, k, None] * _rows(y_PH, plan.place_TK[:, k]).astype(jnp.float32)
    return total.astype(y_GCH.dtype)


@jax.custom_vjp
def unpermute(y_GCH: jax.Array, weights_TK: jax.Array, plan: PermutePlan) -> jax.Array:
    """Weighted sum over each row's places, [T, H]: out[t] = sum_k weights[t, k] y[place[t, k]].

    Differentiable in `y_GCH` and `weights_TK` (fp32); sums in fp32.
    """
    return _combine(y_GCH, weights_TK, plan)


def _unpermute_fwd(y_GCH, weights_TK, plan):
    return _combine(y_GCH, weights_TK, plan), (y_GCH, weights_TK, plan)


def _unpermute_bwd(residuals, grad_TH):
    y_GCH, weights_TK, plan = residuals
    K = weights_TK.shape[1]
    grad_GCH = _rows(grad_TH, plan.source_GC // K).astype(jnp.float32)
    weight_GC = _rows(weights_TK.reshape(-1), plan.source_GC)
    d_weight_GC = jnp.sum(grad_GCH * y_GCH.astype(jnp.float32), axis=-1)
    d_weights_TK = _rows(d_weight_GC.reshape(-1), plan.place_TK)
    d_y_GCH = (grad_GCH * weight_GC[..., None]).astype(y_GCH.dtype)
    return d_y_GCH, d_weights_TK.astype(weights_TK.dtype), None


unpermute.defvjp(_unpermute_fwd, _unpermute_bwd)
