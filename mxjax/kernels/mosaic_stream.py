"""Memory-bound Mosaic GPU kernels: a ring of buffers in shared memory, and elementwise tiles.

A thread block has one warpgroup and takes tiles of its share of the work one after the other.
While it computes one tile, the copy engine (TMA) brings the next ones in and takes the last ones
out; several thread blocks share a multiprocessor (SM). No atomics: sums over rows are kept in
registers, written once per thread block, and added up by XLA in a fixed order.
"""

from __future__ import annotations

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

WARPGROUP = 128
"""Threads of a warpgroup; a vector in registers is a multiple of it long."""

SHARED_BYTES = 220 * 1024
"""Of a multiprocessor's 227 KiB."""

COPY_BYTES = 16
"""Rows begin at multiples of it: what the copy engine wants."""

UNROLLED = 2
"""Rows that are computed side by side, where an elementwise kernel goes row by row."""

PARAMETERS = plgpu.CompilerParams(
    approx_math=True,
    # Safe here: threads only write output buffers and only read input buffers, and `stream` has a
    # barrier (commit_smem) between the last read of a buffer and the copy that fills it again.
    unsafe_no_auto_barriers=True,
)


def stream(
    num_steps: jax.Array,
    stages: int,
    barrier,
    *,
    fetch: Callable[[jax.Array, jax.Array], None],
    compute: Callable[[jax.Array, jax.Array, tuple], tuple],
    store: Callable[[jax.Array, jax.Array], None],
    carry: tuple = (),
) -> tuple:
    """Run steps through a ring of `stages` slots; the last carry.

    Args:
      barrier: `plgpu.Barrier(num_arrivals=copies of one fetch, num_barriers=stages)`.
      fetch: (step, slot): start the copies that fill the slot's inputs.
      compute: (step, slot, carry) -> carry: from the slot's inputs to the slot's outputs.
      store: (step, slot): start the copies of the slot's outputs, with `commit_group=False`.
    """

    def slot_of(step):
        return lax.rem(step, jnp.int32(stages))

    for first in range(stages):

        @pl.when(first < num_steps)
        def _(first=first):
            fetch(jnp.int32(first), jnp.int32(first))

    def run(step, carry):
        slot = slot_of(step)
        plgpu.barrier_wait(barrier.at[slot])
        plgpu.wait_smem_to_gmem(stages - 1, wait_read_only=True)
        carry = compute(step, slot, carry)
        plgpu.commit_smem()
        store(step, slot)
        plgpu.commit_smem_to_gmem_group()

        @pl.when(step + stages < num_steps)
        def _():
            fetch(step + stages, slot)

        return carry

    carry = lax.fori_loop(0, num_steps, run, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry


@dataclass(frozen=True)
class TileBlocks:
    """Sizes of an elementwise kernel."""

    rows: int = 16
    """Rows of a tile, an even number: a copy of one row would run over the end of the row."""
    columns: int = 256
    """Columns of a tile: 128 or 256."""
    stages: int = 2
    """Tiles in flight. 0: none, each thread block loads one tile of `rows` (also 1) by `columns`
    (at most; also more than 256) into registers, and there are as many thread blocks as tiles. Sums
    over rows, a seed and odd widths need stages: there the defaults of all sizes are taken."""
    per_multiprocessor: int = 4
    """Thread blocks that share a multiprocessor; without stages the GPU decides."""

    @property
    def in_registers(self) -> bool:
        return self.stages == 0

    def __post_init__(self):
        if self.in_registers:
            if self.columns % WARPGROUP or self.rows < 1:
                raise ValueError(
                    f"without stages tiles have 1, 2, ... rows and {WARPGROUP}, {2 * WARPGROUP}, "
                    f"... columns, not {self}"
                )
            return
        if self.rows < 2 or self.rows % UNROLLED or self.columns not in (128, 256):
            raise ValueError(f"tiles have 2, 4, 6, ... rows and 128 or 256 columns, not {self}")


def tile_obstacle(width: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Why `map_tiles` cannot run rows of `width`; None: it can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 and float32, not {jnp.dtype(dtype).name}"
    multiple = COPY_BYTES // jnp.dtype(dtype).itemsize
    if width % multiple:
        return f"the width {width} is no multiple of {multiple} ({COPY_BYTES} bytes)"
    return mosaic_obstacle()


@traced_once("function", "out_branches", "blocks", "num_sums")
def map_tiles(
    function: Callable[..., tuple[Sequence[jax.Array], Sequence[jax.Array]]],
    inputs: Sequence[jax.Array],
    out_branches: Sequence[int],
    blocks: TileBlocks,
    *,
    bias: jax.Array | None = None,
    num_sums: int = 0,
    seed: jax.Array | None = None,
) -> tuple[list[jax.Array], jax.Array | None]:
    """Apply an elementwise function to every element of rows, and sum over the rows.

    Args:
      function: (one fp32 value per input branch, one per row of `bias`, then with a `seed` its two
        words and each element's index t * F + f as uint32) -> (one value per output branch, one
        value per sum), all of one shape. No closure: calls with the same function share a trace.
      inputs: [T, branches, F] each, of one dtype.
      out_branches: each output is [T, so many, F].
      bias: [rows, F], the same for all T.
      num_sums: how many sums over T `function` asks for.
      seed: uint32 [2].

    Returns:
      Outputs in the dtype of the inputs; sums [num_sums, F] fp32, None without.
    """
    (T, _, F), dtype = inputs[0].shape, inputs[0].dtype
    if blocks.in_registers:
        if num_sums == 0 and seed is None and F % WARPGROUP == 0:
            return _map_in_registers(function, inputs, out_branches, blocks, bias), None
        blocks = TileBlocks()
    R, C, stages = blocks.rows, blocks.columns, blocks.stages
    row_blocks, column_blocks = pl.cdiv(T, R), pl.cdiv(F, C)
    tiles = row_blocks * column_blocks
    grid = min(tiles, num_multiprocessors() * blocks.per_multiprocessor)
    # A thread block that holds a part of the bias or of the sums stays in its columns.
    by_row = bias is not None or num_sums > 0 or seed is not None
    if by_row:
        grid = column_blocks * min(max(1, grid // column_blocks), row_blocks)
    groups = grid // column_blocks
    branches = [(i, b) for i, x in enumerate(inputs) for b in range(x.shape[1])]
    out_parts = [(o, b) for o, count in enumerate(out_branches) for b in range(count)]
    num_bias = 0 if bias is None else bias.shape[0]

    def tiles_kernel(*refs, read, written, bias_tile, barrier, bias_barrier):
        refs = list(refs)
        in_refs = [refs.pop(0) for _ in inputs]
        bias_ref = refs.pop(0) if num_bias else None
        words = ()
        if seed is not None:
            seed_ref = refs.pop(0)
            words = (seed_ref[0], seed_ref[1])
        out_refs = [refs.pop(0) for _ in out_branches]
        block = lax.axis_index("block")
        if num_bias:
            columns = pl.ds(lax.rem(block, jnp.int32(column_blocks)) * C, C)
            for i in range(num_bias):
                plgpu.copy_gmem_to_smem(bias_ref.at[i, columns], bias_tile.at[i], bias_barrier)
            plgpu.barrier_wait(bias_barrier)
        bias_rows = [bias_tile[i].astype(jnp.float32) for i in range(num_bias)]

        def place(step):
            tile = block + step * grid
            row = lax.div(tile, jnp.int32(column_blocks)) * R
            return row, lax.rem(tile, jnp.int32(column_blocks)) * C

        def at(step):
            row, column = place(step)
            return pl.ds(row, R), pl.ds(column, C)

        def fetch(step, slot):
            rows, columns = at(step)
            for buffer, (i, b) in zip(read, branches, strict=True):
                source = in_refs[i].at[rows, b, columns]
                plgpu.copy_gmem_to_smem(source, buffer.at[slot], barrier.at[slot])

        def compute(step, slot, sums):
            row, column = place(step)

            def piece(r, sums):
                values = [buffer[slot, r].astype(jnp.float32) for buffer in read]
                extra = ()
                if seed is not None:
                    columns = lax.broadcasted_iota(jnp.uint32, (C,), 0)
                    extra = (*words, columns + ((row + r) * F + column).astype(jnp.uint32))
                outs, terms = function(*values, *bias_rows, *extra)
                for buffer, out in zip(written, outs, strict=True):
                    buffer[slot, r] = out.astype(dtype)
                return tuple(s + term for s, term in zip(sums, terms, strict=True))

            def some_rows(i, sums):
                for r in range(UNROLLED):
                    sums = piece(i * UNROLLED + r, sums)
                return sums

            if not by_row:
                return piece(slice(None), sums)
            return lax.fori_loop(0, R // UNROLLED, some_rows, sums)

        def store(step, slot):
            rows, columns = at(step)
            for buffer, (o, b) in zip(written, out_parts, strict=True):
                target = out_refs[o].at[rows, b, columns]
                plgpu.copy_smem_to_gmem(buffer.at[slot], target, commit_group=False)

        num_steps = lax.div(tiles - block + grid - 1, jnp.int32(grid))
        zeros = tuple(jnp.zeros((C,), jnp.float32) for _ in range(num_sums))
        sums = stream(
            num_steps, stages, barrier, fetch=fetch, compute=compute, store=store, carry=zeros
        )
        for i, total in enumerate(sums):
            group = lax.div(block, jnp.int32(column_blocks))
            column = lax.rem(block, jnp.int32(column_blocks)) * C
            refs[0][group, i, pl.ds(column, C)] = total

    types = [jax.ShapeDtypeStruct((T, count, F), dtype) for count in out_branches]
    if num_sums:
        sums_shape = (groups, num_sums, column_blocks * C)
        types.append(jax.ShapeDtypeStruct(sums_shape, jnp.float32))
    tile = plgpu.SMEM((stages, R, C), dtype)
    outs = mosaic_kernel(
        tiles_kernel,
        out_type=types,
        grid=(grid,),
        grid_names=("block",),
        scratch_types={
            "read": [tile] * len(branches),
            "written": [tile] * len(out_parts),
            "bias_tile": plgpu.SMEM((num_bias, C), bias.dtype) if num_bias else None,
            "barrier": plgpu.Barrier(num_arrivals=len(branches), num_barriers=stages),
            "bias_barrier": plgpu.Barrier(num_arrivals=num_bias) if num_bias else None,
        },
        compiler_params=PARAMETERS,
    )(*inputs, *([bias] if num_bias else []), *([] if seed is None else [seed]))
    if not num_sums:
        return list(outs), None
    *outs, partial = outs
    return outs, jnp.sum(partial, axis=0)[:, :F]


def _map_in_registers(function, inputs, out_branches, blocks: TileBlocks, bias) -> list[jax.Array]:
    """`map_tiles` without sums and seed, and without shared memory."""
    (T, _, F), dtype = inputs[0].shape, inputs[0].dtype
    C = WARPGROUP * largest_divisor(F // WARPGROUP, blocks.columns // WARPGROUP)
    R = largest_divisor(T, blocks.rows)

    def registers_kernel(*refs):
        in_refs, out_refs = refs[: len(inputs)], refs[-len(out_branches) :]
        # Neighbours in time are neighbours in a row.
        block, num_parts = lax.axis_index("block"), jnp.int32(F // C)
        tile, columns = lax.div(block, num_parts), pl.ds(lax.rem(block, num_parts) * C, C)
        extra = []
        if bias is not None:
            bias_ref = refs[len(inputs)]
            extra = [bias_ref[i, columns].astype(jnp.float32) for i in range(bias.shape[0])]
        for r in range(R):
            row = tile * R + r
            values = [
                ref[row, b, columns].astype(jnp.float32)
                for ref, x in zip(in_refs, inputs, strict=True)
                for b in range(x.shape[1])
            ]
            outs, _ = function(*values, *extra)
            outs = iter(outs)
            for ref, count in zip(out_refs, out_branches, strict=True):
                for b in range(count):
                    ref[row, b, columns] = next(outs).astype(dtype)

    return mosaic_kernel(
        registers_kernel,
        out_type=[jax.ShapeDtypeStruct((T, count, F), dtype) for count in out_branches],
        grid=(T // R * (F // C),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*inputs, *([] if bias is None else [bias]))


def largest_divisor(n: int, at_most: int) -> int:
    """The largest divisor of n up to a number, 1 or more."""
    return next(d for d in range(max(1, min(n, at_most)), 0, -1) if n % d == 0)
