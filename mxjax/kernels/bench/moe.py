"""The MoE kernels at the sizes of Mixtral 8x7B, DeepSeek-V2-Lite, and a rank of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.kernels.batched_matmul import batched_matmul
from mxjax.kernels.bench.cases import DTYPE, Case, Work
from mxjax.kernels.bench.timing import random_floats
from mxjax.kernels.grouped_matmul import (
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    grouped_matmul,
    grouped_matmul_input_gradient,
    grouped_matmul_weight_gradient,
    row_tile,
)
from mxjax.kernels.grouped_matmul_mosaic import MatmulBlocks
from mxjax.kernels.implementation import shape_class
from mxjax.kernels.permute import permute, plan_row_groups, unpermute
from mxjax.kernels.permute_mosaic import RowBlocks
from mxjax.kernels.route import RoutingRule, route
from mxjax.kernels.row_groups import row_groups, sufficient_rows

NAMES = {FORWARD: "grouped", INPUT_GRADIENT: "dgrad", WEIGHT_GRADIENT: "wgrad"}
MATMULS = tuple(
    MatmulBlocks(columns=columns, stages=stages, panel=panel, split_rows=split_rows)
    for columns, stages, panel, split_rows in (
        *((256, 4, 8, False), (256, 4, 16, False), (256, 4, 4, True), (256, 4, 8, True)),
        *((256, 4, 16, True), (128, 6, 8, True)),
    )
)
ROWS = tuple(
    RowBlocks(rows, columns) for rows, columns in ((1, 2048), (2, 1024), (4, 1024), (4, 2048))
)


@dataclass(frozen=True)
class Experts:
    """`rows` rows in all go to E experts, K -> N."""

    E: int
    rows: int
    K: int
    N: int

    def counts(self, skewed: bool) -> np.ndarray:
        """Rows of each expert: alike, or in proportion to 1, 1/2, 1/3, ..."""
        shares = 1 / np.arange(1, self.E + 1) if skewed else np.ones(self.E)
        counts = np.floor(self.rows * shares / shares.sum()).astype(np.int32)
        counts[0] += self.rows - counts.sum()
        return counts


@dataclass(frozen=True)
class Tokens:
    """T tokens of width H with K of E experts each."""

    T: int
    H: int
    E: int
    K: int


EXPERTS = (
    Experts(8, 16384, 4096, 14336),
    Experts(64, 49152, 2048, 1408),
    Experts(32, 32768, 7168, 2048),
)
TOKENS = (Tokens(8192, 4096, 8, 2), Tokens(8192, 2048, 64, 6), Tokens(4096, 7168, 32, 8))
ROUTERS = (
    (8192, 64, RoutingRule(6, "softmax", True, False, 1.0)),
    (4096, 256, RoutingRule(8, "sigmoid", False, True, 2.5, 8, 4, 2)),
)


def moe_cases(small: bool) -> list[Case]:
    """Every case; `small`: of shapes that a CPU runs at once."""
    experts = (Experts(4, 256, 128, 64),) if small else EXPERTS
    tokens = (Tokens(64, 128, 4, 2),) if small else TOKENS
    routers = ((64, 16, ROUTERS[0][2]),) if small else ROUTERS
    return [
        *(case for e in experts for skewed in (False, True) for case in _grouped(e, skewed)),
        *(_batched(e) for e in experts),
        *(case for t in tokens for case in _moves(t)),
        *(_route(*router) for router in routers),
    ]


def _bytes(*sizes: int) -> int:
    return sum(sizes) * DTYPE.dtype.itemsize


def _grouped(e: Experts, skewed: bool) -> Iterator[Case]:
    counts, tile = e.counts(skewed), row_tile()
    R = sufficient_rows(e.rows, e.E, tile)
    groups = row_groups(jnp.asarray(counts), R, tile)
    filled = np.concatenate(
        [
            start * tile + np.arange(count)
            for start, count in zip(np.asarray(groups.first_G1)[:-1], counts, strict=True)
        ]
    )
    x, dy, w = (
        jax.ShapeDtypeStruct(shape, DTYPE) for shape in ((R, e.K), (R, e.N), (e.E, e.K, e.N))
    )
    ops = {
        FORWARD: ((x, w), grouped_matmul),
        INPUT_GRADIENT: ((dy, w), grouped_matmul_input_gradient),
        WEIGHT_GRADIENT: ((x, dy), partial(grouped_matmul_weight_gradient, dtype=DTYPE)),
    }
    for op, (operands, function) in ops.items():

        def make(key, operands=operands):
            values = random_floats(operands)(key)
            used = jnp.zeros((R, 1), DTYPE).at[filled].set(1)
            return tuple(v * used if v.ndim == 2 else v for v in values)

        def run(*operands, function=function, **options):
            return function(*operands, groups, **options)

        yield Case(
            op,
            f"{NAMES[op]} E{e.E} {e.K}->{e.N} {'skewed' if skewed else 'even'}",
            run,
            operands,
            shape_class(DTYPE, R, e.E, e.K, e.N),
            Work(_bytes(e.rows * (e.K + e.N), e.E * e.K * e.N), 2 * e.rows * e.K * e.N),
            None,
            make=make,
            blocks=MATMULS,
            peer=op,
            peer_sizes=(e.K, e.N, *map(int, counts)),
        )


def _batched(e: Experts) -> Case:
    C = e.rows // e.E
    shapes = ((e.E, C, e.K), (e.E, e.K, e.N))
    moved, flops = _bytes(e.rows * (e.K + e.N), e.E * e.K * e.N), 2 * e.rows * e.K * e.N

    def run(x, w, implementation, blocks=None):
        return batched_matmul(x, w, implementation=implementation)

    return Case(
        "batched_matmul",
        f"batched E{e.E} {e.K}->{e.N}",
        run,
        tuple(jax.ShapeDtypeStruct(shape, DTYPE) for shape in shapes),
        shape_class(DTYPE, e.E, C, e.K, e.N),
        Work(moved, flops),
        Work(3 * moved, 3 * flops),
        blocks=(None,),
    )


def _moves(t: Tokens) -> Iterator[Case]:
    tile = row_tile()
    P = sufficient_rows(t.T * t.K, t.E, tile)
    rng = np.random.default_rng(0)
    experts_TK = np.argsort(rng.random((t.T, t.E)), axis=1)[:, : t.K].astype(np.int32)
    plan, _ = plan_row_groups(jnp.asarray(experts_TK), t.E, P, tile)
    one, all_ = t.T * t.H, t.T * t.K * t.H
    name, sizes = f"T{t.T} H{t.H} E{t.E} k{t.K}", shape_class(DTYPE, t.T, t.K, P, t.H)
    x, y = (jax.ShapeDtypeStruct((rows, t.H), DTYPE) for rows in (t.T, P))
    weights = jax.ShapeDtypeStruct((t.T, t.K), jnp.float32)
    yield Case(
        "permute",
        f"permute {name}",
        lambda x, **options: permute(x, plan, **options),
        (x,),
        sizes,
        Work(_bytes(one, all_)),
        Work(_bytes(2 * one, 2 * all_)),
        implementations=("xla", "mosaic", "triton"),
        blocks=ROWS,
    )
    yield Case(
        "unpermute",
        f"unpermute {name}",
        lambda y, weights, **options: unpermute(y, weights, plan, **options),
        (y, weights),
        sizes,
        Work(_bytes(one, all_)),
        Work(_bytes(2 * one, 3 * all_)),
        implementations=("xla", "mosaic", "triton"),
        blocks=ROWS,
    )


def _route(T: int, E: int, rule: RoutingRule) -> Case:
    def run(logits, bias, implementation, blocks=None):
        return route(logits, bias, jnp.ones(T, bool), rule, implementation=implementation)

    return Case(
        "route",
        f"route T{T} E{E} k{rule.topk}",
        run,
        tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((T, E), (E,))),
        shape_class(jnp.float32, T, E, rule.topk),
        Work(4 * T * E + 12 * T * rule.topk),
        None,
        blocks=(None,),
    )
