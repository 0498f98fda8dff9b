"""A router that compares directions: X-MoE (Chi et al. 2022, "On the Representation Collapse of
Sparse Mixture of Experts", section 3).

Shapes: T tokens, H hidden, D routing dim, E experts.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mxjax.config import ModelConfig, MoEConfig
from mxjax.models.parts import param
from mxjax.moe.router import Router


class CosineRouter(Router):
    """Scores are cosines between a token, projected to few dims, and each expert's embedding,
    times a learned scale."""

    def __init__(self, model: ModelConfig, moe: MoEConfig, rngs: nnx.Rngs):
        super().__init__(model, moe, rngs)
        H, E = model.hidden_size, moe.num_experts
        D = max(2, E // 2)
        self.project = param(rngs, (H, D), ("hidden", None), std=H**-0.5, keep_precision=True)
        self.weight = param(rngs, (D, E), (None, None), std=1.0, keep_precision=True)
        self.scale = param(rngs, (1,), (None,), constant=5.0, keep_precision=True)

    def _logits(self, x_TH: jax.Array) -> jax.Array:
        token_TD = unit(x_TH @ self.project[...], axis=-1)
        expert_DE = unit(self.weight[...], axis=0)
        return self.scale[...] * (token_TD @ expert_DE)


def unit(x: jax.Array, axis: int) -> jax.Array:
    """`x` scaled to length 1 along `axis`; zero stays zero and has a finite gradient."""
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis, keepdims=True) + 1e-12)
