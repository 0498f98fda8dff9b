"""Grouped-query attention, split over `tp` by heads.

Shapes: B batch, S sequence, s sequence of the residual stream, H hidden, N query heads and G
key/value groups (local), D width of query and key heads, E of value heads (D where they are equal).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mxjax.config.schema import ModelConfig
from mxjax.kernels.rope import apply_rope, attention_scale
from mxjax.models.context import LayerContext
from mxjax.models.norm import RMSNorm
from mxjax.models.parts import param
from mxjax.remat.names import named
from mxjax.sharding import collectives, tensor_parallel
from mxjax.sharding.context_parallel import attend


class SelfAttention(nnx.Module):
    """What all kinds of causal self-attention share, from heads back to the residual stream.

    `head_dim` is the width of queries and keys. A subclass makes `self.out` by `_make_out`.
    """

    def __init__(self, model: ModelConfig, head_dim: int):
        self.scale = attention_scale(head_dim, model.rope_scaling)
        self.implementation = model.attention_implementation
        self.dropout = model.attention_dropout

    def _make_out(self, model: ModelConfig, value_head_dim: int, rngs: nnx.Rngs) -> nnx.Param:
        return param(
            rngs,
            (model.num_attention_heads, value_head_dim, model.hidden_size),
            ("heads", "head_dim", "hidden"),
            std=model.init_method_std / (2 * model.num_layers) ** 0.5,
        )

    def _mix(
        self,
        q_BSND: jax.Array,
        k_BSGD: jax.Array,
        v_BSGE: jax.Array,
        ctx: LayerContext,
        key: jax.Array | None,
    ) -> jax.Array:
        """Attention and the output matrix, [B, s, H]."""
        mixed_BSNE = attend(
            q_BSND,
            k_BSGD,
            v_BSGE,
            segment_ids_Bs=ctx.segment_ids_BS,
            scale=self.scale,
            dropout_rate=self.dropout,
            dropout_key=ctx.tensor_key(key),
            implementation=self.implementation,
            deterministic=ctx.deterministic,
            context_parallel=ctx.context_parallel,
        )
        partial_BSH = jnp.einsum("bsne,neh->bsh", mixed_BSNE, self.out[...])
        return tensor_parallel.leave(partial_BSH, ctx.sequence_parallel)


class Attention(SelfAttention):
    """Multi-head (G = N), grouped-query or multi-query (G = 1)."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        H, N, D = model.hidden_size, model.num_attention_heads, model.attention_head_dim
        super().__init__(model, D)
        G = model.attention_groups
        self.num_query_groups = G
        self.add_qkv_bias = model.add_qkv_bias
        self.add_out_bias = model.add_bias_linear
        std = model.init_method_std
        self.q = param(rngs, (H, N, D), ("hidden", "heads", "head_dim"), std=std)
        self.kv = param(rngs, (H, 2, G, D), ("hidden", "branch", "kv_heads", "head_dim"), std=std)
        self.out = self._make_out(model, D, rngs)
        if self.add_qkv_bias:
            self.q_bias = param(rngs, (N, D), ("heads", "head_dim"))
            self.kv_bias = param(rngs, (2, G, D), ("branch", "kv_heads", "head_dim"))
        self.qk_layernorm = model.qk_layernorm
        if self.qk_layernorm:
            self.q_norm = RMSNorm(D, "head_dim", model.norm_epsilon, rngs)
            self.k_norm = RMSNorm(D, "head_dim", model.norm_epsilon, rngs)
        if self.add_out_bias:
            self.out_bias = param(rngs, (H,), ("hidden",))

    def __call__(self, x_BsH: jax.Array, ctx: LayerContext, key: jax.Array | None) -> jax.Array:
        x_BSH = tensor_parallel.enter(x_BsH, ctx.sequence_parallel)
        q_BSND = jnp.einsum("bsh,hnd->bsnd", x_BSH, self.q[...])
        kv = jnp.einsum("bsh,hcgd->bscgd", x_BSH, self._local_groups(self.kv[...]))
        if self.add_qkv_bias:
            q_BSND += self.q_bias[...]
            kv += self._local_groups(self.kv_bias[...])
        k_BSGD, v_BSGD = kv[:, :, 0], kv[:, :, 1]
        if self.qk_layernorm:
            q_BSND = self.q_norm(named(q_BSND, "query_projection"))
            k_BSGD = self.k_norm(named(k_BSGD, "key_projection"))
        if ctx.rope is not None:
            q_BSND, k_BSGD = apply_rope(q_BSND, ctx.rope), apply_rope(k_BSGD, ctx.rope)
        q_BSND, k_BSGD = named(q_BSND, "query"), named(k_BSGD, "key")
        out_BsH = self._mix(q_BSND, k_BSGD, named(v_BSGD, "value"), ctx, key)
        return out_BsH + self.out_bias[...] if self.add_out_bias else out_BsH

    def _local_groups(self, kv: jax.Array) -> jax.Array:
        """With fewer groups than `tp` ranks, each rank holds all groups and uses one."""
        ranks = collectives.axis_size("tp")
        if ranks <= self.num_query_groups:
            return kv
        group = collectives.axis_index("tp") * self.num_query_groups // ranks
        return lax.dynamic_slice_in_dim(kv, group, 1, axis=kv.ndim - 2)
