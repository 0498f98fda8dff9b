"""Normalisation layers."""

from __future__ import annotations

import jax
from flax import nnx

from mxjax.config.schema import ModelConfig
from mxjax.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from mxjax.models.parts import param


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the hidden dim."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        self.epsilon = model.norm_epsilon
        self.centred = model.norm == "layernorm"
        self.scale = param(rngs, (model.hidden_size,), ("hidden",), constant=1.0)
        if self.centred:
            self.bias = param(rngs, (model.hidden_size,), ("hidden",))

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.centred:
            return layer_norm(x, self.scale[...], self.bias[...], self.epsilon)
        return rms_norm(x, self.scale[...], self.epsilon)

    def after_addition(
        self, x: jax.Array, residual: jax.Array, name: str
    ) -> tuple[jax.Array, jax.Array]:
        """x + residual, under this checkpoint name, and its norm."""
        if self.centred:
            weights = self.scale[...], self.bias[...]
            return add_layer_norm(x, residual, *weights, self.epsilon, name=name)
        return add_rms_norm(x, residual, self.scale[...], self.epsilon, name=name)


class RMSNorm(nnx.Module):
    """RMSNorm over the last dim, of size `width` and logical name `axis`: heads and latents."""

    def __init__(self, width: int, axis: str, epsilon: float, rngs: nnx.Rngs):
        self.epsilon = epsilon
        self.scale = param(rngs, (width,), (axis,), constant=1.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...], self.epsilon)
