"""Attention within documents, forward; `attention_mosaic.py` has the legend and the parts.

The two computing warpgroups take turns at the tensor cores (Shah et al. 2024, FlashAttention-3,
section 3.1): while one has its scores made, the other one computes exponentials. Each SM runs one
thread block, which takes tiles of queries until none is left; the first copies of a tile run while
the last one is finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mxjax.kernels.attention_mosaic import (
    COLUMN,
    MASKED,
    ROW,
    TILE,
    DocumentCall,
    R,
    Run,
    Sizes,
    divided,
    filled,
    in_warpgroups,
    launch,
    over_run,
    plus_product,
    product,
    refill,
    ring_barriers,
    rows,
    run_of,
    seen,
    stage_of,
)
from mxjax.kernels.document_blocks import runs_of_keys
from mxjax.kernels.implementation import num_multiprocessors, traced_once
from mxjax.kernels.mosaic_ring import NUM_CONSUMERS, THREAD, swizzled


@traced_once("call")
def document_attention(
    q_BSND: jax.Array,
    k_BTGD: jax.Array,
    v_BTGE: jax.Array,
    q_ids_BS: jax.Array,
    k_ids_BT: jax.Array,
    call: DocumentCall,
) -> tuple[jax.Array, jax.Array]:
    """Output [B, S, N, E] and log-sum-exp [B, N, S] fp32 of attention to keys with the query's id.

    The logarithm is to base 2, as the gradient wants it: to base e and back it would be rounded
    twice. A query that sees nothing has the output 0 and the log-sum-exp `MASKED`.
    """
    s, dtype = Sizes.of(q_BSND, k_BTGD, v_BTGE), q_BSND.dtype
    C, stages = call.blocks.keys, call.blocks.stages
    num_tiles = s.B * s.N * (s.S // TILE)

    def document_attention_kernel(*refs, **scratch):
        _Forward(s, call, *refs, **scratch).run()

    def ring_of(width):
        return swizzled((stages, C, width), dtype)

    scratch = {
        "q": swizzled((NUM_CONSUMERS, R, s.D), dtype),
        "q_ids": plgpu.SMEM((NUM_CONSUMERS, R), jnp.int32),
        "k": ring_of(s.D),
        "k_ids": plgpu.SMEM((stages, C), jnp.int32),
        "v": ring_of(s.E),
        "out": swizzled((NUM_CONSUMERS, R, s.E), dtype),
        "lse": plgpu.SMEM((NUM_CONSUMERS, R), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=2, num_barriers=NUM_CONSUMERS),
        "q_empty": plgpu.Barrier(num_barriers=NUM_CONSUMERS),
        "turns": plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
    } | ring_barriers(stages, {"k": 2, "v": 1})
    outs = [
        jax.ShapeDtypeStruct((s.B, s.S, s.N, s.E), dtype),
        jax.ShapeDtypeStruct((s.B, s.N, s.S), jnp.float32),
    ]
    runs = runs_of_keys(q_ids_BS, k_ids_BT, TILE, C, call.causal)
    operands = runs, q_ids_BS, k_ids_BT, q_BSND, k_BTGD, v_BTGE
    num_blocks = min(num_multiprocessors(), num_tiles)
    return launch(document_attention_kernel, outs, num_blocks, scratch, *operands)


LOWEST = float(jnp.finfo(jnp.float32).min)
"""Where the maximum of scores begins: -inf less -inf would be no number."""


class _Tile(NamedTuple):
    """128 queries of one head."""

    batch: jax.Array
    head: jax.Array
    first: jax.Array
    """Index of the first query."""
    run: Run
    """Of the blocks of keys."""


@dataclass(frozen=True)
class _Forward:
    """The kernel: arrays in GMEM, then buffers and barriers in shared memory."""

    sizes: Sizes
    call: DocumentCall
    runs_gmem: Any
    q_ids_gmem: Any
    k_ids_gmem: Any
    q_gmem: Any
    k_gmem: Any
    v_gmem: Any
    out_gmem: Any
    lse_gmem: Any
    q: Any
    q_ids: Any
    k: Any
    k_ids: Any
    v: Any
    out: Any
    lse: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    turns: Any

    @property
    def C(self) -> int:
        return self.k.shape[1]

    def run(self) -> None:
        def copy():
            self._for_my_tiles(self._copy)
            for half in range(NUM_CONSUMERS):
                plgpu.barrier_wait(self.q_empty.at[half])

        def compute():
            group = lax.axis_index(THREAD)
            plgpu.barrier_arrive(self.q_empty.at[group])
            # One is half a step behind the other, from here to the end.
            pl.when(group == 1)(self._take_turns)
            self._for_my_tiles(self._attend)
            pl.when(group == 0)(self._take_turns)

        in_warpgroups(copy, compute, (self.k_empty, self.v_empty))

    def _for_my_tiles(self, body) -> None:
        """`body(tile, step)` returns the step after the tile's; steps of all tiles are counted
        together."""
        s = self.sizes
        per_head = s.S // TILE
        block, num_blocks = lax.axis_index("block"), lax.axis_size("block")
        num_tiles = s.B * s.N * per_head

        def one(i, step):
            batch, rest = divided(block + i * num_blocks, s.N * per_head)
            place, head = divided(rest, s.N)
            # Late tiles first: where the mask is causal they are the longest ones.
            tile = per_head - 1 - place
            run = run_of(self.runs_gmem, batch, tile)
            return body(_Tile(batch, head, tile * TILE, run), step)

        mine = lax.div(num_tiles - 1 - block, jnp.int32(num_blocks)) + 1
        lax.fori_loop(0, mine, one, jnp.int32(0))

    def _copy(self, tile: _Tile, step):
        batch, head, first, run = tile
        for half in range(NUM_CONSUMERS):
            queries = pl.ds(first + half * R, R)
            q = self.q_gmem.at[batch, queries, head], self.q
            ids = self.q_ids_gmem.at[batch, queries], self.q_ids
            refill(half, self.q_empty, self.q_full, q, ids)
        kv_head = lax.div(head, jnp.int32(self.sizes.N // self.sizes.G))

        def one(block, step):
            stage, keys = stage_of(step, self.k), pl.ds(block * self.C, self.C)
            k = self.k_gmem.at[batch, keys, kv_head], self.k
            ids = self.k_ids_gmem.at[batch, keys], self.k_ids
            v = self.v_gmem.at[batch, keys, kv_head], self.v
            refill(stage, self.k_empty, self.k_full, k, ids)
            refill(stage, self.v_empty, self.v_full, v)
            return step + 1

        return lax.fori_loop(run.begin, run.end, one, step)

    def _attend(self, tile: _Tile, step):
        group = lax.axis_index(THREAD)
        run = tile.run
        plgpu.barrier_wait(self.q_full.at[group])
        q_ids = plgpu.load(self.q_ids.at[group], layout=ROW)
        first = tile.first + group * R

        def visit(masked, block, carry):
            step, *sums = carry
            stage = stage_of(step, self.k)
            scores = self._scores(stage, block, q_ids, first, masked)

            # As early as can be: the other half may already wait for keys of the next tile, which
            # come after this half's next queries.
            @pl.when(block == run.end - 1)
            def _seen_all():
                plgpu.barrier_arrive(self.q_empty.at[group])

            return step + 1, *self._added(stage, scores, *sums)

        E = self.sizes.E
        sums = filled((R, E), 0), filled((R,), LOWEST, ROW), filled((R,), 0, ROW)
        step, *sums = over_run(run, visit, (step, *sums))

        @pl.when(run.begin == run.end)
        def _nothing_to_see():
            plgpu.barrier_arrive(self.q_empty.at[group])

        self._store(tile, first, *sums)
        return step

    def _take_turns(self) -> None:
        plgpu.barrier_arrive(self.turns)
        plgpu.barrier_wait(self.turns)

    def _scores(self, stage, block, q_ids, first, masked: bool) -> jax.Array:
        group = lax.axis_index(THREAD)
        plgpu.barrier_wait(self.k_full.at[stage])
        scores = product(self.q.at[group], self.k.at[stage].T, meanwhile=self._take_turns)
        if masked:
            k_ids = plgpu.load(self.k_ids.at[stage], layout=COLUMN)
            rows_from = 1 if self.call.causal else None
            visible = seen(q_ids, k_ids, first, block * self.C, rows_from)
            # -inf and not a low number: of that, multiplied and subtracted in one instruction,
            # something would be left over.
            scores = jnp.where(visible, scores, -jnp.inf)
        plgpu.barrier_arrive(self.k_empty.at[stage])
        return scores

    def _added(self, stage, scores, out, top, total):
        """Output, maximum and sum of exponentials with one more block of keys."""
        C, E, factor = self.C, self.sizes.E, self.call.factor
        higher = jnp.maximum(top, scores.max(axis=1) * factor)
        shrink = jnp.exp2(top - higher)
        weights = jnp.exp2(scores * factor - rows(higher, C))
        out = out * rows(shrink, E)
        total = total * shrink + weights.sum(axis=1)
        weights = weights.astype(self.v.dtype)
        # All of it before the other half's turn ends.
        out, total, higher, weights = lax.optimization_barrier((out, total, higher, weights))
        plgpu.barrier_wait(self.v_full.at[stage])
        self._take_turns()
        out = plus_product(out, weights, self.v.at[stage])
        plgpu.barrier_arrive(self.v_empty.at[stage])
        return out, higher, total

    def _store(self, tile: _Tile, first, out, top, total) -> None:
        group, queries = lax.axis_index(THREAD), pl.ds(first, R)
        something = total > 0
        divisor = jnp.where(something, total, 1.0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.out[group] = (out / rows(divisor, self.sizes.E)).astype(self.out.dtype)
        self.lse[group] = jnp.where(something, top + jnp.log2(divisor), MASKED)
        plgpu.commit_smem()
        target = self.out_gmem.at[tile.batch, queries, tile.head]
        plgpu.copy_smem_to_gmem(self.out.at[group], target)
        target = self.lse_gmem.at[tile.batch, tile.head, queries]
        plgpu.copy_smem_to_gmem(self.lse.at[group], target)
