"""SwiGLU (Shazeer 2020), with or without a bias, forward and backward in one pass each.

The input is what one matrix product makes: gate and up side by side, [..., 2, F]. Its gradient is
written in the same form at once; the gradient that JAX derives pads both halves to full size and
adds them.

Shapes: F inner width.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.kernels.implementation import (
    Implementation,
    choose,
    shape_class,
    sum_of_rows,
    varying_alike,
)
from mxjax.kernels.mosaic_stream import TileBlocks, map_tiles, tile_obstacle
from mxjax.kernels.triton_launch import triton_obstacle

OP = "swiglu"


def swiglu(
    up: jax.Array,
    bias: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
    blocks: TileBlocks | None = None,
) -> jax.Array:
    """silu(gate + b0) * (up + b1), computed in fp32.

    With s = sigmoid(gate) the gradients are d_up = d * gate * s and
    d_gate = d * up * s * (1 + gate * (1 - s)); that of the bias is their sum over rows.

    Args:
      up: gate and up, [..., 2, F].
      bias: b0 and b1, [2, F].
      implementation: `xla`, `mosaic` or `triton`; None: by configuration and tuning table.
      blocks: of the Mosaic kernel; None: as measured, or its defaults.

    Returns:
      [..., F] in the dtype of `up`.

    Raises:
      ImplementationError: `implementation` cannot run this call.
    """
    F = up.shape[-1]
    obstacles = {"mosaic": tile_obstacle(F, up.dtype), "triton": triton_obstacle()}
    choice = choose(OP, implementation, shape_class=shape_class(up.dtype, F), obstacles=obstacles)
    return _swiglu(*varying_alike(up, bias), choice.kernel(blocks, TileBlocks))


def _branches(up, bias):
    up = up.astype(jnp.float32)
    if bias is not None:
        up += bias.astype(jnp.float32)
    return up[..., 0, :], up[..., 1, :]


def _value(gate, up):
    return gate * jax.nn.sigmoid(gate) * up


def _gradients(gate, up, d_out):
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    return d_out * up * (sigmoid + silu * (1 - sigmoid)), d_out * silu


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _swiglu(up, bias, kernel: TileBlocks | Literal["triton"] | None):
    if kernel is None:
        return _value(*_branches(up, bias)).astype(up.dtype)
    if kernel == "triton":
        from mxjax.kernels import swiglu_triton as triton

        return triton.forward(_rows(up, 2), bias).reshape(*up.shape[:-2], up.shape[-1])
    (out,), _ = map_tiles(_tile, [_rows(up, 2)], (1,), kernel, bias=bias)
    return out.reshape(*up.shape[:-2], up.shape[-1])


def _forward(up, bias, kernel):
    return _swiglu(up, bias, kernel), (up, bias)


def _backward(kernel, residuals, d_out):
    up, bias = residuals
    if kernel is None:
        d_up = _stacked_gradients(up, bias, d_out).astype(up.dtype)
        if bias is None:
            return d_up, None
        return d_up, sum_of_rows(d_up, up.ndim - 2).astype(bias.dtype)
    if kernel == "triton":
        from mxjax.kernels import swiglu_triton as triton

        d_up, d_bias = triton.backward(_rows(up, 2), bias, _rows(d_out, 1)[:, 0])
        return d_up.reshape(up.shape), None if bias is None else d_bias.astype(bias.dtype)
    num_sums = 0 if bias is None else 2
    (d_up,), sums = map_tiles(
        _gradient_tile, [_rows(up, 2), _rows(d_out, 1)], (2,), kernel, bias=bias, num_sums=num_sums
    )
    return d_up.reshape(up.shape), None if bias is None else sums.astype(bias.dtype)


def _tile(gate, up, *biases):
    if biases:
        gate, up = gate + biases[0], up + biases[1]
    return (_value(gate, up),), ()


def _gradient_tile(gate, up, d_out, *biases):
    if biases:
        gate, up = gate + biases[0], up + biases[1]
    grads = _gradients(gate, up, d_out)
    return grads, grads if biases else ()


def _stacked_gradients(up, bias, d_out):
    """Both gradients in one array, fp32.

    Each half computes the sigmoid for itself, of inputs that XLA takes for different ones: else it
    would compute it in a pass of its own and keep it in fp32.
    """
    d_out = d_out.astype(jnp.float32)
    d_gate, _ = _gradients(*_branches(up, bias), d_out)
    _, d_up = _gradients(*_branches(lax.optimization_barrier(up), bias), d_out)
    return jnp.stack([d_gate, d_up], axis=-2)


def _rows(x: jax.Array, branches: int) -> jax.Array:
    """[T, branches, F]."""
    return x.reshape(-1, branches, x.shape[-1])


_swiglu.defvjp(_forward, _backward)
