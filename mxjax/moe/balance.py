"""Keeping experts evenly loaded: router losses, the balancing bias and load figures.

Shapes: L MoE layers, B sequences of this rank, E experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mxjax.config.schema import MoEConfig
from mxjax.moe.router import RouterStatistics
from mxjax.sharding import collectives
from mxjax.sharding.collectives import Axes


def router_loss(
    stats: RouterStatistics, moe: MoEConfig, token_axes: Axes, sequence_axes: Axes
) -> tuple[jax.Array, jax.Array]:
    """This rank's share of the router losses of one microbatch, summed over layers.

    The losses are those of the whole microbatch, whatever the layout. They are bilinear in counts
    and score sums, so only the counts, which have no gradient, must cross ranks: the sum over ranks
    of (global counts x local score sums) is the global loss.

    Args:
      stats: leaves stacked over layers, [L, ...].
      token_axes: axes whose ranks hold different tokens.
      sequence_axes: those of them that split one sequence.

    Returns:
      loss (this rank's share), global tokens per expert [L, E].
    """
    E, K = moe.num_experts, moe.router_topk
    counts_LBE = jax.lax.stop_gradient(stats.counts_BE)
    counts_LE = collectives.psum(jnp.sum(counts_LBE, axis=1), token_axes)
    tokens = jnp.maximum(jnp.sum(counts_LE[0]) / K, 1)
    loss = moe.z_loss_coeff * jnp.sum(stats.z_sum) / tokens
    if moe.aux_loss_coeff:
        products = counts_LE * jnp.sum(stats.score_sums_BE, axis=1)
        loss += moe.aux_loss_coeff * E / (K * tokens**2) * jnp.sum(products)
    if moe.seq_aux_loss_coeff:
        counts_LBE = collectives.psum(counts_LBE, sequence_axes)
        tokens_B = jnp.maximum(jnp.sum(counts_LBE[0], axis=-1) / K, 1)
        products_LB = jnp.sum(counts_LBE * stats.score_sums_BE, axis=-1) / (K * tokens_B**2) * E
        loss += moe.seq_aux_loss_coeff * jnp.sum(products_LB * tokens_B) / tokens
    return loss, counts_LE


def updated_bias(bias_LE: jax.Array, counts_LE: jax.Array, rate: float) -> jax.Array:
    """Aux-loss-free balancing (Wang et al. 2024): raise the bias of experts with fewer tokens than
    the mean by `rate`, lower it for those with more."""
    mean_L1 = jnp.mean(counts_LE, axis=-1, keepdims=True)
    return bias_LE + rate * jnp.sign(mean_L1 - counts_LE)


def load_factor(counts_LE: jax.Array) -> jax.Array:
    """Tokens of the busiest expert over the mean, in the worst layer; 1 is perfect balance."""
    mean_L = jnp.maximum(jnp.mean(counts_LE, axis=-1), 1e-9)
    return jnp.max(jnp.max(counts_LE, axis=-1) / mean_L)
