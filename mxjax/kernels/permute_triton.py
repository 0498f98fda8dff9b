"""Moving rows in Triton: a program moves, or adds up, the rows of one place or of one token.

Shapes: T rows, K choices of a row, P places, H width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from mxjax.kernels.triton_launch import launch

BLOCK = 1024
"""Columns that a program has in registers at a time."""


@triton.jit
def _permute_kernel(
    x_ptr,
    source_ptr,
    used_ptr,
    out_ptr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0)
    if place < tl.load(used_ptr):
        row = tl.load(source_ptr + place) // K
        for start in range(0, H, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < H
            values = tl.load(x_ptr + row.to(tl.int64) * H + columns, inside & (row < T), other=0.0)
            tl.store(out_ptr + place.to(tl.int64) * H + columns, values, mask=inside)


@triton.jit
def _combine_kernel(
    y_ptr,
    place_ptr,
    weight_ptr,
    out_ptr,
    P: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0)
    for start in range(0, H, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < H
        total = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(K):
            place = tl.load(place_ptr + t * K + k)
            row = y_ptr + place.to(tl.int64) * H + columns
            values = tl.load(row, mask=inside & (place < P), other=0.0).to(tl.float32)
            if WEIGHTED:
                values *= tl.load(weight_ptr + t * K + k)
            total += values
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + t.to(tl.int64) * H + columns, out, mask=inside)


@triton.jit
def _combine_gradient_kernel(
    y_ptr,
    source_ptr,
    used_ptr,
    weight_ptr,
    grad_ptr,
    d_y_ptr,
    d_weight_ptr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0)
    if place < tl.load(used_ptr):
        choice = tl.load(source_ptr + place)
        filled = choice < T * K
        weight = tl.load(weight_ptr + choice, mask=filled, other=0.0)
        product = tl.zeros([BLOCK], tl.float32)
        for start in range(0, H, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < H
            row = grad_ptr + (choice // K).to(tl.int64) * H + columns
            grad = tl.load(row, mask=inside & filled, other=0.0).to(tl.float32)
            here = place.to(tl.int64) * H + columns
            product += grad * tl.load(y_ptr + here, mask=inside & filled, other=0.0).to(tl.float32)
            d_y = (weight * grad).to(d_y_ptr.dtype.element_ty)
            tl.store(d_y_ptr + here, d_y, mask=inside)
        tl.store(d_weight_ptr + choice, tl.sum(product, axis=0), mask=filled)


def permute(x_TH: jax.Array, source_P: jax.Array, used: jax.Array, num_choices: int) -> jax.Array:
    """Row source[p] / K of x, or zeros where there is none, for each place p < used; [P, H]."""
    (T, H), (P,) = x_TH.shape, source_P.shape
    out = jax.ShapeDtypeStruct((P, H), x_TH.dtype)
    operands = (x_TH, source_P, used.reshape(1))
    return launch(_permute_kernel, (P,), out, *operands, T=T, K=num_choices, H=H, BLOCK=BLOCK)


def combine(y_PH: jax.Array, place_TK: jax.Array, weights_TK: jax.Array | None) -> jax.Array:
    """Sum over k of weights[t, k] (None: 1) times row place[t, k] of y, in fp32; [T, H]. A place
    outside of y adds nothing."""
    (P, H), (T, K) = y_PH.shape, place_TK.shape
    weighted = weights_TK is not None
    return launch(
        _combine_kernel,
        (T,),
        jax.ShapeDtypeStruct((T, H), y_PH.dtype),
        y_PH,
        place_TK,
        weights_TK if weighted else place_TK,
        P=P,
        K=K,
        H=H,
        WEIGHTED=weighted,
        BLOCK=BLOCK,
    )


def combine_gradient(
    y_PH: jax.Array,
    place_TK: jax.Array,
    weights_TK: jax.Array,
    grad_TH: jax.Array,
    source_P: jax.Array,
    used: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of `combine`: of y, with zeros in empty places p < used, [P, H], and of the
    weights, fp32 [T, K]."""
    (P, H), (T, K) = y_PH.shape, place_TK.shape
    out = (
        jax.ShapeDtypeStruct((P, H), y_PH.dtype),
        jax.ShapeDtypeStruct((T, K), jnp.float32),
    )
    operands = (y_PH, source_P, used.reshape(1), weights_TK, grad_TH)
    d_y, d_weights = launch(
        _combine_gradient_kernel, (P,), out, *operands, T=T, K=K, H=H, BLOCK=BLOCK
    )
    # Nobody wrote that of a choice without a place.
    return d_y, jnp.where(place_TK < P, d_weights, 0)
