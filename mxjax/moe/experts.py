"""The experts of one rank as one batched matrix product over padded groups.

Shapes: R rows, K expert choices of a row, E experts (local), C places an expert has, H hidden,
F inner width (local).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mxjax.config.schema import ModelConfig, MoEConfig
from mxjax.kernels.activation import gelu, swiglu
from mxjax.kernels.permute import permute, plan_permute, unpermute
from mxjax.models.parts import param


class Experts(nnx.Module):
    """Equal MLPs without biases; weights [E, ...]."""

    def __init__(self, model: ModelConfig, moe: MoEConfig, rngs: nnx.Rngs):
        E, H = moe.num_experts, model.hidden_size
        F = moe.moe_ffn_hidden_size or model.ffn_hidden_size
        self.gated = model.activation == "swiglu"
        std = model.init_method_std
        self.up = param(
            rngs,
            (E, H, 2 if self.gated else 1, F),
            ("expert", "expert_hidden", "branch", "expert_ffn"),
            std=std,
        )
        self.down = param(
            rngs,
            (E, F, H),
            ("expert", "expert_ffn", "expert_hidden"),
            std=std / (2 * model.num_layers) ** 0.5,
        )

    def __call__(
        self, rows_RH: jax.Array, experts_RK: jax.Array, weights_RK: jax.Array, capacity: int
    ) -> tuple[jax.Array, jax.Array]:
        """Weighted sum of each row's local experts.

        Args:
          experts_RK: local expert of each choice, -1 where it is not on this rank.
          weights_RK: fp32.
          capacity: C; rows beyond it are left out, which the returned counts show.

        Returns:
          out_RH (partial over `tp` if the inner width is split), rows asked of each expert [E].
        """
        plan = plan_permute(experts_RK, self.up.shape[0], capacity)
        x_ECH = permute(rows_RH, plan)
        up = jnp.einsum("ech,ehgf->ecgf", x_ECH, self.up[...])
        act_ECF = swiglu(up[:, :, 0], up[:, :, 1]) if self.gated else gelu(up[:, :, 0])
        y_ECH = jnp.einsum("ecf,efh->ech", act_ECF, self.down[...])
        return unpermute(y_ECH, weights_RK, plan), plan.counts_G
