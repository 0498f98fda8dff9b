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
    blocks = _choose("permute", implementation, x_TH.dtype, plan, x_TH.shape[1], blocks)
    return _permute(*_alike(plan, x_TH), blocks)


def unpermute(
    y: jax.Array,
    weights_TK: jax.Array,
    plan: PermutePlan,
    *,
    implementation: Implementation | None = None,
    blocks: mosaic.RowBlocks | None = None,
) -> jax.Array:
    """Weighted sum over each row's places, [T, H]: out[t] = sum_k weights[t, k] y[place[t, k]].

    Differentiable in `y`, [*P, H], and `weights_TK` (fp32); sums in fp32. Implementations as for
    `permute`.
    """
    blocks = _choose("unpermute", implementation, y.dtype, plan, y.shape[-1], blocks)
    return _unpermute(*_alike(plan, y, weights_TK), blocks)


def _choose(op, implementation, dtype, plan: PermutePlan, width: int, blocks):
    """Blocks of the kernel, or None for plain JAX."""
    obstacle = mosaic_obstacle()
    if width % mosaic.WARPGROUP:
        obstacle = f"the width {width} is no multiple of {mosaic.WARPGROUP}"
    (T, K), P = plan.place_TK.shape, plan.source.size
    choice = choose(
        op,
        implementation,
        shape_class=shape_class(dtype, T, K, P, width),
        obstacles={"mosaic": obstacle},
    )
    return choice.mosaic(blocks, mosaic.RowBlocks)


def _alike(plan: PermutePlan, *arrays):
    leaves, tree = jax.tree.flatten((plan, *arrays))
    return jax.tree.unflatten(tree, varying_alike(*leaves))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _permute(plan, x_TH, blocks):
    K = plan.place_TK.shape[1]
    if blocks is not None:
        source_P = plan.source.reshape(-1)
        out_PH = mosaic.permute(x_TH, source_P, plan.starts_G1[-1], K, blocks)
        return out_PH.reshape(*plan.source.shape, -1)
    return _rows(x_TH, plan.source // K)


def _permute_fwd(plan, x_TH, blocks):
    return _permute(plan, x_TH, blocks), plan


def _permute_bwd(blocks, plan, grad):
    return None, _combine(grad, None, plan, blocks)


_permute.defvjp(_permute_fwd, _permute_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _unpermute(plan, y, weights_TK, blocks):
    return _combine(y, weights_TK, plan, blocks)


def _unpermute_fwd(plan, y, weights_TK, blocks):
    return _combine(y, weights_TK, plan, blocks), (plan, y, weights_TK)


def _unpermute_bwd(blocks, residuals, grad_TH):
    plan, y, weights_TK = residuals
    K = weights_TK.shape[1]
    if blocks is not None:
        y_PH = y.reshape(-1, y.shape[-1])
        d_y, d_weights = mosaic.combine_gradient(
            y_PH,
            plan.place_TK,
            weights_TK,
            grad_TH,
            plan.starts_G1,
            plan.counts_G,
            blocks,
        )
        return None, d_y.reshape(y.shape), d_weights.reshape(weights_TK.shape)
    grad = _rows(grad_TH, plan.source // K).astype(jnp.float32)
    weight = _rows(weights_TK.reshape(-1), plan.source)
    d_weight = jnp.sum(grad * y.astype(jnp.float32), axis=-1)
    d_weights_TK = _rows(d_weight.reshape(-1), plan.place_TK)
    d_y = (grad * weight[..., None]).astype(y.dtype)
    return None, d_y, d_weights_TK.astype(weights_TK.dtype)


_unpermute.defvjp(_unpermute_fwd, _unpermute_bwd)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] with zeros where the index is past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


def _combine(y, weights_TK, plan: PermutePlan, blocks: mosaic.RowBlocks | None) -> jax.Array:
    """`unpermute`; without weights they are 1."""
    y_PH = y.reshape(-1, y.shape[-1])
    if blocks is not None:
        return mosaic.combine(y_PH, plan.place_TK, weights_TK, blocks)
    T, K = plan.place_TK.shape
    total = jnp.zeros((T, y_PH.shape[1]), jnp.float32)
    for k in range(K):
        row = _rows(y_PH, plan.place_TK[:, k]).astype(jnp.float32)
        total += row if weights_TK is None else weights_TK[:, k, None] * row
    return total.astype(y.dtype)
