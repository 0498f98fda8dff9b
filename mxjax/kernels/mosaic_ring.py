"""Matrix products on Hopper GPUs: what the kernels of this package share.

A block has three warpgroups. One copies operand tiles (TMA) into a ring of stages in shared memory;
two multiply (wgmma), each one half of an output tile. The copies run ahead over the end of an
output tile: the operands of the next one arrive while the last one is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

THREAD = "warpgroup"
NUM_CONSUMERS = 2
"""Warpgroups 0 and 1 multiply, 2 copies."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""Of each thread: 128 * (40 + 2 * 232) are about all that an SM has."""

CHUNK_ROWS, CHUNK_BYTES, NUM_CHUNKS = 64, 128, 2
"""A warpgroup writes its result in chunks of so many rows by so many bytes, through so many
buffers: the store of one is under way while the next is filled."""


def swizzled(shape: tuple[int, ...], dtype) -> Any:
    """Shared memory laid out as both TMA and wgmma take it."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def result_chunks(dtype, number: int = NUM_CHUNKS) -> Any:
    """Buffers that results pass through, of both consumers."""
    columns = CHUNK_BYTES // jnp.dtype(dtype).itemsize
    return swizzled((NUM_CONSUMERS, number, CHUNK_ROWS, columns), dtype)


def barriers(num_stages: int, num_operands: int) -> dict[str, Any]:
    """Of a ring: `full` (copies arrived) and `empty` (both consumers are done)."""
    return {
        "full": plgpu.Barrier(num_arrivals=num_operands, num_barriers=num_stages),
        "empty": plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=num_stages),
    }


@dataclass(frozen=True)
class Ring:
    """Stages between the producer and the consumers. `step` counts the steps of all output tiles
    together; step s uses stage s modulo their number."""

    operands: tuple[Any, ...]
    full: Any
    empty: Any

    def _stage(self, step):
        return lax.rem(step, jnp.int32(self.full.shape[0]))

    def fill(self, step: jax.Array, num_steps, sources: Callable[[jax.Array], Sequence[Any]]):
        """Producer: copy the operands of the steps of one output tile; the step after them."""

        def copy(k, step):
            stage = self._stage(step)
            plgpu.barrier_wait(self.empty.at[stage])
            for source, operand in zip(sources(k), self.operands, strict=True):
                plgpu.copy_gmem_to_smem(source, operand.at[stage], self.full.at[stage])
            return step + 1

        return lax.fori_loop(0, num_steps, copy, step)

    def drain(self, step: jax.Array, num_steps, multiply: Callable[..., None]):
        """Consumer: `multiply(*operands)` issues the wgmma of one step; the step after all."""

        def consume(k, step):
            stage = self._stage(step)
            plgpu.barrier_wait(self.full.at[stage])
            multiply(*(operand.at[stage] for operand in self.operands))
            # All products but this one are done: the stage before is free, and the tensor cores
            # already have their next work.
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _():
                plgpu.barrier_arrive(self.empty.at[self._stage(step - 1)])

            return step + 1

        step = lax.fori_loop(0, num_steps, consume, step)
        plgpu.wgmma_wait(0)

        @pl.when(num_steps > 0)
        def _():
            plgpu.barrier_arrive(self.empty.at[self._stage(step - 1)])

        return step

    def pass_by(self, step: jax.Array, num_steps):
        """Consumer: as `drain` for half a tile that lies outside of the result."""

        def skip(k, step):
            stage = self._stage(step)
            plgpu.barrier_wait(self.full.at[stage])
            plgpu.barrier_arrive(self.empty.at[stage])
            return step + 1

        return lax.fori_loop(0, num_steps, skip, step)

    def run(self, num_tiles, copy: Callable, consume: Callable) -> None:
        """All output tiles of this block: `copy(tile, step)` and `consume(tile, step)` return the
        step after the tile's."""

        def loop(body):
            @plgpu.nd_loop((num_tiles,), collective_axes="sm", init_carry=jnp.int32(0))
            def _(info, carry):
                return body(info.index[0], carry)

        @pl.when(lax.axis_index(THREAD) == NUM_CONSUMERS)
        def _producer():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            loop(copy)
            # Each stage was handed back once more than it was filled.
            for stage in range(self.full.shape[0]):
                plgpu.barrier_wait(self.empty.at[stage])

        @pl.when(lax.axis_index(THREAD) < NUM_CONSUMERS)
        def _consumer():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            for stage in range(self.full.shape[0]):
                plgpu.barrier_arrive(self.empty.at[stage])
            loop(consume)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclass(frozen=True)
class Half:
    """The part of an output tile that a consumer computes."""

    index: jax.Array
    """Number of the consumer."""
    shape: tuple[int, int]
    first_row: jax.Array | int
    first_column: jax.Array | int

    @classmethod
    def of(cls, tile: tuple[int, int], split_rows: bool) -> Half:
        """The half that is this warpgroup's: of the rows, or else of the columns."""
        index = lax.axis_index(THREAD)
        rows, columns = tile
        if split_rows:
            return cls(index, (rows // 2, columns), index * (rows // 2), 0)
        return cls(index, (rows, columns // 2), 0, index * (columns // 2))

    @property
    def rows(self):
        """Slice of the tile's rows."""
        return pl.ds(self.first_row, self.shape[0])

    @property
    def columns(self):
        """Slice of the tile's columns."""
        return pl.ds(self.first_column, self.shape[1])


Target = Callable[[int, int, tuple[int, int]], Any]
"""(first row, first column, shape) in a consumer's half tile -> where that belongs in GMEM."""


def store(values: jax.Array, chunks, target: Target) -> None:
    """Write a consumer's half tile through its buffers `chunks`, [number, rows, columns]."""
    number, *shape = chunks.shape
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # stores of the tile before, long done
    for i, (row, column) in enumerate(_firsts(values.shape, shape)):
        if i >= number:
            plgpu.wait_smem_to_gmem(number - 1, wait_read_only=True)
        chunk = chunks.at[i % number]
        chunk[...] = values[row : row + shape[0], column : column + shape[1]]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(chunk, target(row, column, tuple(shape)))


@dataclass(frozen=True)
class Added:
    """As `store`, but values are added to what is in GMEM already. That is read ahead, through the
    same buffers: the first chunks while the tile is computed.

    Attributes:
      arrived: a barrier for each buffer of each consumer.
    """

    half: Half
    chunks: Any
    target: Target
    arrived: Any

    def begin(self) -> None:
        """Before the values are computed."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in range(min(self.chunks.shape[0], len(self._places))):
            self._read(i)

    def store(self, values: jax.Array) -> None:
        """Write the sums."""
        number, *shape = self.chunks.shape
        for i, (row, column) in enumerate(self._places):
            chunk = self.chunks.at[i % number]
            plgpu.barrier_wait(self._barrier(i))
            chunk[...] += values[row : row + shape[0], column : column + shape[1]]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(chunk, self.target(row, column, tuple(shape)))
            # The buffer before this one: its store had the time of an addition to begin.
            if i and i - 1 + number < len(self._places):
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                self._read(i - 1 + number)

    @property
    def _places(self) -> list[tuple[int, int]]:
        return _firsts(self.half.shape, self.chunks.shape[1:])

    def _barrier(self, i: int):
        number = self.chunks.shape[0]
        return self.arrived.at[self.half.index * number + i % number]

    def _read(self, i: int) -> None:
        number, *shape = self.chunks.shape
        source = self.target(*self._places[i], tuple(shape))
        plgpu.copy_gmem_to_smem(source, self.chunks.at[i % number], self._barrier(i))


def _firsts(whole: Sequence[int], part: Sequence[int]) -> list[tuple[int, int]]:
    """First row and column of each part."""
    return list(itertools.product(*(range(0, n, m) for n, m in zip(whole, part, strict=True))))
