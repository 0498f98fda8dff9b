"""Projection to the vocabulary and cross entropy in one, a part of the tokens at a time.

The logits of all tokens are never there. The gradients of x and of the weights are computed right
after the loss of each part, while its logits are (Liger-Kernel does so too; Hsu et al. 2024), so
that no matrix product is done twice: 6 T H V operations for loss and gradients. That needs the
weight of each term of the loss beforehand, which is why the z-loss is part of the op.

The vocabulary may be split over `tp`, as in `cross_entropy.py`.

Shapes: T tokens, t tokens of a part, H hidden, V this rank's part of the vocabulary.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.sharding import collectives

AXIS = "tp"

LOGITS_BYTES = 2**30
"""Of one part's logits: large enough for whole matrix products, small beside the layers'
activations."""

Losses = tuple[jax.Array, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def linear_cross_entropy(
    x_TH: jax.Array,
    weight: jax.Array,
    targets_T: jax.Array,
    z_loss_coeff: float = 0.0,
    tied: bool = False,
) -> Losses:
    """Sums over tokens: nll + z_loss_coeff * lse^2, and nll and lse^2 alone.

    Args:
      weight: [H, V], or [V, H] if `tied`, in the precision of `x_TH`, in which logits are too.
      targets_T: ids of the whole vocabulary; a token with a negative one does not count.

    Returns:
      fp32 scalars, equal on all `tp` ranks. Only the first has a gradient; the others are for
      statistics. `collectives` says how gradients of equal copies are meant.
    """
    parts, targets = _parts(x_TH, weight, targets_T, tied)

    def add(sums, part):
        logits_tV = _logits(part[0], weight, tied)
        nll_t, lse_t, _ = _entropy(logits_tV, part[1])
        return _add(sums, nll_t, lse_t, part[1]), None

    (nll, squared_lse), _ = lax.scan(add, (jnp.zeros(()), jnp.zeros(())), (parts, targets))
    return nll + z_loss_coeff * squared_lse, nll, squared_lse


def _forward(x_TH, weight, targets_T, z_loss_coeff, tied):
    """Loss and gradients for a cotangent of one."""
    parts, targets = _parts(x_TH, weight, targets_T, tied)

    def step(carry, part):
        sums, d_weight = carry
        x_tH, targets_t = part
        logits_tV = _logits(x_tH, weight, tied)
        nll_t, lse_t, is_target_tV = _entropy(logits_tV, targets_t)
        # d nll = p - [target], d lse^2 = 2 lse p
        real_t = (targets_t >= 0).astype(jnp.float32)
        of_p_t = real_t * (1 + 2 * z_loss_coeff * lse_t)
        p_tV = jnp.exp(logits_tV.astype(jnp.float32) - lse_t[:, None])
        d_logits_tV = of_p_t[:, None] * p_tV - jnp.where(is_target_tV, real_t[:, None], 0)
        d_logits_tV = d_logits_tV.astype(x_TH.dtype)
        d_x_tH = jnp.einsum("tv,vh->th" if tied else "tv,hv->th", d_logits_tV, weight)
        form = "tv,th->vh" if tied else "th,tv->hv"
        operands = (d_logits_tV, x_tH) if tied else (x_tH, d_logits_tV)
        d_weight = d_weight + jnp.einsum(form, *operands)
        return (_add(sums, nll_t, lse_t, targets_t), d_weight), d_x_tH

    nothing = (jnp.zeros(()), jnp.zeros(())), jnp.zeros_like(weight)
    ((nll, squared_lse), d_weight), d_x = lax.scan(step, nothing, (parts, targets))
    d_x_TH = d_x.reshape(-1, x_TH.shape[1])[: x_TH.shape[0]]
    return (nll + z_loss_coeff * squared_lse, nll, squared_lse), (d_x_TH, d_weight)


def _backward(z_loss_coeff, tied, residuals, cotangents):
    d_x_TH, d_weight = residuals
    # Every rank holds a copy of the loss; a logit acts on all of them.
    scale = collectives.psum(cotangents[0], AXIS)
    scaled = ((scale * d.astype(jnp.float32)).astype(d.dtype) for d in (d_x_TH, d_weight))
    return *scaled, None


linear_cross_entropy.defvjp(_forward, _backward)


def _add(sums: Any, nll_t: jax.Array, lse_t: jax.Array, targets_t: jax.Array) -> Any:
    """`sums` with those of the tokens that have a target."""
    real_t = targets_t >= 0
    nll = jnp.sum(jnp.where(real_t, nll_t, 0))
    return sums[0] + nll, sums[1] + jnp.sum(jnp.where(real_t, jnp.square(lse_t), 0))


def _parts(x_TH, weight, targets_T, tied) -> tuple[jax.Array, jax.Array]:
    """Equal parts of tokens, the last one filled up with such that do not count."""
    T, V = x_TH.shape[0], weight.shape[0 if tied else 1]
    number = math.ceil(T * V * x_TH.dtype.itemsize / LOGITS_BYTES)
    t = math.ceil(T / number)
    missing = number * t - T
    x = jnp.pad(x_TH, ((0, missing), (0, 0)))
    targets = jnp.pad(targets_T, (0, missing), constant_values=-1)
    return x.reshape(number, t, -1), targets.reshape(number, t)


def _logits(x_tH: jax.Array, weight: jax.Array, tied: bool) -> jax.Array:
    return jnp.einsum("th,vh->tv" if tied else "th,hv->tv", x_tH, weight)


def _entropy(logits_tV, targets_t) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Negative log-likelihood and log-sum-exp; where targets are."""
    V = logits_tV.shape[1]
    logits = logits_tV.astype(jnp.float32)
    local_t = targets_t - collectives.axis_index(AXIS) * V
    is_target_tV = jnp.arange(V)[None, :] == local_t[:, None]
    top_t = collectives.pmax(jnp.max(logits, axis=1), AXIS)
    sums = (
        jnp.sum(jnp.exp(logits - top_t[:, None]), axis=1),
        jnp.sum(jnp.where(is_target_tV, logits, 0), axis=1),
    )
    sum_exp_t, target_logit_t = collectives.psum(sums, AXIS)
    lse_t = top_t + jnp.log(sum_exp_t)
    return lse_t - target_logit_t, lse_t, is_target_tV
