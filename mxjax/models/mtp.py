"""Multi-token prediction (DeepSeek-V3, 2024, section 2.2).

Module k = 1, 2, ... takes what the model knows at position i, after the final norm or from module
k - 1, and the embedding of token i + k, and predicts token i + k + 1 with the shared head. The
modules run one after the other and keep all of the causal chain; they are for training only.

Shapes: B batch, s sequence of the residual stream, H hidden, J = 2 H.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from mxjax.config.schema import ModelConfig
from mxjax.models.context import LayerContext
from mxjax.models.norm import Norm
from mxjax.models.parts import param
from mxjax.remat.names import named


class MTPModule(nnx.Module):
    """Norms, a projection 2 H -> H (Megatron's eh_proj), one transformer layer, a final norm."""

    def __init__(self, model: ModelConfig, layer: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs):
        H = model.hidden_size
        self.embedding_norm = Norm(model, rngs)
        self.hidden_norm = Norm(model, rngs)
        self.projection = param(rngs, (2 * H, H), ("joined", "hidden"), std=model.init_method_std)
        self.layer = layer(rngs)
        self.norm = Norm(model, rngs)

    def __call__(
        self,
        x_BsH: jax.Array,
        embedding_BsH: jax.Array,
        ctx: LayerContext,
        index: jax.Array,
        bias_E: jax.Array | None,
    ):
        """Normed hidden state, which head and next module take, and the layer's `LayerAux`."""
        normed = self.embedding_norm(embedding_BsH), self.hidden_norm(x_BsH)
        joined_BsJ = named(jnp.concatenate(normed, axis=-1), "mtp_joined")
        x_BsH = jnp.einsum("bsj,jh->bsh", joined_BsJ, self.projection[...])
        x_BsH, aux = self.layer(x_BsH, ctx, index, bias_E)
        return self.norm(named(x_BsH, "mtp_residual")), aux
