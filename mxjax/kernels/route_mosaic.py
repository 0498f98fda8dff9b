"""Routing on Hopper GPUs. A warpgroup has 64 tokens in registers, with the scores of all experts;
a token's experts are found by as many maxima as it gets experts. How many tokens up to one chose
the same expert is a product with a triangle of ones, on the tensor cores: exact, and in a fixed
order. `route.py` picks each choice's number, and adds
tokens of other blocks, since no block waits for another.

Shapes: T tokens, E experts, K choices.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mxjax.kernels.implementation import mosaic_kernel, traced_once
from mxjax.kernels.mosaic_ring import swizzled

if TYPE_CHECKING:
    from mxjax.kernels.route import RoutingRule

TOKENS = 64
"""Of a block: as many rows as one wgmma has."""
EXPERT_MULTIPLE, MOST_EXPERTS, GROUP_MULTIPLE = 64, 256, 8
ROW = plgpu.Layout.WGMMA.reduce(1)
"""Layout of one number for each token."""
COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""Layout of one number for each expert."""
NOT_ALLOWED, TAKEN = -3e38, -jnp.inf
"""Stand in for the scores of experts outside of a token's groups, and of those it has already."""


@traced_once("num_experts", "rule")
def route(
    logits_TE: jax.Array,
    bias_E: jax.Array,
    valid_T: jax.Array,
    num_experts: int,
    rule: RoutingRule,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of whole blocks of tokens, and of a multiple of 64 experts, of which the last may be none:
    their bias is `NOT_ALLOWED`. `valid_T` is fp32, 0 or 1.

    Returns:
      experts int32 and weights fp32, both [T, K]; how many tokens of the same block up to this one
      chose each expert, fp32 [T, E].
    """
    T, E = logits_TE.shape
    K = rule.topk

    def route_kernel(
        logits_gmem, bias_gmem, valid_gmem, triangle_gmem,
        experts_gmem, weights_gmem, numbers_gmem,
        logits_smem, member_smem, triangle_smem, chosen_smem, arrived,
    ):  # fmt: skip
        rows = pl.ds(lax.axis_index("block") * TOKENS, TOKENS)
        plgpu.copy_gmem_to_smem(logits_gmem.at[rows], logits_smem, arrived)
        plgpu.copy_gmem_to_smem(triangle_gmem, triangle_smem, arrived)
        plgpu.barrier_wait(arrived)
        valid = plgpu.load(valid_gmem.at[rows], layout=ROW, optimized=False) > 0.5
        logits = _load(logits_smem)
        compared, largest, total = _compared(logits, rule)
        bias = plgpu.load(bias_gmem, layout=COLUMN, optimized=False)
        compared += lax.broadcast_in_dim(bias, (TOKENS, E), (1,))
        if rule.num_groups is not None:
            compared = _limited_to_groups(compared, num_experts // rule.num_groups, rule)

        def choose(k, compared):
            _, expert, hit = _best(compared)
            chosen_smem[k] = _pick(hit, _load(logits_smem))
            _store(experts_gmem.at[rows, k], jnp.where(valid, expert, jnp.full_like(expert, -1)))
            return jnp.where(hit, jnp.full_like(compared, TAKEN), compared)

        compared = lax.fori_loop(0, K, choose, compared)
        chosen = [plgpu.load(chosen_smem.at[k], layout=ROW) for k in range(K)]
        for k, weight in enumerate(_weights(chosen, largest, total, rule)):
            _store(weights_gmem.at[rows, k], jnp.where(valid, weight, jnp.zeros_like(weight)))

        member = (compared == TAKEN) & _wide(valid, E)
        member_smem[...] = member.astype(jnp.float32).astype(jnp.bfloat16)
        plgpu.commit_smem()

        def up_to_here(acc):
            plgpu.wgmma(acc, triangle_smem, member_smem)
            return acc[...]

        logits_smem[...] = pl.run_scoped(up_to_here, plgpu.ACC((TOKENS, E), jnp.float32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(logits_smem, numbers_gmem.at[rows])
        plgpu.wait_smem_to_gmem(0)

    triangle = jnp.tril(jnp.ones((TOKENS, TOKENS), jnp.bfloat16))
    kernel = mosaic_kernel(
        route_kernel,
        out_type=(
            jax.ShapeDtypeStruct((T, K), jnp.int32),
            jax.ShapeDtypeStruct((T, K), jnp.float32),
            jax.ShapeDtypeStruct((T, E), jnp.float32),
        ),
        scratch_types=(
            swizzled((TOKENS, E), jnp.float32),
            swizzled((TOKENS, E), jnp.bfloat16),
            swizzled((TOKENS, TOKENS), jnp.bfloat16),
            plgpu.SMEM((K, TOKENS), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ),
        grid=(T // TOKENS,),
        grid_names=("block",),
    )
    return kernel(logits_TE, bias_E, valid_T, triangle)


def _store(gmem, value: jax.Array) -> None:
    """With gaps between the elements, which JAX 0.12 wants to be told."""
    if hasattr(plgpu, "store"):
        plgpu.store(gmem, value, optimized=False)
    else:
        gmem[...] = value


def _load(smem) -> jax.Array:
    return plgpu.load(smem, layout=plgpu.Layout.WGMMA, optimized=False)


def _columns(width: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (TOKENS, width), 1, layout=plgpu.Layout.WGMMA)


def _wide(row: jax.Array, width: int) -> jax.Array:
    """A token's number in each of its columns."""
    return lax.broadcast_in_dim(row, (TOKENS, width), (0,))


def _best(scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The largest score of each token, the first column that has it, and where that is."""
    width = scores.shape[1]
    best, columns = jnp.max(scores, axis=1), _columns(width)
    from_end = jnp.where(
        scores == _wide(best, width),
        (width - columns).astype(jnp.float32),
        jnp.zeros_like(scores),
    )
    # Without any (not a number): the last column rather than one outside.
    first = width - jnp.maximum(jnp.max(from_end, axis=1), 1).astype(jnp.int32)
    return best, first, columns == _wide(first, width)


def _pick(hit: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(hit, values, jnp.zeros_like(values)), axis=1)


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))


def _compared(logits: jax.Array, rule: RoutingRule):
    """What top-k compares, and maximum and sum of a softmax over all experts."""
    if rule.score_function == "sigmoid":
        return _sigmoid(logits), None, None
    if not rule.pre_softmax:
        return logits, None, None
    width = logits.shape[1]
    largest = jnp.max(logits, axis=1)
    powers = jnp.exp(logits - _wide(largest, width))
    total = jnp.sum(powers, axis=1)
    return powers / _wide(total, width), largest, total


def _limited_to_groups(compared: jax.Array, size: int, rule: RoutingRule) -> jax.Array:
    width = compared.shape[1]
    scores = []
    for group in range(rule.num_groups):
        left, score = compared[:, group * size : (group + 1) * size], None
        for _ in range(rule.group_best):
            best, _, hit = _best(left)
            left = jnp.where(hit, jnp.full_like(left, TAKEN), left)
            score = best if score is None else score + best
        scores.append(score)
    columns = _columns(width)
    for group, score in enumerate(scores):
        # Groups that come before it; of equals the first does.
        better = jnp.zeros_like(score)
        for other, rival in enumerate(scores):
            if other != group:
                before = rival >= score if other < group else rival > score
                better += before.astype(jnp.float32)
        mine = (columns >= group * size) & (columns < (group + 1) * size)
        dropped = mine & _wide(better > rule.group_topk - 0.5, width)
        compared = jnp.where(dropped, jnp.full_like(compared, NOT_ALLOWED), compared)
    return compared


def _weights(chosen: list[jax.Array], largest, total, rule: RoutingRule) -> list[jax.Array]:
    """From the logits of the chosen experts."""
    normalise = rule.normalise
    if rule.score_function == "sigmoid":
        scores = [_sigmoid(z) for z in chosen]
    elif rule.pre_softmax:
        scores = [jnp.exp(z - largest) / total for z in chosen]
    else:
        largest = functools.reduce(jnp.maximum, chosen)
        scores, normalise = [jnp.exp(z - largest) for z in chosen], True
    if normalise:
        total = functools.reduce(jnp.add, scores) + 1e-20
        scores = [score / total for score in scores]
    return [score * rule.scaling for score in scores]
