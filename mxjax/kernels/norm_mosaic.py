"""Mosaic GPU kernels of the norms: whole rows, one warpgroup a row.

Shapes: T rows, H width, R rows of a step, C columns of a vector in registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mxjax.kernels.implementation import (
    mosaic_kernel,
    mosaic_obstacle,
    num_multiprocessors,
    traced_once,
)
from mxjax.kernels.mosaic_stream import PARAMETERS, SHARED_BYTES, WARPGROUP, stream

STEP_BYTES = 8 * 1024
"""A step takes at least so many bytes of each input."""
MOST_CHUNKS = 32
"""A row in so many parts: each is a piece of the program."""

WHOLE = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
"""Copies whole rows, however long, by one instruction; the default takes up to 256 columns."""


@dataclass(frozen=True)
class RowBlocks:
    """Sizes of a row kernel; 0: by the width."""

    rows: int = 0
    """Rows of a step; 0: about `STEP_BYTES`."""
    stages: int = 0
    """Steps in flight, at most; 0: 4. One is the least that there must be memory for."""
    per_multiprocessor: int = 2
    """Thread blocks that share a multiprocessor."""


@dataclass(frozen=True)
class NormKind:
    """What a norm kernel does."""

    epsilon: float
    centred: bool
    """LayerNorm, which has a bias too; else RMSNorm."""
    adds: bool
    """The input is the sum of two, which is an output too."""


def row_obstacle(x: jax.Array, scale: jax.Array) -> str | None:
    """Why the row kernels cannot norm x [..., H]; None: they can."""
    H = x.shape[-1]
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 and float32, not {x.dtype.name}"
    if H % WARPGROUP:
        return f"the width {H} is no multiple of {WARPGROUP}"
    if H // _chunk(H) > MOST_CHUNKS:
        return f"the width {H} is no multiple of a number from 512 to 2048 that 128 divides"
    if H * (4 * x.dtype.itemsize + 2 * scale.dtype.itemsize) > SHARED_BYTES:
        return f"four rows, scale and bias of {H} columns are over {SHARED_BYTES} bytes"
    return mosaic_obstacle()


@traced_once("kind", "blocks")
def norm_forward(
    x_TH: jax.Array,
    residual_TH: jax.Array | None,
    scale_H: jax.Array,
    bias_H: jax.Array | None,
    kind: NormKind,
    blocks: RowBlocks,
) -> list[jax.Array]:
    """[normed], or [normed, x + residual]."""
    inputs = [x_TH] if residual_TH is None else [x_TH, residual_TH]
    weights = [scale_H] if bias_H is None else [scale_H, bias_H]
    H = x_TH.shape[1]

    def row(read, write, weight, sums):
        def value(chunk):
            if not kind.adds:
                return read(0, chunk)
            # Rounded as it is stored, so that forward and backward norm the same numbers.
            total = read(0, chunk) + read(1, chunk)
            return total.astype(x_TH.dtype).astype(jnp.float32)

        mean, rstd = _statistics(value, H, kind)
        for chunk in _chunks(H):
            v = value(chunk)
            y = (v - mean) * rstd * weight(0, chunk)
            write(0, chunk, y + weight(1, chunk) if kind.centred else y)
            if kind.adds:
                write(1, chunk, v)
        return sums

    outs, _ = _map_rows(row, inputs, weights, len(inputs), 0, blocks)
    return outs


@traced_once("kind", "blocks")
def norm_backward(
    x_TH: jax.Array,
    d_normed_TH: jax.Array,
    d_sum_TH: jax.Array | None,
    scale_H: jax.Array,
    kind: NormKind,
    blocks: RowBlocks,
) -> tuple[jax.Array, jax.Array]:
    """Gradient of what was normed, and sums over rows [1 or 2, H] fp32: of scale, of bias."""
    inputs = [x_TH, d_normed_TH] + ([d_sum_TH] if kind.adds else [])
    H = x_TH.shape[1]

    def row(read, write, weight, sums):
        def value(chunk):
            return read(0, chunk)

        def grad(chunk):
            return read(1, chunk) * weight(0, chunk)

        if kind.centred:
            mean, rstd = _statistics(value, H, kind)
            mean_grad = _total(grad, H) / H
            product = _total(lambda chunk: grad(chunk) * (value(chunk) - mean), H)
        else:
            # Both sums in one pass over the row.
            squares, product = _totals(lambda c: (value(c) * value(c), grad(c) * value(c)), H)
            mean, mean_grad, rstd = 0.0, 0.0, lax.rsqrt(squares / H + kind.epsilon)
        slope = product * rstd / H
        new = []
        for i, chunk in enumerate(_chunks(H)):
            x_hat = (value(chunk) - mean) * rstd
            d_x = (grad(chunk) - mean_grad - x_hat * slope) * rstd
            write(0, chunk, d_x + read(2, chunk) if kind.adds else d_x)
            new.append(sums[i] + read(1, chunk) * x_hat)
        if kind.centred:
            offset = len(new)
            new += [sums[offset + i] + read(1, chunk) for i, chunk in enumerate(_chunks(H))]
        return tuple(new)

    (d_x,), sums = _map_rows(row, inputs, [scale_H], 1, 2 if kind.centred else 1, blocks)
    return d_x, sums


def _chunk(H: int) -> int:
    """Columns of a vector in registers: so many that each thread moves several at once."""
    C = math.gcd(H, 1024)
    if C < 512:
        C = max(c for c in range(WARPGROUP, 2049, WARPGROUP) if H % c == 0)
    return C


def _chunks(H: int) -> list:
    """Slices of a row."""
    return [pl.ds(start, _chunk(H)) for start in range(0, H, _chunk(H))]


def _totals(parts: Callable, H: int) -> list:
    """Sum over the row of each of a tuple of values."""
    vectors = None
    for chunk in _chunks(H):
        new = parts(chunk)
        vectors = new if vectors is None else [a + b for a, b in zip(vectors, new, strict=True)]
    return [jnp.sum(v) for v in vectors]


def _total(part: Callable, H: int):
    return _totals(lambda chunk: (part(chunk),), H)[0]


def _statistics(value: Callable, H: int, kind: NormKind):
    """Mean (0 for RMSNorm) and 1 / standard deviation of the row."""
    mean = _total(value, H) / H if kind.centred else 0.0
    squares = _total(lambda chunk: jnp.square(value(chunk) - mean), H)
    return mean, lax.rsqrt(squares / H + kind.epsilon)


def stages_that_fit(blocks: RowBlocks, slot_bytes: int, weight_bytes: int) -> int:
    """Steps in flight: blocks measured for one width may be too large for another."""
    fitting = (SHARED_BYTES // blocks.per_multiprocessor - weight_bytes) // slot_bytes
    return min(blocks.stages or 4, max(fitting, 1))


def _map_rows(
    function: Callable,
    inputs: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    num_outputs: int,
    num_sums: int,
    blocks: RowBlocks,
) -> tuple[list[jax.Array], jax.Array | None]:
    """Apply `function` to every row of [T, H] inputs.

    Args:
      function: (read, write, weight, sums) -> sums, for one row: `read(input, chunk)` and
        `weight(index, chunk)` are fp32, `write(output, chunk, value)`; `sums` holds the chunks of
        each of the sums over rows.
      weights: [H] each.

    Returns:
      Outputs like the inputs, and the sums [num_sums, H] fp32, None without.
    """
    (T, H), dtype = inputs[0].shape, inputs[0].dtype
    row_bytes = H * dtype.itemsize
    R = blocks.rows or max(1, STEP_BYTES // row_bytes)
    slot_bytes = (len(inputs) + num_outputs) * R * row_bytes
    weight_bytes = sum(w.size * w.dtype.itemsize for w in weights)
    stages = stages_that_fit(blocks, slot_bytes, weight_bytes)
    steps = pl.cdiv(T, R)
    grid = min(steps, num_multiprocessors() * blocks.per_multiprocessor)
    chunks = _chunks(H)
    # Past the end nothing is copied, and `here` below leaves it out.
    rows_mode = WHOLE if T % R == 0 else plgpu.OOBFillMode.UNDEFINED

    def rows_kernel(*refs, read, written, weight_rows, barrier, weight_barrier):
        in_refs, refs = refs[: len(inputs)], refs[len(inputs) :]
        weight_refs, out_refs = refs[: len(weights)], refs[len(weights) :]
        block = lax.axis_index("block")
        for ref, buffer in zip(weight_refs, weight_rows, strict=True):
            plgpu.copy_gmem_to_smem(ref, buffer, weight_barrier, oob_mode=WHOLE)

        def rows_of(step):
            return pl.ds((block + step * grid) * R, R)

        def fetch(step, slot):
            for ref, buffer in zip(in_refs, read, strict=True):
                plgpu.copy_gmem_to_smem(
                    ref.at[rows_of(step)], buffer.at[slot], barrier.at[slot], oob_mode=rows_mode
                )

        def compute(step, slot, sums):
            def one(r, sums):
                def write(i, chunk, value):
                    written[i][slot, r, chunk] = value.astype(dtype)

                return function(
                    lambda i, chunk: read[i][slot, r, chunk].astype(jnp.float32),
                    write,
                    lambda i, chunk: weight_rows[i][chunk].astype(jnp.float32),
                    sums,
                )

            if R == 1:
                return one(0, sums)
            here = jnp.minimum(R, T - (block + step * grid) * R)
            return lax.fori_loop(0, here, one, sums)

        def store(step, slot):
            for ref, buffer in zip(out_refs, written, strict=False):
                plgpu.copy_smem_to_gmem(buffer.at[slot], ref.at[rows_of(step)], commit_group=False)

        plgpu.barrier_wait(weight_barrier)
        zeros = tuple(jnp.zeros((c.size,), jnp.float32) for c in chunks * num_sums)
        num_steps = lax.div(steps - block + grid - 1, jnp.int32(grid))
        sums = stream(
            num_steps, stages, barrier, fetch=fetch, compute=compute, store=store, carry=zeros
        )
        for i, total in enumerate(sums):
            out_refs[-1][block, i // len(chunks), chunks[i % len(chunks)]] = total

    types = [jax.ShapeDtypeStruct((T, H), dtype)] * num_outputs
    if num_sums:
        types.append(jax.ShapeDtypeStruct((grid, num_sums, H), jnp.float32))
    slots = plgpu.SMEM((stages, R, H), dtype)
    outs = mosaic_kernel(
        rows_kernel,
        out_type=types,
        grid=(grid,),
        grid_names=("block",),
        scratch_types={
            "read": [slots] * len(inputs),
            "written": [slots] * num_outputs,
            "weight_rows": [plgpu.SMEM((H,), w.dtype) for w in weights],
            "barrier": plgpu.Barrier(num_arrivals=len(inputs), num_barriers=stages),
            "weight_barrier": plgpu.Barrier(num_arrivals=len(weights)),
        },
        compiler_params=PARAMETERS,
    )(*inputs, *weights)
    if not num_sums:
        return list(outs), None
    *outs, partial = outs
    return outs, jnp.sum(partial, axis=0)
