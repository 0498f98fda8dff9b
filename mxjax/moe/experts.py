"""The experts of one rank, in one of two forms that compute the same.

`batched`: every expert has equally many places, one batched matrix product does all. `grouped`:
experts share one buffer of rows, in which each has as many as it needs, padded to whole tiles.

Routing weights scale the activation, before the second matrix product, which is linear. So their
gradient is a sum over the inner width, of values that the backward pass has in any case, and what
the experts made is neither kept nor made again for it (SonicMoE, Guo et al. 2025).

Shapes: R rows, K expert choices of a row, E experts (local), C places an expert has, P places of
all together, H hidden, F inner width (local).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mxjax.config.schema import ModelConfig, MoEConfig
from mxjax.kernels.batched_matmul import batched_matmul
from mxjax.kernels.gelu import gelu
from mxjax.kernels.grouped_matmul import chooses_kernels, grouped_matmul, row_tile
from mxjax.kernels.implementation import varying_alike
from mxjax.kernels.permute import (
    PermutePlan,
    permute,
    plan_permute,
    plan_row_groups,
    unpermute,
    weights_of_places,
)
from mxjax.kernels.row_groups import sufficient_rows
from mxjax.kernels.swiglu import swiglu
from mxjax.models.parts import param
from mxjax.remat.names import named


class Experts(nnx.Module):
    """Equal MLPs without biases; weights [E, ...]."""

    def __init__(self, model: ModelConfig, moe: MoEConfig, rngs: nnx.Rngs):
        E, H = moe.num_experts, model.hidden_size
        F = moe.moe_ffn_hidden_size or model.ffn_hidden_size
        self.gated = model.activation == "swiglu"
        self.expert_gemm = moe.expert_gemm
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
          capacity: rows that each of the `num_buffers` buffers holds; rows beyond it are left out,
            which the returned counts show.

        Returns:
          out_RH (partial over `tp` if the inner width is split), rows asked of each buffer.
        """
        run = self._grouped if self.grouped else self._batched
        out_RH, counts_E = run(rows_RH, experts_RK, weights_RK, capacity)
        return out_RH, jnp.sum(counts_E.reshape(self.num_buffers, -1), axis=1)

    @property
    def num_experts(self) -> int:
        """E, of this rank."""
        return self.up.shape[0]

    @property
    def grouped(self) -> bool:
        """Whether experts share one buffer."""
        if self.expert_gemm != "auto":
            return self.expert_gemm == "grouped"
        E, H, *widths = self.up.shape
        F, dtype = widths[-1], self.up[...].dtype
        sizes = (H, math.prod(widths)), (F, H)
        return all(chooses_kernels(dtype, E, *size) for size in sizes)

    @property
    def num_buffers(self) -> int:
        """Buffers that rows go to: one for all experts, or one for each."""
        return 1 if self.grouped else self.num_experts

    def _batched(self, rows_RH, experts_RK, weights_RK, capacity):
        plan = named(plan_permute(experts_RK, self.num_experts, capacity), "permute_plan")
        x_ECH = named(permute(rows_RH, plan), "expert_rows")
        up = named(self._branches(batched_matmul(x_ECH, self._up_weights())), "expert_up")
        act_ECF = named(self._weighted_activation(up, weights_RK, plan), "expert_act")
        y_ECH = batched_matmul(act_ECF, self.down[...])
        return unpermute(y_ECH, None, plan), plan.counts_G

    def _grouped(self, rows_RH, experts_RK, weights_RK, capacity):
        E, tile = self.num_experts, row_tile()
        places = sufficient_rows(capacity, E, tile)
        plan, groups = named(plan_row_groups(experts_RK, E, places, tile), "permute_plan")
        x_PH = named(permute(rows_RH, plan), "expert_rows")
        up = named(self._branches(grouped_matmul(x_PH, self._up_weights(), groups)), "expert_up")
        act_PF = named(self._weighted_activation(up, weights_RK, plan), "expert_act")
        y_PH = grouped_matmul(act_PF, self.down[...], groups)
        return unpermute(y_PH, None, plan), plan.counts_G

    def _up_weights(self) -> jax.Array:
        """Gate and up side by side, [E, H, 2 F]."""
        E, H, *widths = self.up.shape
        return self.up[...].reshape(E, H, math.prod(widths))

    def _branches(self, up: jax.Array) -> jax.Array:
        """Their products, [..., 2 F], apart: [..., 2, F]."""
        return up.reshape(*up.shape[:-1], *self.up.shape[2:])

    def _weighted_activation(self, up: jax.Array, weights_RK: jax.Array, plan: PermutePlan):
        activation, inputs = (swiglu, up) if self.gated else (gelu, up[..., 0, :])
        weights = weights_of_places(weights_RK, plan)
        return _weighted(activation, *varying_alike(activation(inputs), weights, inputs))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted(activation: Callable[..., jax.Array], act: jax.Array, weights: jax.Array, inputs):
    """Rows of act = activation(inputs), each times its weight. For the gradient of the weights
    `act` is made again of `inputs`, which its own gradient keeps: JAX would keep `act` too."""
    return (weights[..., None] * act).astype(act.dtype)


def _weighted_forward(activation, act, weights, inputs):
    return _weighted(activation, act, weights, inputs), (weights, inputs)


def _weighted_backward(activation, residuals, grad):
    weights, inputs = residuals
    # Plain JAX, which XLA fuses with the sum; behind a barrier, or XLA would keep the first `act`.
    act = activation(lax.optimization_barrier(inputs), implementation="xla")
    d_act = (weights[..., None] * grad).astype(grad.dtype)
    d_weights = jnp.sum(act.astype(jnp.float32) * grad, axis=-1)
    return d_act, d_weights, None


_weighted.defvjp(_weighted_forward, _weighted_backward)
