"""Gradient of attention within documents; `attention_mosaic.py` has the legend and the parts.

One kernel for queries, one for keys and values. Each sums over what its tile meets in a fixed
order, in registers: no two thread blocks add to the same place, and the results of every run are
the same bits. For that scores are made in both (seven products instead of five). With
p = exp(s - log-sum-exp) and delta = sum(dout * out),

    dv = p^T dout,   ds = p * (dout v^T - delta),   dq = scale * ds k,   dk = scale * ds^T q
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mxjax.kernels.attention_mosaic import (
    COLUMN,
    ROW,
    TILE,
    DocumentCall,
    R,
    Sizes,
    columns,
    divided,
    fill,
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
from mxjax.kernels.document_blocks import runs_of_keys, runs_of_queries
from mxjax.kernels.implementation import num_multiprocessors, traced_once
from mxjax.kernels.mosaic_ring import NUM_CONSUMERS, THREAD, swizzled

type Operands = tuple[jax.Array, ...]
"""q, k, v, ids of queries and keys, gradient of the output, log2-sum-exp and delta [B, N, S]."""


@traced_once("call")
def document_attention_gradient(
    q_BSND: jax.Array,
    k_BTGD: jax.Array,
    v_BTGE: jax.Array,
    q_ids_BS: jax.Array,
    k_ids_BT: jax.Array,
    results: tuple[jax.Array, jax.Array, jax.Array],
    call: DocumentCall,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v in their dtype.

    Args:
      results: output and log-sum-exp (to base 2) of the whole rows, of which these keys may be a
        part, and the gradient of the output.
    """
    out, lse_BNS, d_out = results
    delta_BNS = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1).swapaxes(1, 2)
    d_out = d_out.astype(q_BSND.dtype)
    ids = q_ids_BS, k_ids_BT
    operands = q_BSND, k_BTGD, v_BTGE, *ids, d_out, lse_BNS, delta_BNS
    return _gradient_of_queries(operands, call), *_gradient_of_keys(operands, call)


@dataclass(frozen=True)
class _Operands:
    """What both kernels read, in GMEM."""

    sizes: Sizes
    call: DocumentCall
    runs_gmem: Any
    q_gmem: Any
    k_gmem: Any
    v_gmem: Any
    q_ids_gmem: Any
    k_ids_gmem: Any
    d_out_gmem: Any
    lse_gmem: Any
    delta_gmem: Any


def _gradient_of_queries(operands: Operands, call: DocumentCall) -> jax.Array:
    q, k, v, q_ids, k_ids, *_ = operands
    s, C, stages = Sizes.of(q, k, v), call.blocks.d_q_keys, call.blocks.d_q_stages

    def attention_query_gradient_kernel(*refs, **scratch):
        _QueryGradient(s, call, *refs, **scratch).run()

    scratch = {
        "q": swizzled((NUM_CONSUMERS, R, s.D), q.dtype),
        "d_out": swizzled((NUM_CONSUMERS, R, s.E), q.dtype),
        "lse": plgpu.SMEM((NUM_CONSUMERS, R), jnp.float32),
        "delta": plgpu.SMEM((NUM_CONSUMERS, R), jnp.float32),
        "q_ids": plgpu.SMEM((NUM_CONSUMERS, R), jnp.int32),
        "own": plgpu.Barrier(num_arrivals=5, num_barriers=NUM_CONSUMERS),
        "k": swizzled((stages, C, s.D), q.dtype),
        "k_ids": plgpu.SMEM((stages, C), jnp.int32),
        "v": swizzled((stages, C, s.E), q.dtype),
    } | ring_barriers(stages, {"k": 2, "v": 1})
    runs = runs_of_keys(q_ids, k_ids, TILE, C, call.causal)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    num_blocks = s.B * s.N * (s.S // TILE)
    return launch(attention_query_gradient_kernel, out, num_blocks, scratch, runs, *operands)


@dataclass(frozen=True)
class _QueryGradient(_Operands):
    """The kernel: a tile of queries, and a ring of keys and values. Arrays in GMEM, then buffers
    and barriers in shared memory."""

    d_q_gmem: Any
    q: Any
    d_out: Any
    lse: Any
    delta: Any
    q_ids: Any
    own: Any
    k: Any
    k_ids: Any
    v: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any

    def run(self) -> None:
        s, index = self.sizes, lax.axis_index("block")
        place, rest = divided(index, s.B * s.N)
        batch, head = divided(rest, s.N)
        # Late tiles, the longest ones if the mask is causal, come first.
        tile = s.S // TILE - 1 - place
        at = batch, head, tile * TILE, run_of(self.runs_gmem, batch, tile)
        in_warpgroups(lambda: self._copy(*at), lambda: self._sum(*at), (self.k_empty, self.v_empty))

    def _copy(self, batch, head, first, run) -> None:
        for half in range(NUM_CONSUMERS):
            queries = pl.ds(first + half * R, R)
            fill(
                half,
                self.own,
                (self.q_gmem.at[batch, queries, head], self.q),
                (self.d_out_gmem.at[batch, queries, head], self.d_out),
                (self.lse_gmem.at[batch, head, queries], self.lse),
                (self.delta_gmem.at[batch, head, queries], self.delta),
                (self.q_ids_gmem.at[batch, queries], self.q_ids),
            )
        kv_head = lax.div(head, jnp.int32(self.sizes.N // self.sizes.G))
        C = self.k.shape[1]

        @pl.loop(run.begin, run.end)
        def _(block):
            stage, keys = stage_of(block - run.begin, self.k), pl.ds(block * C, C)
            k = self.k_gmem.at[batch, keys, kv_head], self.k
            ids = self.k_ids_gmem.at[batch, keys], self.k_ids
            v = self.v_gmem.at[batch, keys, kv_head], self.v
            refill(stage, self.k_empty, self.k_full, k, ids)
            refill(stage, self.v_empty, self.v_full, v)

    def _sum(self, batch, head, first, run) -> None:
        group, C, call = lax.axis_index(THREAD), self.k.shape[1], self.call
        first = first + group * R
        plgpu.barrier_wait(self.own.at[group])
        lse, delta, q_ids = (
            plgpu.load(x.at[group], layout=ROW) for x in (self.lse, self.delta, self.q_ids)
        )

        def visit(masked, block, d_q):
            stage = stage_of(block - run.begin, self.k)
            plgpu.barrier_wait(self.k_full.at[stage])
            scores = product(self.q.at[group], self.k.at[stage].T)
            weights = jnp.exp2(scores * call.factor - rows(lse, C))
            if masked:
                k_ids = plgpu.load(self.k_ids.at[stage], layout=COLUMN)
                visible = seen(q_ids, k_ids, first, block * C, 1 if call.causal else None)
                weights = jnp.where(visible, weights, 0.0)
            plgpu.barrier_wait(self.v_full.at[stage])
            d_weights = product(self.d_out.at[group], self.v.at[stage].T)
            plgpu.barrier_arrive(self.v_empty.at[stage])
            d_scores = (weights * (d_weights - rows(delta, C))).astype(self.k.dtype)
            d_q = plus_product(d_q, d_scores, self.k.at[stage])
            plgpu.barrier_arrive(self.k_empty.at[stage])
            return d_q

        d_q = over_run(run, visit, filled((R, self.sizes.D), 0))
        # In the place of the queries, which only this half has read.
        self.q[group] = (d_q * call.scale).astype(self.q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.q.at[group], self.d_q_gmem.at[batch, pl.ds(first, R), head])


def _gradient_of_keys(operands: Operands, call: DocumentCall) -> tuple[jax.Array, jax.Array]:
    q, k, v, q_ids, k_ids, *_ = operands
    s, C, stages = Sizes.of(q, k, v), call.blocks.d_k_queries, call.blocks.d_k_stages
    parts = _parts_of_a_group(s.B * s.G * (s.T // TILE), s.N // s.G)

    def attention_key_gradient_kernel(*refs, **scratch):
        _KeyGradient(s, call, *refs, **scratch, parts=parts).run()

    scratch = {
        "k": swizzled((NUM_CONSUMERS, R, s.D), q.dtype),
        "v": swizzled((NUM_CONSUMERS, R, s.E), q.dtype),
        "k_ids": plgpu.SMEM((NUM_CONSUMERS, R), jnp.int32),
        "own": plgpu.Barrier(num_arrivals=3, num_barriers=NUM_CONSUMERS),
        "q": swizzled((stages, C, s.D), q.dtype),
        "lse": plgpu.SMEM((stages, C), jnp.float32),
        "q_ids": plgpu.SMEM((stages, C), jnp.int32),
        "d_out": swizzled((stages, C, s.E), q.dtype),
        "delta": plgpu.SMEM((stages, C), jnp.float32),
    } | ring_barriers(stages, {"q": 3, "d_out": 2})
    runs = runs_of_queries(q_ids, k_ids, C, TILE, call.causal)
    outs = [jax.ShapeDtypeStruct((s.B, s.T, s.G * parts, width), q.dtype) for width in (s.D, s.E)]
    num_blocks = s.B * s.G * parts * (s.T // TILE)
    d_k, d_v = launch(attention_key_gradient_kernel, outs, num_blocks, scratch, runs, *operands)
    return _sum_of_parts(d_k, parts), _sum_of_parts(d_v, parts)


def _parts_of_a_group(num_tiles: int, heads: int) -> int:
    """In how many parts the query heads of a key head are summed, so that few SMs are idle."""
    enough = 2 * num_multiprocessors()
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    return next((n for n in divisors if n * num_tiles >= enough), heads)


def _sum_of_parts(x_BTPD: jax.Array, parts: int) -> jax.Array:
    if parts == 1:
        return x_BTPD
    B, T, P, D = x_BTPD.shape
    by_group = x_BTPD.reshape(B, T, P // parts, parts, D).astype(jnp.float32)
    return by_group.sum(3).astype(x_BTPD.dtype)


@dataclass(frozen=True)
class _KeyGradient(_Operands):
    """The kernel: a tile of keys and values, and a ring of queries, of one head after the other.
    Scores are the other way round: a row for each key. Arrays in GMEM, then buffers and barriers in
    shared memory."""

    d_k_gmem: Any
    d_v_gmem: Any
    k: Any
    v: Any
    k_ids: Any
    own: Any
    q: Any
    lse: Any
    q_ids: Any
    d_out: Any
    delta: Any
    q_full: Any
    q_empty: Any
    d_out_full: Any
    d_out_empty: Any
    parts: int
    """Sums that the query heads of a key head are split into."""

    @property
    def heads(self) -> int:
        """Query heads of a sum."""
        return self.sizes.N // self.sizes.G // self.parts

    def run(self) -> None:
        s, num_sums = self.sizes, self.sizes.G * self.parts
        # Early tiles, which the most queries see if the mask is causal, come first.
        tile, rest = divided(lax.axis_index("block"), s.B * num_sums)
        batch, part = divided(rest, num_sums)
        at = batch, part, tile * TILE, run_of(self.runs_gmem, batch, tile)
        in_warpgroups(
            lambda: self._copy(*at), lambda: self._sum(*at), (self.q_empty, self.d_out_empty)
        )

    def _copy(self, batch, part, first, run) -> None:
        kv_head = lax.div(part, jnp.int32(self.parts))
        for half in range(NUM_CONSUMERS):
            keys = pl.ds(first + half * R, R)
            k = self.k_gmem.at[batch, keys, kv_head], self.k
            v = self.v_gmem.at[batch, keys, kv_head], self.v
            ids = self.k_ids_gmem.at[batch, keys], self.k_ids
            fill(half, self.own, k, v, ids)
        C, length = self.q.shape[1], run.end - run.begin

        @pl.loop(0, self.heads * length)
        def _(step):
            head, stage = part * self.heads + lax.div(step, length), stage_of(step, self.q)
            queries = pl.ds((run.begin + lax.rem(step, length)) * C, C)
            q = self.q_gmem.at[batch, queries, head], self.q
            lse = self.lse_gmem.at[batch, head, queries], self.lse
            ids = self.q_ids_gmem.at[batch, queries], self.q_ids
            d_out = self.d_out_gmem.at[batch, queries, head], self.d_out
            delta = self.delta_gmem.at[batch, head, queries], self.delta
            refill(stage, self.q_empty, self.q_full, q, lse, ids)
            refill(stage, self.d_out_empty, self.d_out_full, d_out, delta)

    def _sum(self, batch, part, first, run) -> None:
        group, D, E = lax.axis_index(THREAD), self.sizes.D, self.sizes.E
        first = first + group * R
        plgpu.barrier_wait(self.own.at[group])
        k_ids = plgpu.load(self.k_ids.at[group], layout=ROW)

        def visit(masked, block, carry):
            step, d_k, d_v = carry
            stage = stage_of(step, self.q)
            return step + 1, *self._added(stage, block, k_ids, first, masked, d_k, d_v)

        sums = jnp.int32(0), filled((R, D), 0), filled((R, E), 0)
        _, d_k, d_v = lax.fori_loop(0, self.heads, lambda _, sums: over_run(run, visit, sums), sums)
        # In the place of keys and values, which only this half has read.
        self.k[group] = (d_k * self.call.scale).astype(self.k.dtype)
        self.v[group] = d_v.astype(self.v.dtype)
        plgpu.commit_smem()
        for source, target in ((self.k, self.d_k_gmem), (self.v, self.d_v_gmem)):
            plgpu.copy_smem_to_gmem(source.at[group], target.at[batch, pl.ds(first, R), part])

    def _added(self, stage, block, k_ids, first, masked: bool, d_k, d_v):
        """Both sums with one more block of queries."""
        group, dtype = lax.axis_index(THREAD), self.q.dtype
        plgpu.barrier_wait(self.q_full.at[stage])
        scores = product(self.k.at[group], self.q.at[stage].T)
        lse = plgpu.load(self.lse.at[stage], layout=COLUMN)
        weights = jnp.exp2(scores * self.call.factor - columns(lse))
        if masked:
            q_ids = plgpu.load(self.q_ids.at[stage], layout=COLUMN)
            first_query = block * self.q.shape[1]
            visible = seen(k_ids, q_ids, first, first_query, -1 if self.call.causal else None)
            weights = jnp.where(visible, weights, 0.0)
        plgpu.barrier_wait(self.d_out_full.at[stage])
        d_v = plus_product(d_v, weights.astype(dtype), self.d_out.at[stage])
        d_weights = product(self.v.at[group], self.d_out.at[stage].T)
        delta = plgpu.load(self.delta.at[stage], layout=COLUMN)
        plgpu.barrier_arrive(self.d_out_empty.at[stage])
        d_scores = (weights * (d_weights - columns(delta))).astype(dtype)
        d_k = plus_product(d_k, d_scores, self.q.at[stage])
        plgpu.barrier_arrive(self.q_empty.at[stage])
        return d_k, d_v
