"""Vocabulary-parallel embedding and head (Megatron-LM): each `tp` rank holds a slice of the rows.

Shapes: B batch, S sequence, s sequence of the residual stream, H hidden, V vocabulary (local).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mxjax.config.schema import ModelConfig
from mxjax.kernels.dropout import dropout
from mxjax.kernels.embedding import lookup
from mxjax.kernels.linear_cross_entropy import Losses, linear_cross_entropy
from mxjax.models.context import LayerContext
from mxjax.models.norm import Norm
from mxjax.models.parts import param
from mxjax.sharding import collectives, tensor_parallel


class Embedding(nnx.Module):
    """Token (and, for GPT-2, position) embedding."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        H, std = model.hidden_size, model.init_method_std
        self.learned = model.position_embedding == "learned"
        self.dropout = model.hidden_dropout
        self.weight = param(rngs, (model.vocab_size, H), ("vocab", "hidden"), std=std)
        if self.learned:
            self.position = param(
                rngs, (model.max_position_embeddings, H), ("position", "hidden"), std=std
            )

    def __call__(self, tokens_BS: jax.Array, ctx: LayerContext, key: jax.Array | None) -> jax.Array:
        """Residual stream, [B, s, H]."""
        weight_VH = self.weight[...]
        local_BS = tokens_BS - collectives.axis_index("tp") * weight_VH.shape[0]
        partial_BSH = lookup(weight_VH, local_BS)
        x_BsH = tensor_parallel.leave(partial_BSH, ctx.sequence_parallel)
        if self.learned:
            positions_Bs = ctx.positions_BS
            if ctx.sequence_parallel:
                positions_Bs = collectives.shard(positions_Bs, "tp", dim=1)
            x_BsH += lookup(self.position[...], positions_Bs)
        return dropout(x_BsH, self.dropout, ctx.residual_key(key))


class Head(nnx.Module):
    """Final norm and vocabulary projection; tied models pass the embedding as its weight.

    `x` of its methods has been through `norm`, or through that of multi-token prediction.
    """

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        self.norm = Norm(model, rngs)
        self.tied = model.tie_embeddings
        if not self.tied:
            self.weight = param(
                rngs,
                (model.hidden_size, model.vocab_size),
                ("hidden", "vocab"),
                std=model.init_method_std,
            )

    def logits(
        self, x_BsH: jax.Array, embedding_VH: jax.Array, sequence_parallel: bool
    ) -> jax.Array:
        """This rank's part of the logits, [B, S, V], in the precision of x."""
        x_BSH = tensor_parallel.enter(x_BsH, sequence_parallel)
        if self.tied:
            return jnp.einsum("bsh,vh->bsv", x_BSH, embedding_VH)
        return jnp.einsum("bsh,hv->bsv", x_BSH, self.weight[...])

    def losses(
        self,
        x_BsH: jax.Array,
        targets_BS: jax.Array,
        embedding_VH: jax.Array,
        sequence_parallel: bool,
        z_loss_coeff: float = 0.0,
    ) -> Losses:
        """Sums over this rank's targets, equal on all `tp` ranks: `linear_cross_entropy`, of which
        only the first may be differentiated. Targets below zero do not count."""
        x_BSH = tensor_parallel.enter(x_BsH, sequence_parallel)
        weight = embedding_VH if self.tied else self.weight[...]
        return linear_cross_entropy(
            x_BSH.reshape(-1, x_BSH.shape[-1]),
            weight,
            targets_BS.reshape(-1),
            z_loss_coeff,
            self.tied,
        )

    def greedy(
        self, x_BsH: jax.Array, embedding_VH: jax.Array, sequence_parallel: bool
    ) -> jax.Array:
        """Most likely next token at each position, [B, S] int32; the lowest id wins a tie."""
        logits_BSV = self.logits(x_BsH, embedding_VH, sequence_parallel).astype(jnp.float32)
        V = logits_BSV.shape[-1]
        best_BS = jnp.max(logits_BSV, axis=-1)
        index_BS = jnp.argmax(logits_BSV, axis=-1) + collectives.axis_index("tp") * V
        top_BS = collectives.pmax(best_BS, "tp")
        never = jnp.iinfo(jnp.int32).min
        return -collectives.pmax(jnp.where(best_BS == top_BS, -index_BS, never), "tp")
