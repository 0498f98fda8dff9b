"""Bias + dropout + addition in Triton. The mask is that of `random_bits.py`, to the bit.

Shapes: T rows, F width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from mxjax.kernels.triton_launch import launch
from mxjax.kernels.triton_tiles import grid, place

BLOCK = 1024
"""Columns of a program."""
SUMMED_ROWS = 32
"""Rows of a program that adds up the gradient of a bias."""


@triton.jit
def _mix(word):
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def _kept(value, seed_ptr, row, columns, F: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr):
    first, second = tl.load(seed_ptr), tl.load(seed_ptr + 1)
    index = (row * F + columns).to(tl.uint32)
    bits = _mix(_mix(index ^ first) + second)
    return tl.where(bits >= LEAST, value * SCALE, 0.0)


@triton.jit
def _forward_kernel(
    x_ptr,
    bias_ptr,
    residual_ptr,
    seed_ptr,
    out_ptr,
    F: tl.constexpr,
    LEAST: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, columns = place(F, BLOCK)
    inside = columns < F
    value = tl.load(x_ptr + row * F + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(residual_ptr + row * F + columns, mask=inside, other=0.0).to(tl.float32)
    out += _kept(value, seed_ptr, row, columns, F, LEAST, SCALE)
    tl.store(out_ptr + row * F + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    d_out_ptr,
    seed_ptr,
    d_x_ptr,
    sums_ptr,
    T: tl.constexpr,
    F: tl.constexpr,
    LEAST: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group, columns = place(F, BLOCK)
    first = group * ROWS
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(ROWS):
        row = first + i
        inside = (columns < F) & (row < T)
        d_out = tl.load(d_out_ptr + row * F + columns, mask=inside, other=0.0).to(tl.float32)
        d_x = _kept(d_out, seed_ptr, row, columns, F, LEAST, SCALE)
        tl.store(d_x_ptr + row * F + columns, d_x.to(d_x_ptr.dtype.element_ty), mask=inside)
        total += d_x
    if HAS_BIAS:
        tl.store(sums_ptr + group * F + columns, total, mask=columns < F)


def _drawing(rate: float) -> dict:
    """What of 32 random bits keeps an element, and what a kept one is multiplied by."""
    return {"LEAST": round(rate * 2**32), "SCALE": 1 / (1 - rate)}


def forward(
    x_TF: jax.Array, bias_F: jax.Array | None, residual_TF: jax.Array, seed: jax.Array, rate: float
) -> jax.Array:
    """residual + dropout(x + bias), [T, F]; `seed`: two words, uint32 [2]."""
    T, F = x_TF.shape
    return launch(
        _forward_kernel,
        grid(T, F, BLOCK),
        jax.ShapeDtypeStruct((T, F), residual_TF.dtype),
        x_TF,
        x_TF if bias_F is None else bias_F,
        residual_TF,
        seed,
        F=F,
        HAS_BIAS=bias_F is not None,
        BLOCK=BLOCK,
        **_drawing(rate),
    )


def backward(
    d_out_TF: jax.Array, seed: jax.Array, rate: float, has_bias: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of x, and of the bias in fp32."""
    T, F = d_out_TF.shape
    rows = SUMMED_ROWS if has_bias else 1
    groups = triton.cdiv(T, rows)
    d_x, sums = launch(
        _backward_kernel,
        grid(groups, F, BLOCK),
        (
            jax.ShapeDtypeStruct((T, F), d_out_TF.dtype),
            jax.ShapeDtypeStruct((groups, F) if has_bias else (1,), jnp.float32),
        ),
        d_out_TF,
        seed,
        T=T,
        F=F,
        HAS_BIAS=has_bias,
        ROWS=rows,
        BLOCK=BLOCK,
        **_drawing(rate),
    )
    return d_x, jnp.sum(sums, axis=0) if has_bias else None
