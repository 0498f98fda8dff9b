"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016) over the last dim, in fp32,
alone or together with the residual addition before them.

With x^ = (x - mean) / sqrt(mean((x - mean)^2) + epsilon), for RMSNorm without the means of x, and
g = dy * scale:

    y = x^ * scale + bias
    dx = (g - mean(g) - x^ * mean(g * x^)) / sqrt(mean((x - mean)^2) + epsilon)
    dscale = sum over rows of dy * x^         dbias = sum over rows of dy

for RMSNorm without mean(g). The backward pass computes the statistics of x again: it reads x
anyway, and nothing but x has to be kept.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mxjax.kernels.implementation import Implementation, choose, shape_class, varying_alike
from mxjax.kernels.norm_mosaic import (
    NormKind,
    RowBlocks,
    norm_backward,
    norm_forward,
    row_obstacle,
)


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    epsilon: float,
    *,
    implementation: Implementation | None = None,
    blocks: RowBlocks | None = None,
) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * scale; result in the dtype of x.

    Args:
      x: [..., H].
      scale: [H].
      implementation: `xla` or `mosaic`; None: by configuration and tuning table.
      blocks: of the Mosaic kernels; None: as measured, or by the width.

    Raises:
      ImplementationError: `implementation` cannot run this call.
    """
    kind = NormKind(epsilon, centred=False, adds=False)
    return _call("rms_norm", x, scale, None, kind, implementation, blocks)


def layer_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    epsilon: float,
    *,
    implementation: Implementation | None = None,
    blocks: RowBlocks | None = None,
) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias; else as `rms_norm`."""
    kind = NormKind(epsilon, centred=True, adds=False)
    return _call("layer_norm", x, scale, bias, kind, implementation, blocks)


def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    epsilon: float,
    *,
    name: str | None = None,
    implementation: Implementation | None = None,
    blocks: RowBlocks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """x + residual, and `rms_norm` of it (as it is rounded to the dtype of x).

    Args:
      name: checkpoint name of the sum, which the backward pass takes. Under a recompute policy that
        keeps it but not the normed value a kernel adds again: better norm it apart there.
    """
    kind = NormKind(epsilon, centred=False, adds=True)
    return _add("add_rms_norm", x, residual, scale, None, kind, name, implementation, blocks)


def add_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    epsilon: float,
    *,
    name: str | None = None,
    implementation: Implementation | None = None,
    blocks: RowBlocks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """x + residual, and `layer_norm` of it; else as `add_rms_norm`."""
    kind = NormKind(epsilon, centred=True, adds=True)
    return _add("add_layer_norm", x, residual, scale, bias, kind, name, implementation, blocks)


def _call(op, x, scale, bias, kind, implementation, blocks) -> jax.Array:
    mosaic = _mosaic(op, x, scale, implementation, blocks)
    return _norm(*varying_alike(x, scale, bias), kind, mosaic)


def _add(op, x, residual, scale, bias, kind, name, implementation, blocks):
    mosaic = _mosaic(op, x, scale, implementation, blocks)
    x, residual, scale, bias = varying_alike(x, residual, scale, bias)
    if mosaic is None:
        total = _named(x + residual, name)
        return total, _norm(total, scale, bias, dataclasses.replace(kind, adds=False), None)
    return _add_norm(x, residual, scale, bias, kind, name, mosaic)


def _mosaic(op, x, scale, implementation, blocks) -> RowBlocks | None:
    """Block sizes of the Mosaic kernels; None: XLA runs the op."""
    choice = choose(
        op,
        implementation,
        shape_class=shape_class(x.dtype, x.shape[-1]),
        obstacles={"mosaic": row_obstacle(x, scale)},
    )
    return choice.mosaic(blocks, RowBlocks)


def _named(x: jax.Array, name: str | None) -> jax.Array:
    return x if name is None else checkpoint_name(x, name)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


# The norm alone


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _norm(x, scale, bias, kind: NormKind, mosaic: RowBlocks | None) -> jax.Array:
    if mosaic is not None:
        (normed,) = norm_forward(_rows(x), None, scale, bias, kind, mosaic)
        return normed.reshape(x.shape)
    x_hat, _ = _standardised(x, kind)
    y = x_hat * scale.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def _standardised(x, kind: NormKind):
    """x^ and 1 / standard deviation, fp32."""
    x = x.astype(jnp.float32)
    if kind.centred:
        x -= jnp.mean(x, axis=-1, keepdims=True)
    rstd = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + kind.epsilon)
    return x * rstd, rstd


def _norm_forward(x, scale, bias, kind, mosaic):
    return _norm(x, scale, bias, kind, mosaic), (x, scale, bias)


def _norm_backward(kind, mosaic, residuals, d_normed):
    x, scale, bias = residuals
    if mosaic is None:
        d_x, sums = _xla_gradients(x, d_normed, scale, kind)
    else:
        d_x, sums = norm_backward(_rows(x), _rows(d_normed), None, scale, kind, mosaic)
    return d_x.reshape(x.shape), *_weight_gradients(sums, scale, bias)


def _xla_gradients(x, d_normed, scale, kind: NormKind):
    x_hat, rstd = _standardised(x, kind)
    d_y = d_normed.astype(jnp.float32)
    grad = d_y * scale.astype(jnp.float32)
    d_x = grad - x_hat * jnp.mean(grad * x_hat, axis=-1, keepdims=True)
    if kind.centred:
        d_x -= jnp.mean(grad, axis=-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    sums = [jnp.sum(d_y * x_hat, axis=rows)]
    if kind.centred:
        sums.append(jnp.sum(d_y, axis=rows))
    return (d_x * rstd).astype(x.dtype), sums


def _weight_gradients(sums, scale, bias):
    return sums[0].astype(scale.dtype), None if bias is None else sums[1].astype(bias.dtype)


_norm.defvjp(_norm_forward, _norm_backward)


# Addition and norm in one kernel


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _add_norm(x, residual, scale, bias, kind: NormKind, name, mosaic: RowBlocks):
    return _add_norm_forward(x, residual, scale, bias, kind, name, mosaic)[0]


def _add_norm_forward(x, residual, scale, bias, kind, name, mosaic):
    outs = norm_forward(_rows(x), _rows(residual), scale, bias, kind, mosaic)
    normed, total = (out.reshape(x.shape) for out in outs)
    total = _named(total, name)
    return (total, normed), (total, scale, bias)


def _add_norm_backward(kind, name, mosaic, residuals, d_outs):
    total, scale, bias = residuals
    rows = (_rows(v) for v in (total, d_outs[1], d_outs[0]))
    d_x, sums = norm_backward(*rows, scale, kind, mosaic)
    d_x = d_x.reshape(total.shape)
    return d_x, d_x, *_weight_gradients(sums, scale, bias)


_add_norm.defvjp(_add_norm_forward, _add_norm_backward)
