"""Cross entropy over a vocabulary that is split over `tp` (Megatron-LM): logits are never gathered.

Shapes: T tokens, V this rank's part of the vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mxjax.sharding import collectives

AXIS = "tp"


@jax.custom_vjp
def vocab_parallel_cross_entropy(
    logits_TV: jax.Array, targets_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood and log-sum-exp of each token, both [T] fp32, equal on all `tp`.

    `targets_T` are ids of the whole vocabulary; a negative one means no target: both its outputs
    are zero and give no gradient. To be called inside `shard_map`; `collectives` says how
    gradients of equal copies are meant.
    """
    return _forward(logits_TV, targets_T)[0]


def _one_hot(logits_TV: jax.Array, targets_T: jax.Array) -> jax.Array:
    V = logits_TV.shape[1]
    local_T = targets_T - collectives.axis_index(AXIS) * V
    return jnp.arange(V)[None, :] == local_T[:, None]


def _forward(logits_TV, targets_T):
    logits = logits_TV.astype(jnp.float32)
    top_T = collectives.pmax(jnp.max(logits, axis=1), AXIS)
    sums = (
        jnp.sum(jnp.exp(logits - top_T[:, None]), axis=1),
        jnp.sum(jnp.where(_one_hot(logits_TV, targets_T), logits, 0), axis=1),
    )
    sum_exp_T, target_logit_T = collectives.psum(sums, AXIS)
    lse_T = top_T + jnp.log(sum_exp_T)
    real_T = targets_T >= 0
    outputs = (jnp.where(real_T, lse_T - target_logit_T, 0), jnp.where(real_T, lse_T, 0))
    return outputs, (logits_TV, targets_T, lse_T)


def _backward(residuals, cotangents):
    logits_TV, targets_T, lse_T = residuals
    # Every rank holds a copy of the outputs; a logit acts on all of them.
    d_nll_T, d_lse_T = collectives.psum(cotangents, AXIS)
    real_T = targets_T >= 0
    d_nll_T, d_lse_T = jnp.where(real_T, d_nll_T, 0), jnp.where(real_T, d_lse_T, 0)
    probs = jnp.exp(logits_TV.astype(jnp.float32) - lse_T[:, None])
    one_hot = _one_hot(logits_TV, targets_T)
    d_logits = (d_nll_T + d_lse_T)[:, None] * probs - jnp.where(one_hot, d_nll_T[:, None], 0)
    return d_logits.astype(logits_TV.dtype), None


vocab_parallel_cross_entropy.defvjp(_forward, _backward)
