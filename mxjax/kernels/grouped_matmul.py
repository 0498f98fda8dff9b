"""Rows of groups times their group's matrix: the matrix products of dropless experts.

With g(r) the group that owns the tile of row r (`row_groups.py`):

    y[r] = x[r] w[g(r)]      dx[r] = dy[r] w[g(r)]^T      dw[g] = sum over r of g: x[r]^T dy[r]

Sums are in fp32. Rows that only fill a tile up must be zero in x and dy; then they are zero in y
and dx. Rows of unused tiles are never read, and hold anything in y and dx. The three products are
calls of their own, so that whoever needs dx first can put dw off.

Shapes: R rows, G groups, K and N widths, t rows of a tile.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from mxjax.kernels import grouped_matmul_mosaic as mosaic
from mxjax.kernels.implementation import (
    Implementation,
    choose,
    is_interpreted,
    mosaic_obstacle,
    shape_class,
    varying_alike,
)
from mxjax.kernels.row_groups import RowGroups

FORWARD = "grouped_matmul"
INPUT_GRADIENT = "grouped_matmul_input_gradient"
WEIGHT_GRADIENT = "grouped_matmul_weight_gradient"

TILES = (64, 128)
"""Rows of a tile that the kernels take."""
WIDTH_MULTIPLE = 64
"""128 bytes, the unit in which TMA puts rows into shared memory as the tensor cores take them."""


def row_tile() -> int:
    """Rows of a tile that suit the device."""
    return TILES[-1] if mosaic_obstacle() is None else 8


@dataclass(frozen=True)
class _Choices:
    """Blocks of the kernel for each product; None: plain JAX."""

    forward: mosaic.MatmulBlocks | None
    input_gradient: mosaic.MatmulBlocks | None
    weight_gradient: mosaic.MatmulBlocks | None


def grouped_matmul(
    x_RK: jax.Array,
    w_GKN: jax.Array,
    groups: RowGroups,
    *,
    implementation: Implementation | None = None,
    blocks: mosaic.MatmulBlocks | None = None,
) -> jax.Array:
    """y of the module's docstring, [R, N]. Differentiable in x and w, once; its gradient cannot be
    batched by `vmap`.

    Args:
      implementation: of the product and of both gradients; see `implementation.py`. `mosaic` takes
        16-bit floats, widths that are multiples of 64, and tiles of 64 or 128 rows.
      blocks: of the kernel for the product; None: as measured, or its defaults.

    Raises:
      ImplementationError: the named implementation cannot run this.
    """
    sizes = (x_RK.dtype, w_GKN.dtype, groups, *w_GKN.shape)
    choices = _Choices(
        _choose(FORWARD, implementation, *sizes, blocks),
        _choose(INPUT_GRADIENT, implementation, *sizes, None),
        _choose(WEIGHT_GRADIENT, implementation, *sizes, None),
    )
    return _grouped_matmul(*_alike(x_RK, w_GKN, groups), choices)


def grouped_matmul_input_gradient(
    dy_RN: jax.Array,
    w_GKN: jax.Array,
    groups: RowGroups,
    *,
    implementation: Implementation | None = None,
    blocks: mosaic.MatmulBlocks | None = None,
) -> jax.Array:
    """dx of the module's docstring, [R, K]; w is not copied. Not differentiable."""
    sizes = (dy_RN.dtype, w_GKN.dtype, groups, *w_GKN.shape)
    blocks = _choose(INPUT_GRADIENT, implementation, *sizes, blocks)
    return _product(*_alike(dy_RN, w_GKN, groups), blocks, transposed=True)


def grouped_matmul_weight_gradient(
    x_RK: jax.Array,
    dy_RN: jax.Array,
    groups: RowGroups,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    into_GKN: jax.Array | None = None,
    implementation: Implementation | None = None,
    blocks: mosaic.MatmulBlocks | None = None,
) -> jax.Array:
    """dw of the module's docstring, [G, K, N]; zeros for a group without rows. Not differentiable.

    Args:
      dtype: of the result.
      into_GKN: a gradient, fp32, that dw is added to; the result is the sum, of that dtype, in the
        same memory where the caller gives it up.
    """
    G, K, N = groups.num_groups, x_RK.shape[1], dy_RN.shape[1]
    sizes = (x_RK.dtype, dy_RN.dtype, groups, G, K, N)
    blocks = _choose(WEIGHT_GRADIENT, implementation, *sizes, blocks)
    return _weight_gradient(*_alike(x_RK, dy_RN, groups, into_GKN), blocks, dtype)


def _choose(op, implementation, x_dtype, w_dtype, groups: RowGroups, G, K, N, blocks):
    choice = choose(
        op,
        implementation,
        shape_class=shape_class(x_dtype, groups.num_rows, G, K, N),
        obstacles={"mosaic": obstacle(x_dtype, w_dtype, groups.tile, K, N)},
    )
    return choice.mosaic(blocks, mosaic.MatmulBlocks)


def chooses_kernels(dtype: jax.typing.DTypeLike, G: int, K: int, N: int) -> bool:
    """Whether such a product and both gradients would run by kernels, if none is named in the call.
    Without them equal groups (`batched_matmul`) are faster."""
    if obstacle(dtype, dtype, row_tile(), K, N) is not None:
        return False
    few_rows = shape_class(dtype, G * row_tile(), G, K, N)  # the number makes no difference
    choices = (
        choose(op, None, shape_class=few_rows, obstacles={"mosaic": None})
        for op in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
    )
    return all(choice.implementation == "mosaic" for choice in choices)


def obstacle(x_dtype, w_dtype, tile: int, K: int, N: int) -> str | None:
    """Why the kernels cannot run such a call; None: they can."""
    if not x_dtype == w_dtype in (jnp.bfloat16, jnp.float16):
        return f"it takes two operands of one 16-bit type, not {x_dtype} and {w_dtype}"
    for width in (K, N):
        if width % WIDTH_MULTIPLE:
            return f"the width {width} is no multiple of {WIDTH_MULTIPLE}"
    if tile not in TILES:
        return f"it takes tiles of 64 or 128 rows, not {tile}"
    return mosaic_obstacle()


def _alike(first, second, groups: RowGroups, *more):
    """The arguments as varying over the same mesh axes."""
    first, second, group_N, first_G1, *more = varying_alike(
        first, second, groups.group_N, groups.first_G1, *more
    )
    groups = dataclasses.replace(groups, group_N=group_N, first_G1=first_G1)
    return first, second, groups, *more


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(x_RK, w_GKN, groups, choices):
    return _product(x_RK, w_GKN, groups, choices.forward, transposed=False)


def _forward(x_RK, w_GKN, groups, choices):
    return _grouped_matmul(x_RK, w_GKN, groups, choices), (x_RK, w_GKN, groups)


def _backward(choices, residuals, dy_RN):
    x_RK, w_GKN, groups = residuals
    dx_RK = _product(dy_RN, w_GKN, groups, choices.input_gradient, transposed=True)
    dw_GKN = _weight_gradient(x_RK, dy_RN, groups, None, choices.weight_gradient, w_GKN.dtype)
    return dx_RK, dw_GKN, None


_grouped_matmul.defvjp(_forward, _backward)


def _product(x_RK, w, groups, blocks: mosaic.MatmulBlocks | None, *, transposed: bool):
    if blocks is not None:
        return mosaic.grouped_matmul(x_RK, w, groups, blocks, transposed=transposed)

    def one_tile(tile):
        x_tK, group = tile
        w_KN = w[group].T if transposed else w[group]
        return jnp.matmul(x_tK, w_KN, preferred_element_type=jnp.float32).astype(x_tK.dtype)

    tiles = x_RK.reshape(-1, groups.tile, x_RK.shape[1])
    return lax.map(one_tile, (tiles, groups.group_N)).reshape(x_RK.shape[0], -1)


_weight_gradient_p = Primitive(WEIGHT_GRADIENT)
"""One operation, whatever computes it, so that who has traced a gradient finds it: bound with one
operand more, `into_GKN`, it adds itself to that."""


def _weight_gradient(x_RK, dy_RN, groups, into_GKN, blocks: mosaic.MatmulBlocks | None, dtype):
    operands = [x_RK, dy_RN, groups.group_N, groups.first_G1]
    if into_GKN is not None:
        operands.append(into_GKN)
    params = {"tile": groups.tile, "blocks": blocks, "dtype": jnp.dtype(dtype)}
    if blocks is not None and is_interpreted():  # by callbacks, which an operation would hide
        return _computed(*operands, **params)
    return _weight_gradient_p.bind(*operands, **params)


@_weight_gradient_p.def_impl
def _computed(x_RK, dy_RN, group_N, first_G1, into_GKN=None, *, tile, blocks, dtype):
    groups = RowGroups(group_N, first_G1, tile)
    if blocks is not None:
        return mosaic.grouped_matmul_weight_gradient(
            x_RK, dy_RN, groups, blocks, dtype=dtype, into=into_GKN
        )

    def add_tile(total_GKN, tile):
        x_tK, dy_tN, group, index = tile
        product = jnp.matmul(x_tK.T, dy_tN, preferred_element_type=jnp.float32)
        used = index < groups.first_G1[-1]
        return total_GKN.at[group].add(jnp.where(used, product, 0)), None

    total_GKN = into_GKN
    if into_GKN is None:
        shape = (groups.num_groups, x_RK.shape[1], dy_RN.shape[1])
        total_GKN, _ = varying_alike(jnp.zeros(shape, jnp.float32), x_RK)
    x, dy = (a.reshape(-1, groups.tile, a.shape[1]) for a in (x_RK, dy_RN))
    tiles = (x, dy, groups.group_N, jnp.arange(x.shape[0]))
    total_GKN, _ = lax.scan(add_tile, total_GKN, tiles)
    return total_GKN.astype(dtype if into_GKN is None else into_GKN.dtype)


@_weight_gradient_p.def_abstract_eval
def _type(x_RK, dy_RN, group_N, first_G1, into_GKN=None, *, tile, blocks, dtype):
    shape = (first_G1.shape[0] - 1, x_RK.shape[1], dy_RN.shape[1])
    if into_GKN is not None and into_GKN.shape != shape:
        raise ValueError(f"into_GKN is {into_GKN.shape}, but the gradient is {shape}")
    spec = x_RK.sharding.update(spec=PartitionSpec(None, None, None))
    dtype = dtype if into_GKN is None else into_GKN.dtype
    return x_RK.update(shape=shape, dtype=dtype, sharding=spec)


mlir.register_lowering(_weight_gradient_p, mlir.lower_fun(_computed, multiple_results=False))
