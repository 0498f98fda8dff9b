"""Moving rows on Hopper GPUs. A block of one warpgroup handles a few rows; many blocks share an SM,
so that there are enough loads of 16 bytes a thread under way to fill the memory's pipes.

Shapes: T rows, K choices of a row, P places, G groups, H width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mxjax.kernels.implementation import mosaic_kernel, traced_once
from mxjax.kernels.mosaic_stream import largest_divisor

WARPGROUP = 128
"""Threads; a row must have a multiple of so many columns."""
VECTOR_BYTES = 16
ZERO_BLOCKS = 8
"""Blocks that share the unfilled places of a group."""


@dataclass(frozen=True)
class RowBlocks:
    """How the work is cut."""

    rows: int = 4
    """permute: rows of a block; the other kernels have one, with its K places."""
    columns: int = 2048
    """Columns that a block holds in registers at a time, at most."""


def _launch(body, num_blocks: int, out, *operands):
    kernel = mosaic_kernel(
        body,
        out_type=out,
        grid=(num_blocks,),
        grid_names=("block",),
        # No kernel here reads what it writes.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return kernel(*operands)


def _slices(width: int, at_most: int, dtype) -> list:
    """A row in equal slices that a warpgroup holds in registers, as wide loads as there are."""
    unit = math.gcd(width, WARPGROUP * VECTOR_BYTES // jnp.dtype(dtype).itemsize)
    units = largest_divisor(width // unit, at_most // unit)
    return [pl.ds(start, units * unit) for start in range(0, width, units * unit)]


def _layout(columns: int, dtype):
    """Of part of a row: neighbouring columns in one thread."""
    vector = math.gcd(VECTOR_BYTES // jnp.dtype(dtype).itemsize, columns // WARPGROUP)
    return plgpu.Layout.WG_STRIDED((columns,), vec_size=vector)


def _load(gmem, row, columns) -> jax.Array:
    """Part of a row; behind the last row there is, of that one."""
    row = jnp.minimum(row, gmem.shape[0] - 1)
    return plgpu.load(gmem.at[row, columns], layout=_layout(columns.size, gmem.dtype))


def _only_if(condition: jax.Array, values: jax.Array) -> jax.Array:
    """Values or zeros. Not a product with 0: a row that belongs to nobody may hold anything."""
    return jnp.where(jnp.broadcast_to(condition, values.shape), values, jnp.zeros_like(values))


@traced_once("num_choices", "blocks")
def permute(
    x_TH: jax.Array, source_P: jax.Array, used: jax.Array, num_choices: int, blocks: RowBlocks
) -> jax.Array:
    """Row source[p] / K of x, or zeros where there is none, for each place p < used; [P, H]."""
    (T, H), (P,) = x_TH.shape, source_P.shape
    rows = math.gcd(P, blocks.rows)

    def permute_kernel(x_gmem, source_gmem, used_gmem, out_gmem):
        places = [lax.axis_index("block") * rows + i for i in range(rows)]

        @pl.when(places[0] < used_gmem[0])
        def _():
            sources = [lax.div(source_gmem[p], jnp.int32(num_choices)) for p in places]
            for columns in _slices(H, blocks.columns, x_TH.dtype):
                # All loads before the first store, which the compiler must not move loads over.
                loaded = [_load(x_gmem, source, columns) for source in sources]
                for p, source, values in zip(places, sources, loaded, strict=True):
                    out_gmem[p, columns] = _only_if(source < T, values)

    out = jax.ShapeDtypeStruct((P, H), x_TH.dtype)
    return _launch(permute_kernel, P // rows, out, x_TH, source_P, used.reshape(1))


@traced_once("blocks")
def combine(
    y_PH: jax.Array, place_TK: jax.Array, weights_TK: jax.Array | None, blocks: RowBlocks
) -> jax.Array:
    """Sum over k of weights[t, k] (None: 1) times row place[t, k] of y, in fp32; [T, H]. A place
    outside of y adds nothing."""
    (P, H), (T, K) = y_PH.shape, place_TK.shape
    weighted = weights_TK is not None

    def combine_kernel(y_gmem, place_gmem, *refs):
        t, out_gmem = lax.axis_index("block"), refs[-1]
        places = [place_gmem[t * K + k] for k in range(K)]
        weights = [refs[0][t * K + k] if weighted else jnp.float32(1) for k in range(K)]
        for columns in _slices(H, blocks.columns, y_PH.dtype):
            loaded = [_load(y_gmem, place, columns) for place in places]
            total = jnp.zeros((columns.size,), jnp.float32)
            for place, weight, values in zip(places, weights, loaded, strict=True):
                total += _only_if(place < P, weight * values.astype(jnp.float32))
            out_gmem[t, columns] = total.astype(out_gmem.dtype)

    out = jax.ShapeDtypeStruct((T, H), y_PH.dtype)
    operands = (y_PH, place_TK.reshape(-1)) + ((weights_TK.reshape(-1),) if weighted else ())
    return _launch(combine_kernel, T, out, *operands)


@traced_once("blocks")
def combine_gradient(
    y_PH: jax.Array,
    place_TK: jax.Array,
    weights_TK: jax.Array,
    grad_TH: jax.Array,
    starts_G1: jax.Array,
    counts_G: jax.Array,
    blocks: RowBlocks,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of `combine`: of y, with zeros in places of a group that nobody fills, [P, H], and
    of the weights, fp32 [T K]."""
    (P, H), (T, K), (G,) = y_PH.shape, place_TK.shape, counts_G.shape
    slices = _slices(H, blocks.columns, y_PH.dtype)

    def combine_gradient_kernel(
        y_gmem, place_gmem, weight_gmem, grad_gmem, starts_gmem, counts_gmem, dy_gmem, dw_gmem
    ):
        block = lax.axis_index("block")

        @pl.when(block < G * ZERO_BLOCKS)
        def _zeros():
            group, first = lax.div(block, ZERO_BLOCKS), lax.rem(block, ZERO_BLOCKS)

            @pl.loop(
                starts_gmem[group] + counts_gmem[group] + first,
                starts_gmem[group + 1],
                step=ZERO_BLOCKS,
            )
            def _(place):
                for columns in slices:
                    zeros = jnp.zeros((columns.size,), dy_gmem.dtype)
                    layout = _layout(columns.size, dy_gmem.dtype)
                    dy_gmem[place, columns] = plgpu.layout_cast(zeros, layout)

        @pl.when(block >= G * ZERO_BLOCKS)
        def _row():
            t = block - G * ZERO_BLOCKS
            places = [place_gmem[t * K + k] for k in range(K)]
            weights = [weight_gmem[t * K + k] for k in range(K)]
            products = [jnp.zeros((slices[0].size,), jnp.float32) for _ in range(K)]
            for columns in slices:
                grad = _load(grad_gmem, t, columns).astype(jnp.float32)
                loaded = [_load(y_gmem, place, columns) for place in places]
                products = [
                    product + grad * y.astype(jnp.float32)
                    for product, y in zip(products, loaded, strict=True)
                ]
                for place, weight in zip(places, weights, strict=True):

                    @pl.when(place < P)
                    def _(place=place, weight=weight, grad=grad, columns=columns):
                        dy_gmem[place, columns] = (weight * grad).astype(dy_gmem.dtype)

            for k, (place, product) in enumerate(zip(places, products, strict=True)):
                dw_gmem[t * K + k] = jnp.where(place < P, jnp.sum(product), 0)

    out = (
        jax.ShapeDtypeStruct((P, H), y_PH.dtype),
        jax.ShapeDtypeStruct((T * K,), jnp.float32),
    )
    operands = (y_PH, place_TK.reshape(-1), weights_TK.reshape(-1), grad_TH, starts_G1, counts_G)
    return _launch(combine_gradient_kernel, G * ZERO_BLOCKS + T, out, *operands)
