"""The fused elementwise ops, each with a plain formula to compare with, for tests of all of them.

Widths and numbers of rows are no multiples of any block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.kernels.dropout import bias_dropout_add
from mxjax.kernels.gelu import gelu
from mxjax.kernels.mosaic_stream import TileBlocks
from mxjax.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from mxjax.kernels.norm_mosaic import RowBlocks
from mxjax.kernels.rope import apply_rope
from mxjax.kernels.rope_mosaic import RopeBlocks
from mxjax.kernels.swiglu import swiglu

EPSILON = 1e-5
RATE, KEY = 0.3, jax.random.key(5)
TILES = TileBlocks(rows=2, columns=128, per_multiprocessor=1)
REGISTERS = TileBlocks(rows=2, columns=256, stages=0)
ROWS = RowBlocks(rows=2, stages=2, per_multiprocessor=1)
TURNS = RopeBlocks(rows=8, heads=2, per_multiprocessor=1)


@dataclass(frozen=True)
class FusedOp:
    """`run(*arguments, implementation=..., blocks=...)` should be `formula(*arguments)`."""

    run: Callable
    formula: Callable
    shapes: tuple[tuple[int, ...], ...]
    """Of the arguments; those with one dim, and biases, are weights, alike on all ranks."""
    small: object
    """Block sizes with which these shapes make several blocks."""
    weights: int = 0
    """So many arguments at the end are weights."""


def _rms(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + EPSILON) * scale


def _layer(x, scale, bias):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred / jnp.sqrt(jnp.var(x, -1, keepdims=True) + EPSILON) * scale + bias


def _swiglu(up, bias=0.0):
    gate, up = jnp.unstack(up + bias, axis=-2)
    return gate / (1 + jnp.exp(-gate)) * up


def _gelu(x, bias=0.0):
    z = x + bias
    return 0.5 * z * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def _mask(shape) -> jax.Array:
    """What the op keeps, seen through the op itself: 1 / (1 - rate) or 0."""
    ones, zeros = jnp.ones(shape), jnp.zeros(shape)
    return bias_dropout_add(ones, None, zeros, RATE, KEY, implementation="xla")


def _dropped(x, residual, bias=0.0):
    return residual + (x + bias) * _mask(x.shape)


def _drop(x, residual, bias=None, **options):
    return bias_dropout_add(x, bias, residual, RATE, KEY, **options)


def _angles(num_pairs: int) -> jax.Array:
    return jnp.arange(5)[None, :, None] * 10000.0 ** -(jnp.arange(num_pairs) / num_pairs)


def _rope(num_pairs: int, interleaved: bool):
    def run(x, **options):
        angles = jnp.tile(_angles(num_pairs), (x.shape[0], 1, 1))
        return apply_rope(x, (jnp.cos(angles), jnp.sin(angles)), interleaved=interleaved, **options)

    def formula(x):
        turning, rest = x[..., : 2 * num_pairs], x[..., 2 * num_pairs :]
        shape = (*x.shape[:-1], num_pairs, 2)
        if not interleaved:
            shape = (*x.shape[:-1], 2, num_pairs)
            turning = jnp.swapaxes(turning.reshape(shape), -1, -2)
        pairs = turning.reshape(*x.shape[:-1], num_pairs, 2)
        angles = _angles(num_pairs)[:, :, None]
        matrix = jnp.array(
            [[jnp.cos(angles), -jnp.sin(angles)], [jnp.sin(angles), jnp.cos(angles)]]
        )
        turned = jnp.einsum(
            "ijbsnp,bsnpj->bsnpi", jnp.tile(matrix, (1, 1, x.shape[0], 1, 1, 1)), pairs
        )
        if not interleaved:
            turned = jnp.swapaxes(turned, -1, -2)
        return jnp.concatenate([turned.reshape(*x.shape[:-1], -1), rest], -1)

    return FusedOp(run, formula, ((1, 5, 4, 48),), TURNS)


def _with_epsilon(op):
    return lambda *arguments, **options: op(*arguments, EPSILON, **options)


X, W = (3, 136), (136,)
"""Two tiles of 128 columns and of 2 rows, of which the last ones are not full."""
Y, V = (3, 384), (384,)
Z, U = (3, 3072), (3072,)
"""A row in three parts."""

OPS = {
    "swiglu": FusedOp(swiglu, _swiglu, ((3, 2, 136),), TILES),
    "bias_swiglu": FusedOp(swiglu, _swiglu, ((3, 2, 136), (2, 136)), TILES, 1),
    "swiglu_in_registers": FusedOp(swiglu, _swiglu, ((4, 2, 384),), REGISTERS),
    "gelu": FusedOp(gelu, _gelu, (X,), TILES),
    "bias_gelu": FusedOp(gelu, _gelu, (X, W), TILES, 1),
    "bias_gelu_in_registers": FusedOp(gelu, _gelu, ((4, 384), V), REGISTERS, 1),
    "rms_norm": FusedOp(_with_epsilon(rms_norm), _rms, (Y, V), ROWS, 1),
    "layer_norm": FusedOp(_with_epsilon(layer_norm), _layer, (Y, V, V), ROWS, 2),
    "add_rms_norm": FusedOp(
        _with_epsilon(add_rms_norm), lambda x, r, s: (x + r, _rms(x + r, s)), (Y, Y, V), ROWS, 1
    ),
    "add_layer_norm": FusedOp(
        _with_epsilon(add_layer_norm),
        lambda x, r, s, b: (x + r, _layer(x + r, s, b)),
        (Z, Z, U, U),
        ROWS,
        2,
    ),
    "dropout_add": FusedOp(_drop, _dropped, (X, X), TILES),
    "bias_dropout_add": FusedOp(_drop, _dropped, (X, X, W), TILES, 1),
    "rope_halves": _rope(24, interleaved=False),
    "rope_halves_partial": _rope(16, interleaved=False),
    "rope_pairs": _rope(24, interleaved=True),
    "rope_pairs_partial": _rope(16, interleaved=True),
}


def value_and_gradients(function: Callable, arguments: tuple) -> tuple:
    """Outputs, and gradients of all arguments for the output gradients sin(0), sin(1), ... in bf16.

    Sums of them over many rows would otherwise tell the dtypes of what is compared apart.
    """
    outs, pullback = jax.vjp(function, *arguments)

    def gradient(out):
        # Of the output's type also where that says over which mesh axes it varies.
        values = jnp.sin(jnp.arange(out.size)).astype(jnp.bfloat16)
        return out * 0 + values.reshape(out.shape).astype(out.dtype)

    return outs, pullback(jax.tree.map(gradient, outs))
