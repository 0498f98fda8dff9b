"""Mosaic GPU kernel of the rotary embedding.

Shapes: T tokens, N heads, D head width, P pairs that are turned, R tokens of a step.
"""

from __future__ import annotations

import math
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
from mxjax.kernels.mosaic_stream import COPY_BYTES, PARAMETERS, SHARED_BYTES, stream

COPY_COLUMNS = 256
"""The copy engine takes up to so many columns at a time."""


@dataclass(frozen=True)
class RopeBlocks:
    """Sizes of the kernel."""

    rows: int = 32
    """Tokens of a step: 16, 32, 64, ..."""
    heads: int = 4
    """Heads of a step, at most."""
    stages: int = 2
    """Steps in flight, at most."""
    per_multiprocessor: int = 3
    """Thread blocks that share a multiprocessor."""


def rope_obstacle(x: jax.Array, num_pairs: int, interleaved: bool) -> str | None:
    """Why the kernel cannot turn so many pairs of each head of x [..., N, D]; None: it can."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 and float32, not {x.dtype.name}"
    if interleaved and x.dtype != jnp.bfloat16:
        return "it takes interleaved pairs in bfloat16 only"
    for width in (num_pairs, x.shape[-1] - 2 * num_pairs):
        if width * x.dtype.itemsize % COPY_BYTES or width > COPY_COLUMNS:
            return (
                f"{num_pairs} pairs of {x.shape[-1]} columns: it takes parts of whole "
                f"{COPY_BYTES} bytes and up to {COPY_COLUMNS} columns"
            )
    return mosaic_obstacle()


@traced_once("interleaved", "blocks")
def rotate(
    x_TND: jax.Array, cos_TP: jax.Array, sin_TP: jax.Array, interleaved: bool, blocks: RopeBlocks
) -> jax.Array:
    """Each pair turned, [T, N, D]; columns after the pairs as they are."""
    if not interleaved:
        return _rotate(x_TND, cos_TP, sin_TP, blocks)
    # A pair of bf16 is one word of 32 bits.
    T, N, D = x_TND.shape
    pairs = lax.bitcast_convert_type(x_TND.reshape(T, N, D // 2, 2), jnp.uint32)
    turned = _rotate(pairs, cos_TP, sin_TP, blocks)
    return lax.bitcast_convert_type(turned, x_TND.dtype).reshape(T, N, D)


def _unpack(word: jax.Array) -> tuple[jax.Array, jax.Array]:
    """fp32 of both halves of a word; a bf16 is the upper half of an fp32."""
    low, high = word << 16, word & jnp.uint32(0xFFFF0000)
    return tuple(lax.bitcast_convert_type(half, jnp.float32) for half in (low, high))


def _pack(low: jax.Array, high: jax.Array) -> jax.Array:
    def rounded(value):
        """To the nearest bf16, ties to even, in the upper half."""
        bits = lax.bitcast_convert_type(value, jnp.uint32)
        return bits + jnp.uint32(0x7FFF) + ((bits >> 16) & jnp.uint32(1))

    return (rounded(low) >> 16) | (rounded(high) & jnp.uint32(0xFFFF0000))


def heads_and_stages_that_fit(
    blocks: RopeBlocks, num_heads: int, head_bytes: int, num_pairs: int
) -> tuple[int, int]:
    """Blocks measured for one width of heads may be too large for another."""

    def size(heads: int, stages: int) -> int:
        tables = 2 * num_pairs * jnp.dtype(jnp.float32).itemsize
        return stages * blocks.rows * (2 * heads * head_bytes + tables)

    heads, stages = math.gcd(num_heads, blocks.heads), blocks.stages
    if size(heads, stages) > SHARED_BYTES:
        heads = 1
    while stages > 1 and size(heads, stages) > SHARED_BYTES:
        stages -= 1
    return heads, stages


def _rotate(x_TND, cos_TP, sin_TP, blocks: RopeBlocks):
    """x is floats, a pair P columns apart, or words that hold pairs."""
    (T, N, D), P = x_TND.shape, cos_TP.shape[1]
    packed = x_TND.dtype == jnp.uint32
    starts = [0] if packed else [0, P]
    widths = [P] * len(starts)
    if rest := D - P * len(starts):
        starts, widths = [*starts, D - rest], [*widths, rest]
    R = blocks.rows
    heads, stages = heads_and_stages_that_fit(blocks, N, D * x_TND.dtype.itemsize, P)
    row_blocks, head_blocks = pl.cdiv(T, R), N // heads
    tiles = row_blocks * head_blocks
    grid = min(tiles, num_multiprocessors() * blocks.per_multiprocessor)

    def turn(parts, cos, sin):
        if packed:
            first, second = _unpack(parts[0])
        else:
            first, second = (part.astype(jnp.float32) for part in parts[:2])
        turned = first * cos - second * sin, second * cos + first * sin
        return [_pack(*turned)] if packed else [part.astype(x_TND.dtype) for part in turned]

    def rotation_kernel(x_ref, cos_ref, sin_ref, out_ref, *, read, written, table, barrier):
        block = lax.axis_index("block")

        def place(step):
            tile = block + step * grid
            rows = pl.ds(lax.div(tile, jnp.int32(head_blocks)) * R, R)
            return rows, lax.rem(tile, jnp.int32(head_blocks)) * heads

        def parts_at(ref, step):
            rows, first = place(step)
            for h in range(heads):
                for i, (start, width) in enumerate(zip(starts, widths, strict=True)):
                    yield h, i, ref.at[rows, first + h, pl.ds(start, width)]

        def fetch(step, slot):
            rows, _ = place(step)
            for ref, buffer in zip((cos_ref, sin_ref), table, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[rows], buffer.at[slot], barrier.at[slot])
            for h, i, source in parts_at(x_ref, step):
                plgpu.copy_gmem_to_smem(source, read[i].at[slot, h], barrier.at[slot])

        def compute(step, slot, carry):
            cos, sin = (buffer[slot] for buffer in table)
            for h in range(heads):
                parts = [buffer[slot, h] for buffer in read]
                turned = turn(parts, cos, sin)
                for buffer, value in zip(written, turned + parts[len(turned) :], strict=True):
                    buffer[slot, h] = value
            return carry

        def store(step, slot):
            for h, i, target in parts_at(out_ref, step):
                plgpu.copy_smem_to_gmem(written[i].at[slot, h], target, commit_group=False)

        num_steps = lax.div(tiles - block + grid - 1, jnp.int32(grid))
        stream(num_steps, stages, barrier, fetch=fetch, compute=compute, store=store)

    buffers = [plgpu.SMEM((stages, heads, R, width), x_TND.dtype) for width in widths]
    return mosaic_kernel(
        rotation_kernel,
        out_type=jax.ShapeDtypeStruct(x_TND.shape, x_TND.dtype),
        grid=(grid,),
        grid_names=("block",),
        scratch_types={
            "read": buffers,
            "written": buffers,
            "table": [plgpu.SMEM((stages, R, P), jnp.float32)] * 2,
            "barrier": plgpu.Barrier(num_arrivals=2 + heads * len(widths), num_barriers=stages),
        },
        compiler_params=PARAMETERS,
    )(x_TND, cos_TP, sin_TP)
