"""GELU in its tanh form (GPT-2), with or without a bias, forward and backward in one pass each."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from mxjax.kernels.implementation import (
    Implementation,
    choose,
    shape_class,
    sum_of_rows,
    varying_alike,
)
from mxjax.kernels.mosaic_stream import TileBlocks, map_tiles, tile_obstacle


def gelu(
    x: jax.Array,
    bias: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
    blocks: TileBlocks | None = None,
) -> jax.Array:
    """z * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3))) / 2 of z = x + bias, computed in fp32.

    Args:
      x: [..., F].
      bias: [F].
      implementation: `xla` or `mosaic`; None: by configuration and tuning table.
      blocks: of the Mosaic kernel; None: as measured, or its defaults.

    Returns:
      [..., F] in the dtype of x.

    Raises:
      ImplementationError: `implementation` cannot run this call.
    """
    F = x.shape[-1]
    choice = choose(
        "gelu",
        implementation,
        shape_class=shape_class(x.dtype, F),
        obstacles={"mosaic": tile_obstacle(F, x.dtype)},
    )
    mosaic = choice.mosaic(blocks, TileBlocks)
    return _gelu(*varying_alike(x, bias), mosaic)


def _gate(z):
    """The factor of z, (1 + tanh(a)) / 2 = sigmoid(2a), and the slope of 2a."""
    k = 2 * math.sqrt(2 / math.pi)
    square = z * z
    return jax.nn.sigmoid(k * z * (1 + 0.044715 * square)), k * (1 + 3 * 0.044715 * square)


def _value(z):
    return z * _gate(z)[0]


def _slope(z):
    gate, slope = _gate(z)
    return gate * (1 + z * (1 - gate) * slope)


def _biased(x, bias):
    z = x.astype(jnp.float32)
    return z if bias is None else z + bias.astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gelu(x, bias, mosaic: TileBlocks | None):
    if mosaic is None:
        return _value(_biased(x, bias)).astype(x.dtype)
    (out,), _ = map_tiles(_tile, [_rows(x)], (1,), mosaic, bias=_row(bias))
    return out.reshape(x.shape)


def _forward(x, bias, mosaic):
    return _gelu(x, bias, mosaic), (x, bias)


def _backward(mosaic, residuals, d_out):
    x, bias = residuals
    if mosaic is None:
        d_x = (d_out.astype(jnp.float32) * _slope(_biased(x, bias))).astype(x.dtype)
        if bias is None:
            return d_x, None
        return d_x, sum_of_rows(d_x, x.ndim - 1).astype(bias.dtype)
    num_sums = 0 if bias is None else 1
    (d_x,), sums = map_tiles(
        _gradient_tile, [_rows(x), _rows(d_out)], (1,), mosaic, bias=_row(bias), num_sums=num_sums
    )
    return d_x.reshape(x.shape), None if bias is None else sums[0].astype(bias.dtype)


def _tile(z, *biases):
    return (_value(z + biases[0] if biases else z),), ()


def _gradient_tile(z, d_out, *biases):
    d_x = d_out * _slope(z + biases[0] if biases else z)
    return (d_x,), (d_x,) if biases else ()


def _rows(x):
    return x.reshape(-1, 1, x.shape[-1])


def _row(bias):
    return None if bias is None else bias[None]


_gelu.defvjp(_forward, _backward)
