"""Moving token rows to the places of their groups and back, with gathers only, in both directions.

A row goes to up to K groups (experts, or ranks that hold experts). Each group has a run of places,
filled in row order; the rest of them are zero. XLA would turn the gradient of a gather into a
scatter-add, which is slow on GPUs and adds in no fixed order; here the gradient of each direction
is a gather too.

Shapes: T rows, K choices of a row, G groups, P places, H row width; `*P` is [P], or [G, C] where
every group has C places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from mxjax.kernels import permute_mosaic as mosaic
from mxjax.kernels.implementation import (
    Implementation,
    choose,
    mosaic_obstacle,
    shape_class,
    varying_alike,
)
from mxjax.kernels.row_groups import RowGroups, row_groups
from mxjax.kernels.triton_launch import triton_obstacle

Kernel = mosaic.RowBlocks | Literal["triton"] | None
"""What runs a call: the Mosaic kernels with these blocks, the Triton kernels, or plain JAX."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PermutePlan:
    """Who sits where."""

    place_TK: jax.Array
    """Place of each choice, or P: nowhere."""
    source: jax.Array
    """[*P]: flat choice t * K + k in each place, or T * K: empty."""
    counts_G: jax.Array
    """Rows that each group was asked to hold; more than it has places means overflow."""
    starts_G1: jax.Array
    """[G + 1]: group g has the places starts_G1[g] to starts_G1[g + 1] - 1. Places behind the last
    group's hold anything."""


def plan_permute(group_TK: jax.Array, num_groups: int, capacity: int) -> PermutePlan:
    """Places of groups that have `capacity` of them each: [*P] is [G, C].

    Args:
      group_TK: int32 group of each choice, negative for none; no group twice in one row.
      capacity: C. Choices past it get no place: callers compare `counts_G` with C.
    """
    rank_TK, counts_G = ranks_in_groups(group_TK, num_groups)
    starts_G1 = jnp.arange(num_groups + 1, dtype=jnp.int32) * capacity
    return _plan(group_TK, rank_TK, counts_G, starts_G1, (num_groups, capacity))


def plan_row_groups(
    group_TK: jax.Array, num_groups: int, num_rows: int, tile: int
) -> tuple[PermutePlan, RowGroups]:
    """Places of groups of any size, each padded to whole tiles: [*P] is [num_rows].

    Args:
      group_TK: as for `plan_permute`.
      num_rows: a multiple of `tile`; `sufficient_rows` says how many hold a number of choices
        whatever their groups. Choices past them get no place.
    """
    rank_TK, counts_G = ranks_in_groups(group_TK, num_groups)
    groups = row_groups(counts_G, num_rows, tile)
    plan = _plan(group_TK, rank_TK, counts_G, groups.first_G1 * tile, (num_rows,))
    return plan, groups


def ranks_in_groups(group_TK: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array]:
    """How many choices of the same group come before each, and how many each group has in all."""
    member_TG = jnp.sum(jax.nn.one_hot(group_TK, num_groups, dtype=jnp.int32), axis=1)
    rank_TG = jnp.cumsum(member_TG, axis=0) - member_TG
    rank_TK = jnp.take_along_axis(rank_TG, jnp.maximum(group_TK, 0), axis=1)
    return rank_TK, jnp.sum(member_TG, axis=0)


def _plan(group_TK, rank_TK, counts_G, starts_G1, shape) -> PermutePlan:
    T, K = group_TK.shape
    num_places = math.prod(shape)
    group = jnp.maximum(group_TK, 0)
    place_TK = starts_G1[group] + rank_TK
    placed_TK = (group_TK >= 0) & (place_TK < starts_G1[group + 1])
    place_TK = jnp.where(placed_TK, place_TK, num_places)
    source = jnp.full((num_places,), T * K, jnp.int32)
    choices = jnp.arange(T * K, dtype=jnp.int32)
    source = source.at[place_TK.reshape(-1)].set(choices, mode="drop")
    return PermutePlan(place_TK, source.reshape(shape), counts_G, starts_G1)


def permute(
    x_TH: jax.Array,
    plan: PermutePlan,
    *,
    implementation: Implementation | None = None,
    blocks: mosaic.RowBlocks | None = None,
) -> jax.Array:
    """Rows at their places, [*P, H]; empty places are zero.

    Args:
      implementation: also of the gradient; see `implementation.py`. `mosaic` takes widths that are
        multiples of 128.
      blocks: of the kernels; None: as measured, or their defaults.
    """
    kernel = _choose("permute", implementation, x_TH.dtype, plan, x_TH.shape[1], blocks)
    return _permute(*_alike(plan, x_TH), kernel)


def unpermute(
    y: jax.Array,
    weights_TK: jax.Array | None,
    plan: PermutePlan,
    *,
    implementation: Implementation | None = None,
    blocks: mosaic.RowBlocks | None = None,
) -> jax.Array:
    """Weighted sum over each row's places, [T, H]: out[t] = sum_k weights[t, k] y[place[t, k]].

    Differentiable in `y`, [*P, H], and `weights_TK` (fp32; None: 1); sums in fp32. The gradient of
    the weights needs `y`, without weights nothing but the plan is kept. Implementations as for
    `permute`.
    """
    kernel = _choose("unpermute", implementation, y.dtype, plan, y.shape[-1], blocks)
    if weights_TK is None:
        return _sum_places(*_alike(plan, y), kernel)
    return _unpermute(*_alike(plan, y, weights_TK), kernel)


def weights_of_places(weights_TK: jax.Array, plan: PermutePlan) -> jax.Array:
    """Weight of the choice in each place, [*P]; 0 in empty places. Differentiable."""
    return _place_weights(*_alike(plan, weights_TK))


def _choose(op, implementation, dtype, plan: PermutePlan, width: int, blocks) -> Kernel:
    obstacle = mosaic_obstacle()
    if width % mosaic.WARPGROUP:
        obstacle = f"the width {width} is no multiple of {mosaic.WARPGROUP}"
    (T, K), P = plan.place_TK.shape, plan.source.size
    choice = choose(
        op,
        implementation,
        shape_class=shape_class(dtype, T, K, P, width),
        obstacles={"mosaic": obstacle, "triton": triton_obstacle()},
    )
    return choice.kernel(blocks, mosaic.RowBlocks)


def _alike(plan: PermutePlan, *arrays):
    leaves, tree = jax.tree.flatten((plan, *arrays))
    return jax.tree.unflatten(tree, varying_alike(*leaves))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _permute(plan, x_TH, kernel: Kernel):
    K = plan.place_TK.shape[1]
    if kernel is not None:
        operands = (x_TH, plan.source.reshape(-1), plan.starts_G1[-1], K)
        if kernel == "triton":
            from mxjax.kernels import permute_triton as triton

            out_PH = triton.permute(*operands)
        else:
            out_PH = mosaic.permute(*operands, kernel)
        return out_PH.reshape(*plan.source.shape, -1)
    return _rows(x_TH, plan.source // K)


def _permute_fwd(plan, x_TH, kernel):
    return _permute(plan, x_TH, kernel), plan


def _permute_bwd(kernel, plan, grad):
    return None, _combine(grad, None, plan, kernel)


_permute.defvjp(_permute_fwd, _permute_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _unpermute(plan, y, weights_TK, kernel):
    return _combine(y, weights_TK, plan, kernel)


def _unpermute_fwd(plan, y, weights_TK, kernel):
    return _combine(y, weights_TK, plan, kernel), (plan, y, weights_TK)


def _unpermute_bwd(kernel, residuals, grad_TH):
    plan, y, weights_TK = residuals
    K = weights_TK.shape[1]
    if kernel is not None:
        operands = (y.reshape(-1, y.shape[-1]), plan.place_TK, weights_TK, grad_TH)
        if kernel == "triton":
            from mxjax.kernels import permute_triton as triton

            places = plan.source.reshape(-1), plan.starts_G1[-1]
            d_y, d_weights = triton.combine_gradient(*operands, *places)
        else:
            places = plan.starts_G1, plan.counts_G
            d_y, d_weights = mosaic.combine_gradient(*operands, *places, kernel)
        return None, d_y.reshape(y.shape), d_weights.reshape(weights_TK.shape)
    grad = _rows(grad_TH, plan.source // K).astype(jnp.float32)
    weight = _rows(weights_TK.reshape(-1), plan.source)
    d_weight = jnp.sum(grad * y.astype(jnp.float32), axis=-1)
    d_weights_TK = _rows(d_weight.reshape(-1), plan.place_TK)
    d_y = (grad * weight[..., None]).astype(y.dtype)
    return None, d_y, d_weights_TK.astype(weights_TK.dtype)


_unpermute.defvjp(_unpermute_fwd, _unpermute_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sum_places(plan, y, kernel):
    return _combine(y, None, plan, kernel)


def _sum_places_fwd(plan, y, kernel):
    return _sum_places(plan, y, kernel), plan


def _sum_places_bwd(kernel, plan, grad_TH):
    return None, _permute(plan, grad_TH, kernel)


_sum_places.defvjp(_sum_places_fwd, _sum_places_bwd)


@jax.custom_vjp
def _place_weights(plan, weights_TK):
    return _rows(weights_TK.reshape(-1), plan.source)


def _place_weights_fwd(plan, weights_TK):
    return _place_weights(plan, weights_TK), plan


def _place_weights_bwd(plan, grad):
    return None, _rows(grad.reshape(-1), plan.place_TK)


_place_weights.defvjp(_place_weights_fwd, _place_weights_bwd)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] with zeros where the index is past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


def _combine(y, weights_TK, plan: PermutePlan, kernel: Kernel) -> jax.Array:
    """`unpermute`; without weights they are 1."""
    y_PH = y.reshape(-1, y.shape[-1])
    if kernel == "triton":
        from mxjax.kernels import permute_triton as triton

        return triton.combine(y_PH, plan.place_TK, weights_TK)
    if kernel is not None:
        return mosaic.combine(y_PH, plan.place_TK, weights_TK, kernel)
    T, K = plan.place_TK.shape
    total = jnp.zeros((T, y_PH.shape[1]), jnp.float32)
    for k in range(K):
        row = _rows(y_PH, plan.place_TK[:, k]).astype(jnp.float32)
        total += row if weights_TK is None else weights_TK[:, k, None] * row
    return total.astype(y.dtype)
