"""Inverted dropout: alone, and fused with the bias before and the residual addition after it.

The fused op draws its mask from a counter: the bits of an element are a hash of two words of the
key and of the element's index. So nothing is stored, the backward pass draws the same mask again,
and all implementations agree to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.kernels.implementation import Implementation, choose, shape_class, varying_alike
from mxjax.kernels.mosaic_stream import TileBlocks, map_tiles, tile_obstacle
from mxjax.kernels.random_bits import random_bits
from mxjax.kernels.triton_launch import triton_obstacle


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero each element with probability `rate` and divide the rest by 1 - rate; off if no key."""
    if rate == 0 or key is None:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def bias_dropout_add(
    x: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array,
    rate: float,
    key: jax.Array | None,
    *,
    implementation: Implementation | None = None,
    blocks: TileBlocks | None = None,
) -> jax.Array:
    """residual + dropout(x + bias), computed in fp32.

    Args:
      x, residual: [..., F], of one dtype.
      bias: [F].
      rate: below 1.
      key: ranks that hold different values need different keys. None: no dropout.
      implementation: `xla`, `mosaic` or `triton`; None: by configuration and tuning table.
      blocks: of the Mosaic kernel; None: as measured, or its defaults.

    Returns:
      [..., F] in the dtype of `residual`.

    Raises:
      ImplementationError: `implementation` cannot run this call.
    """
    F = x.shape[-1]
    choice = choose(
        "bias_dropout_add",
        implementation,
        shape_class=shape_class(x.dtype, F),
        obstacles={"mosaic": tile_obstacle(F, x.dtype), "triton": triton_obstacle()},
    )
    if rate == 0 or key is None:
        # Nothing to draw: XLA fuses plain additions into what is around them.
        return residual + (x if bias is None else x + bias.astype(x.dtype))
    kernel = choice.kernel(blocks, TileBlocks)
    seed = jax.random.bits(key, (2,), jnp.uint32)
    return _bias_dropout_add(*varying_alike(x, bias, residual, seed), rate, kernel)


def _kept(value, rate: float, first: jax.Array, second: jax.Array, index: jax.Array):
    """`value` / (1 - rate) where the element of this index is kept, else 0."""
    bits = random_bits(first, second, index)
    return jnp.where(bits >= jnp.uint32(round(rate * 2**32)), value * (1 / (1 - rate)), 0.0)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _bias_dropout_add(
    x, bias, residual, seed, rate: float, kernel: TileBlocks | Literal["triton"] | None
):
    if kernel is None:
        value = x.astype(jnp.float32)
        if bias is not None:
            value += bias.astype(jnp.float32)
        kept = _kept(value, rate, seed[0], seed[1], _index(x))
        return (residual.astype(jnp.float32) + kept).astype(residual.dtype)
    if kernel == "triton":
        from mxjax.kernels import dropout_triton as triton

        rows = (_rows(x)[:, 0], bias, _rows(residual)[:, 0])
        return triton.forward(*rows, seed, rate).reshape(x.shape)
    rows = [_rows(x), _rows(residual)]
    (out,), _ = map_tiles(_Tile(rate), rows, (1,), kernel, bias=_row(bias), seed=seed)
    return out.reshape(x.shape)


def _forward(x, bias, residual, seed, rate, kernel):
    return _bias_dropout_add(x, bias, residual, seed, rate, kernel), (bias, seed)


def _backward(rate, kernel, residuals, d_out):
    bias, seed = residuals
    if kernel is None:
        kept = _kept(d_out.astype(jnp.float32), rate, seed[0], seed[1], _index(d_out))
        d_x, sums = kept.astype(d_out.dtype), None
        if bias is not None:
            sums = [jnp.sum(kept, axis=tuple(range(d_out.ndim - 1)))]
    elif kernel == "triton":
        from mxjax.kernels import dropout_triton as triton

        d_x, total = triton.backward(_rows(d_out)[:, 0], seed, rate, has_bias=bias is not None)
        d_x, sums = d_x.reshape(d_out.shape), [total]
    else:
        num_sums = 0 if bias is None else 1
        tile = _GradientTile(rate, num_sums)
        (d_x,), sums = map_tiles(tile, [_rows(d_out)], (1,), kernel, num_sums=num_sums, seed=seed)
        d_x = d_x.reshape(d_out.shape)
    return d_x, None if bias is None else sums[0].astype(bias.dtype), d_out, None


@dataclass(frozen=True)
class _Tile:
    """What `map_tiles` computes, forward."""

    rate: float

    def __call__(self, value, residual, *rest):
        *biases, first, second, index = rest
        value = value + biases[0] if biases else value
        return (residual + _kept(value, self.rate, first, second, index),), ()


@dataclass(frozen=True)
class _GradientTile:
    """The same, backward; one sum, or none without a bias."""

    rate: float
    num_sums: int

    def __call__(self, d_out, first, second, index):
        kept = _kept(d_out, self.rate, first, second, index)
        return (kept,), (kept,) * self.num_sums


def _index(x: jax.Array) -> jax.Array:
    return lax.iota(jnp.uint32, x.size).reshape(x.shape)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, 1, x.shape[-1])


def _row(bias: jax.Array | None) -> jax.Array | None:
    return None if bias is None else bias[None]


_bias_dropout_add.defvjp(_forward, _backward)
