"""The MoE kernels at the sizes of real models, to be compiled for H200 GPUs: recomputed, with their
gradients, in a `shard_map` with types."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mxjax.kernels.grouped_matmul import grouped_matmul
from mxjax.kernels.permute import permute, plan_row_groups, unpermute
from mxjax.kernels.route import RoutingRule, route
from mxjax.kernels.row_groups import row_groups, sufficient_rows

TILE = 128
LITE = (64, 49152 // 6, 6, 2048, 1408)
"""DeepSeek-V2-Lite: experts of a rank, tokens, choices of a token, hidden size, width of an expert,
which is no multiple of a tile's."""


def _shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def _with_gradients(function, *arguments):
    """Of the recomputed function, in all its arguments. Barriers by argument, as around layers: JAX
    fails there on an op whose gradient rule has arrays of its own."""
    recomputed = jax.checkpoint(function, prevent_cse=(True,) * len(arguments))
    out, pullback = jax.vjp(recomputed, *arguments)
    return out, pullback(out)


def _matmul(rows: int):
    def both(x_RK, counts_G, w_GKN):
        groups = row_groups(counts_G, rows, TILE)
        return _with_gradients(
            lambda x, w: grouped_matmul(x, w, groups, implementation="mosaic"), x_RK, w_GKN
        )

    return both


def permute_op(implementation: str):
    """There and back, as `Case` of `compile_for_h200.py`."""
    E, T, K, H, _ = LITE

    def both(x_TH, experts_TK, weights_TK):
        plan, _ = plan_row_groups(experts_TK, E, sufficient_rows(T * K, E, TILE), TILE)

        def there_and_back(x, weights):
            y = permute(x, plan, implementation=implementation)
            return unpermute(y, weights, plan, implementation=implementation)

        return _with_gradients(there_and_back, x_TH, weights_TK)

    shapes = _shape(T, H), _shape(T, K, dtype=jnp.int32), _shape(T, K, dtype=jnp.float32)
    return "permute", both, shapes, 0


ROUTED_TOKENS, ROUTED_EXPERTS = 4096, 256
RULE = RoutingRule(8, "sigmoid", False, True, 2.5, num_groups=8, group_topk=4, group_best=2)
"""DeepSeek-V3."""


def _route(rule: RoutingRule):
    def both(logits_TE, valid_T, bias_E):
        def weights(logits):
            routed = route(logits, bias_E, valid_T, rule, implementation="mosaic")
            return routed.weights_TK, routed

        recomputed = jax.checkpoint(weights, prevent_cse=(True,))
        out, pullback, routed = jax.vjp(recomputed, logits_TE, has_aux=True)
        return routed, pullback(out)

    return both


def moe_ops():
    """As `Case` of `compile_for_h200.py`."""
    E, T, K, H, F = LITE
    rows = sufficient_rows(T * K, E, TILE)
    shapes = _shape(rows, H), _shape(E, dtype=jnp.int32), _shape(E, H, F)
    yield "grouped_matmul", _matmul(rows), shapes, 1
    yield permute_op("mosaic")
    fp32, valid = jnp.float32, _shape(ROUTED_TOKENS, dtype=bool)
    shapes = _shape(ROUTED_TOKENS, ROUTED_EXPERTS, dtype=fp32), valid
    yield "route", _route(RULE), (*shapes, _shape(ROUTED_EXPERTS, dtype=fp32)), 1
