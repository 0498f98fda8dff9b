"""Grouped matrix products on Hopper GPUs; `mosaic_ring.py` has how a block works.

Each SM runs one block, which takes output tiles in turn until none is left. Operands and results
need not be whole tiles: TMA reads zeros outside of an array and writes nothing there.

Shapes: R rows, K and N widths of the operands, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mxjax.kernels.implementation import num_multiprocessors, out_type, traced_once
from mxjax.kernels.mosaic_ring import (
    NUM_CHUNKS,
    NUM_CONSUMERS,
    THREAD,
    Added,
    Half,
    Ring,
    barriers,
    result_chunks,
    store,
    swizzled,
)
from mxjax.kernels.row_groups import RowGroups


@dataclass(frozen=True)
class MatmulBlocks:
    """How the work is cut. One stage holds the operands of one step."""

    rows: int = 128
    """Height of an output tile. Of the rows' product it is the tile of the groups instead."""
    columns: int = 256
    """Width of an output tile."""
    depth: int = 64
    """Length of a step along the dim that is summed over."""
    stages: int = 4
    """Steps in shared memory at a time."""
    split_rows: bool = False
    """The two multiplying warpgroups halve the height of an output tile instead of its width."""
    panel: int = 8
    """Output tiles are taken in panels of so many columns of tiles, down each: neighbours in time
    share operands in the L2 cache."""


_READ_AHEAD = 4
"""Buffers for sums that weight gradients are added to, where there is memory for so many."""


def _mesh() -> plgpu.Mesh:
    sms = num_multiprocessors()
    return plgpu.Mesh(grid=(sms,), grid_names=("sm",), num_threads=3, thread_name=THREAD)


def _launch(body, out, scratch, *operands):
    """`body(*operands, *outputs, **scratch)` in each block. An operand may be a mutable Ref."""

    def with_scratch(*refs):
        pl.run_scoped(lambda **kw: body(*refs, **kw), **scratch, collective_axes=THREAD)

    kernel = pl.kernel(
        with_scratch,
        out_type=out,
        mesh=_mesh(),
        name=body.__name__,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return kernel(*operands)


@traced_once("blocks", "transposed")
def grouped_matmul(
    x_RK: jax.Array, w: jax.Array, groups: RowGroups, blocks: MatmulBlocks, *, transposed: bool
) -> jax.Array:
    """Each row times its group's matrix, [R, N]: w is [G, K, N], or with `transposed` [G, N, K]."""
    R, K = x_RK.shape
    N = w.shape[1] if transposed else w.shape[2]
    tile, width, depth = groups.tile, blocks.columns, blocks.depth
    num_columns, num_steps = pl.cdiv(N, width), pl.cdiv(K, depth)

    def grouped_matmul_kernel(
        group_gmem, first_gmem, x_gmem, w_gmem, y_gmem, x_smem, w_smem, y_smem, full, empty
    ):
        num_tiles = first_gmem[groups.num_groups]

        def place(index):
            return plgpu.planar_snake(index, (num_tiles, num_columns), 1, blocks.panel)

        def copy(index, step):
            row, column = place(index)
            group = group_gmem[row]

            def sources(k):
                along, across = pl.ds(k * depth, depth), pl.ds(column * width, width)
                at = (group, across, along) if transposed else (group, along, across)
                return x_gmem.at[pl.ds(row * tile, tile), along], w_gmem.at[at]

            return ring.fill(step, num_steps, sources)

        def consume(index, step):
            row, column = place(index)
            half = Half.of((tile, width), blocks.split_rows)

            def multiply(step):
                def product(acc, step):
                    def one_step(x, w):
                        w = w.at[half.columns].T if transposed else w.at[:, half.columns]
                        plgpu.wgmma(acc, x.at[half.rows], w)

                    step = ring.drain(step, num_steps, one_step)
                    return step, acc[...]

                step, y = pl.run_scoped(
                    lambda acc: product(acc, step), plgpu.ACC(half.shape, jnp.float32)
                )

                def target(first_row, first_column, shape):
                    rows = pl.ds(row * tile + half.first_row + first_row, shape[0])
                    start = column * width + half.first_column + first_column
                    return y_gmem.at[rows, pl.ds(start, shape[1])]

                store(y.astype(y_gmem.dtype), y_smem.at[half.index], target)
                return step

            if blocks.split_rows or N % width == 0 or N % width > width // 2:
                return multiply(step)
            return lax.cond(
                column * width + half.first_column < N,
                multiply,
                lambda step: ring.pass_by(step, num_steps),
                step,
            )

        ring = Ring((x_smem, w_smem), full, empty)
        ring.run(num_tiles * num_columns, copy, consume)

    w_shape = (width, depth) if transposed else (depth, width)
    scratch = {
        "x_smem": swizzled((blocks.stages, tile, depth), x_RK.dtype),
        "w_smem": swizzled((blocks.stages, *w_shape), w.dtype),
        "y_smem": result_chunks(x_RK.dtype),
    } | barriers(blocks.stages, 2)
    out = out_type((R, N), x_RK.dtype, x_RK)
    operands = (groups.group_N, groups.first_G1, x_RK, w)
    return _launch(grouped_matmul_kernel, out, scratch, *operands)


@traced_once("blocks", "dtype")
def grouped_matmul_weight_gradient(
    x_RK: jax.Array,
    dy_RN: jax.Array,
    groups: RowGroups,
    blocks: MatmulBlocks,
    *,
    dtype: jax.typing.DTypeLike,
    into: jax.Array | None = None,
) -> jax.Array:
    """Each group's x^T dy, summed in fp32, [G, K, N]; zeros for an empty group.

    With `into`, fp32 of the same shape: the sum of both, in its memory where it is not used
    afterwards.
    """
    K, N = x_RK.shape[1], dy_RN.shape[1]
    height, width, depth = blocks.rows, blocks.columns, blocks.depth
    shape = (pl.cdiv(K, height), pl.cdiv(N, width))
    steps_per_tile = groups.tile // depth

    def grouped_matmul_weight_gradient_kernel(
        first_gmem, x_gmem, dy_gmem, dw_gmem, x_smem, dy_smem, dw_smem, full, empty, added=None
    ):
        def place(index):
            tiles = jnp.int32(shape[0] * shape[1])
            group = lax.div(index, tiles)
            row, column = plgpu.planar_snake(lax.rem(index, tiles), shape, 1, blocks.panel)
            first = first_gmem[group] * steps_per_tile
            return group, row, column, first, first_gmem[group + 1] * steps_per_tile - first

        def copy(index, step):
            _, row, column, first, num_steps = place(index)

            def sources(k):
                along = pl.ds((first + k) * depth, depth)
                return (
                    x_gmem.at[along, pl.ds(row * height, height)],
                    dy_gmem.at[along, pl.ds(column * width, width)],
                )

            return ring.fill(step, num_steps, sources)

        def consume(index, step):
            group, row, column, _, num_steps = place(index)
            half = Half.of((height, width), blocks.split_rows)

            def target(first_row, first_column, shape):
                start = row * height + half.first_row + first_row
                across = column * width + half.first_column + first_column
                return dw_gmem.at[group, pl.ds(start, shape[0]), pl.ds(across, shape[1])]

            chunks = dw_smem.at[half.index]
            sums = None if added is None else Added(half, chunks, target, added)
            if sums is not None:
                pl.when(num_steps > 0)(sums.begin)

            def product(acc):
                def one_step(x, dy):
                    plgpu.wgmma(acc, x.at[:, half.rows].T, dy.at[:, half.columns])

                return ring.drain(step, num_steps, one_step), acc[...]

            step, dw = pl.run_scoped(product, plgpu.ACC(half.shape, jnp.float32))

            # Nothing is to be added for an empty group, but zeros are to be written.
            if sums is None:
                store(dw.astype(dw_gmem.dtype), chunks, target)
            else:
                pl.when(num_steps > 0)(partial(sums.store, dw))
            return step

        ring = Ring((x_smem, dy_smem), full, empty)
        ring.run(groups.num_groups * shape[0] * shape[1], copy, consume)

    stages, chunks_ahead = blocks.stages, NUM_CHUNKS
    if into is not None and stages > 2:  # more is worth a stage, the memory of which it takes
        stages, chunks_ahead = stages - 1, _READ_AHEAD
    scratch = {
        "x_smem": swizzled((stages, depth, height), x_RK.dtype),
        "dy_smem": swizzled((stages, depth, width), dy_RN.dtype),
        "dw_smem": result_chunks(dtype if into is None else into.dtype, chunks_ahead),
    } | barriers(stages, 2)
    kernel, operands = grouped_matmul_weight_gradient_kernel, (groups.first_G1, x_RK, dy_RN)
    if into is None:
        out = out_type((groups.num_groups, K, N), dtype, x_RK)
        return _launch(kernel, out, scratch, *operands)
    total = jax.new_ref(into)
    scratch |= {"added": plgpu.Barrier(num_barriers=NUM_CONSUMERS * chunks_ahead)}
    _launch(kernel, (), scratch, *operands, total)
    return jax.freeze(total)
