"""SwiGLU in Triton. A program computes some columns of one row or, where the gradient of a bias is
summed up, of several.

Shapes: T rows, F inner width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from mxjax.kernels.triton_launch import launch
from mxjax.kernels.triton_tiles import grid, place

BLOCK, NUM_WARPS = 512, 2
"""Columns and warps of a program."""
SUMMED_ROWS = 32
"""Rows of a program that adds up the gradient of a bias."""


@triton.jit
def _branches(up_ptr, bias_ptr, row, columns, inside, F: tl.constexpr, HAS_BIAS: tl.constexpr):
    start = up_ptr + row * (2 * F)
    gate = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + F + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + F + columns, mask=inside, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _forward_kernel(
    up_ptr, bias_ptr, out_ptr, F: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    row, columns = place(F, BLOCK)
    inside = columns < F
    gate, up = _branches(up_ptr, bias_ptr, row, columns, inside, F, HAS_BIAS)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * F + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    up_ptr,
    bias_ptr,
    d_out_ptr,
    d_up_ptr,
    sums_ptr,
    T: tl.constexpr,
    F: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group, columns = place(F, BLOCK)
    first = group * ROWS
    gate_sum = tl.zeros([BLOCK], tl.float32)
    up_sum = tl.zeros([BLOCK], tl.float32)
    for i in range(ROWS):
        row = first + i
        inside = (columns < F) & (row < T)
        gate, up = _branches(up_ptr, bias_ptr, row, columns, inside, F, HAS_BIAS)
        d_out = tl.load(d_out_ptr + row * F + columns, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        d_gate = d_out * up * (sigmoid + silu * (1 - sigmoid))
        d_up = d_out * silu
        start = d_up_ptr + row * (2 * F)
        tl.store(start + columns, d_gate.to(d_up_ptr.dtype.element_ty), mask=inside)
        tl.store(start + F + columns, d_up.to(d_up_ptr.dtype.element_ty), mask=inside)
        gate_sum += d_gate
        up_sum += d_up
    if HAS_BIAS:
        start = sums_ptr + group * (2 * F)
        tl.store(start + columns, gate_sum, mask=columns < F)
        tl.store(start + F + columns, up_sum, mask=columns < F)


def forward(up_T2F: jax.Array, bias_2F: jax.Array | None) -> jax.Array:
    """See `swiglu`; [T, F]."""
    T, _, F = up_T2F.shape
    return launch(
        _forward_kernel,
        grid(T, F, BLOCK),
        jax.ShapeDtypeStruct((T, F), up_T2F.dtype),
        up_T2F,
        up_T2F if bias_2F is None else bias_2F,
        F=F,
        HAS_BIAS=bias_2F is not None,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def backward(
    up_T2F: jax.Array, bias_2F: jax.Array | None, d_out_TF: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of `up`, and of the bias in fp32."""
    T, _, F = up_T2F.shape
    has_bias = bias_2F is not None
    rows = SUMMED_ROWS if has_bias else 1
    groups = triton.cdiv(T, rows)
    d_up, sums = launch(
        _backward_kernel,
        grid(groups, F, BLOCK),
        (
            jax.ShapeDtypeStruct(up_T2F.shape, up_T2F.dtype),
            jax.ShapeDtypeStruct((groups, 2, F) if has_bias else (1,), jnp.float32),
        ),
        up_T2F,
        bias_2F if has_bias else up_T2F,
        d_out_TF,
        T=T,
        F=F,
        HAS_BIAS=has_bias,
        ROWS=rows,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return d_up, jnp.sum(sums, axis=0) if has_bias else None
