"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), split over `tp` by heads.

Keys and values of all heads are made from one narrow latent per token, queries directly (V2-Lite)
or from a latent of their own. Only a part of each query and key carries rotary positions; that
part of the key is one vector that all heads share. Training makes whole keys and values of the
latents and attends as usual.

Rotary pairs are (x[i], x[i + D/2]) as everywhere here. DeepSeek's and Megatron's checkpoints store
this part with pairs side by side: bring it to x[0], x[2], ..., x[1], x[3], ... when reading them.

Shapes: B batch, S sequence, s sequence of the residual stream, H hidden, L latent, N heads (local),
P width of a head without positions, R with rotary positions, D = P + R, E width of a value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mxjax.config.schema import ModelConfig
from mxjax.kernels.rope import apply_rope
from mxjax.models.attention import SelfAttention
from mxjax.models.context import LayerContext
from mxjax.models.norm import RMSNorm
from mxjax.models.parts import param
from mxjax.remat.names import named
from mxjax.sharding import tensor_parallel


class LatentAttention(SelfAttention):
    """Through latents.

    What makes latents is whole on every `tp` rank and works on the residual stream: with
    `sequence_parallel` each rank does so for its own tokens, and only latents are gathered.
    """

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        mla, H, N = model.mla, model.hidden_size, model.num_attention_heads
        P, R, D, E = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.qk_head_dim, mla.v_head_dim
        super().__init__(model, D)
        self.mla = mla
        std, epsilon = model.init_method_std, model.norm_epsilon
        if mla.q_lora_rank is None:
            self.q = param(rngs, (H, N, D), ("hidden", "heads", "head_dim"), std=std)
        else:
            L = mla.q_lora_rank
            self.q_down = param(rngs, (H, L), ("hidden", "latent_out"), std=std)
            self.q_norm = RMSNorm(L, "latent", epsilon, rngs)
            self.q_up = param(rngs, (L, N, D), ("latent", "heads", "head_dim"), std=std)
        L = mla.kv_lora_rank
        self.kv_down = param(rngs, (H, L + R), ("hidden", "latent_out"), std=std)
        self.kv_norm = RMSNorm(L, "latent", epsilon, rngs)
        self.kv_up = param(rngs, (L, N, P + E), ("latent", "heads", "head_dim"), std=std)
        self.out = self._make_out(model, E, rngs)

    def __call__(self, x_BsH: jax.Array, ctx: LayerContext, key: jax.Array | None) -> jax.Array:
        q_BSND = named(self._queries(x_BsH, ctx), "mla_query")
        k_BSND, v_BSNE = self._keys_and_values(x_BsH, ctx)
        k_BSND, v_BSNE = named(k_BSND, "mla_key"), named(v_BSNE, "mla_value")
        return self._mix(q_BSND, k_BSND, v_BSNE, ctx, key)

    def _queries(self, x_BsH: jax.Array, ctx: LayerContext) -> jax.Array:
        """Queries of this rank's heads, [B, S, N, D]."""
        if self.mla.q_lora_rank is None:
            x_BSH = tensor_parallel.enter(x_BsH, ctx.sequence_parallel)
            q_BSND = jnp.einsum("bsh,hnd->bsnd", x_BSH, self.q[...])
        else:
            latent_BsL = jnp.einsum("bsh,hl->bsl", x_BsH, self.q_down[...])
            latent_BsL = self.q_norm(named(latent_BsL, "query_latent"))
            latent_BsL = named(latent_BsL, "query_latent_norm")
            latent_BSL = tensor_parallel.enter(latent_BsL, ctx.sequence_parallel)
            q_BSND = jnp.einsum("bsl,lnd->bsnd", latent_BSL, self.q_up[...])
        plain, rotary = jnp.split(q_BSND, [self.mla.qk_nope_head_dim], axis=-1)
        return jnp.concatenate([plain, apply_rope(rotary, ctx.rope)], axis=-1)

    def _keys_and_values(self, x_BsH: jax.Array, ctx: LayerContext) -> tuple[jax.Array, jax.Array]:
        """Keys [B, S, N, D] and values [B, S, N, E] of this rank's heads."""
        L, P, R = self.mla.kv_lora_rank, self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim
        down_BsX = jnp.einsum("bsh,hx->bsx", x_BsH, self.kv_down[...])
        down_BsX = named(down_BsX, "kv_latent")
        latent_BsL, rotary_BsR = jnp.split(down_BsX, [L], axis=-1)
        # One exchange for both.
        both_BsX = jnp.concatenate([self.kv_norm(latent_BsL), rotary_BsR], axis=-1)
        both_BsX = named(both_BsX, "kv_latent_norm")
        both_BSX = tensor_parallel.enter(both_BsX, ctx.sequence_parallel)
        latent_BSL, rotary_BSR = jnp.split(both_BSX, [L], axis=-1)
        kv = jnp.einsum("bsl,lnx->bsnx", latent_BSL, self.kv_up[...])
        k_BSNP, v_BSNE = jnp.split(kv, [P], axis=-1)
        rotary_BS1R = apply_rope(rotary_BSR[:, :, None], ctx.rope)
        shared = jnp.broadcast_to(rotary_BS1R, (*k_BSNP.shape[:-1], R))
        return jnp.concatenate([k_BSNP, shared], axis=-1), v_BSNE
