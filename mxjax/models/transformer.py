"""Decoder-only transformer: embedding, groups of identical layers, head.

`layer(params, x, ctx, ...) -> (x, aux)` is all that the layer loop, and later the pipeline, knows
of a layer. Shapes: B batch, S sequence, s sequence of the residual stream, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from mxjax.config.schema import ModelConfig, MoEConfig
from mxjax.kernels.dropout import bias_dropout_add
from mxjax.kernels.rope import rope_amplitude, rope_frequencies, rope_table
from mxjax.models.attention import Attention
from mxjax.models.context import LayerContext
from mxjax.models.embedding import Embedding, Head
from mxjax.models.mla import LatentAttention
from mxjax.models.mlp import MLP
from mxjax.models.mtp import MTPModule
from mxjax.models.norm import Norm
from mxjax.models.parts import Params, Part, layer_of, layers_of, stack_layers
from mxjax.moe.layer import MoE
from mxjax.moe.router import RouterStatistics
from mxjax.remat.names import is_kept, named
from mxjax.remat.offload import Offloading, run_offloading
from mxjax.sharding import collectives
from mxjax.sharding.context_parallel import RING, ContextParallel

NO_LAYER = 1 << 20
"""Stands for a layer index in the random key of what is not a layer (the embedding)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEAux:
    """What an MoE layer reports besides its output."""

    router: RouterStatistics
    needed_capacity: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerAux:
    """What a layer reports besides its output."""

    finite: jax.Array
    """bool: every output value is finite. Only computed where someone reads it."""
    moe: MoEAux | None


class TransformerLayer(nnx.Module):
    """Pre-norm attention and MLP or MoE, each with a residual."""

    def __init__(self, model: ModelConfig, feed_forward: Callable[[nnx.Rngs], nnx.Module], rngs):
        self.hidden_dropout = model.hidden_dropout
        self.attention_norm = Norm(model, rngs)
        self.attention = (LatentAttention if model.mla else Attention)(model, rngs)
        self.mlp_norm = Norm(model, rngs)
        self.mlp = feed_forward(rngs)

    def __call__(
        self, x_BsH: jax.Array, ctx: LayerContext, index: jax.Array, bias_E: jax.Array | None
    ) -> tuple[jax.Array, LayerAux]:
        """`index`: the layer's place in the model. `bias_E`: balancing bias of an MoE layer."""
        key = None if ctx.key is None else jax.random.fold_in(ctx.key, index)
        attention_key, dropout_key, mlp_key = (
            (None,) * 3 if key is None else jax.random.split(key, 3)
        )
        x_BsH = named(x_BsH, "layer_input")
        normed = named(self.attention_norm(x_BsH), "attention_norm")
        mixed = self.attention(normed, ctx, attention_key)
        x_BsH, normed = self._add_and_norm(mixed, x_BsH, ctx.residual_key(dropout_key))
        normed = named(normed, "mlp_norm")
        moe_aux = None
        if bias_E is None:
            update = self.mlp(normed, ctx.sequence_parallel)
        else:
            update, statistics, needed = self.mlp(normed, ctx, bias_E)
            moe_aux = MoEAux(statistics, needed)
        x_BsH = bias_dropout_add(
            update, None, x_BsH, self.hidden_dropout, ctx.residual_key(mlp_key)
        )
        return x_BsH, LayerAux(finite=jnp.all(jnp.isfinite(x_BsH)), moe=moe_aux)

    def _add_and_norm(self, mixed_BsH, x_BsH, key) -> tuple[jax.Array, jax.Array]:
        """Residual stream after attention, and its norm."""
        name, rate = "attention_residual", self.hidden_dropout
        if rate == 0 or key is None:
            if is_kept("mlp_norm") or not is_kept(name):
                return self.mlp_norm.after_addition(mixed_BsH, x_BsH, name)
            # Apart, so that the norm is made again of the sum. A kernel for both would want what
            # it added once more, and that is the product after attention.
            x_BsH = named(mixed_BsH + x_BsH, name)
            return x_BsH, self.mlp_norm(x_BsH)
        x_BsH = named(bias_dropout_add(mixed_BsH, None, x_BsH, rate, key), name)
        return x_BsH, self.mlp_norm(x_BsH)


LayerFunction = Callable[..., tuple[jax.Array, LayerAux]]
LayerWrapper = Callable[[LayerFunction, dict, int], LayerFunction | Offloading]
"""(layer function, parameter infos of one layer, number of the layer in the model, those of
multi-token prediction last) -> layer function: ZeRO-3 gathering, remat."""


class Transformer:
    """The model as a set of parts and a pure forward pass; parameters are a nested dict.

    Parameter tree: `embedding`, `dense_layers` and / or `moe_layers` (stacked), `head`,
    `mtp_layers` (stacked) if there are modules for multi-token prediction.
    """

    def __init__(
        self,
        model: ModelConfig,
        moe: MoEConfig,
        *,
        expert_tensor_parallel: bool = True,
        sequence_parallel: bool = False,
        context_parallel: ContextParallel = RING,
        document_mask: bool = True,
        deterministic: bool = False,
        capacity_factor: float = float("inf"),
        places: Mapping[str, np.ndarray] | None = None,
    ):
        """`places`: see `Part`, for each layer group."""
        places = places or {}
        self.model = model
        self.moe = moe
        self.document_mask = document_mask
        self._sequence_parallel = sequence_parallel
        self._context_parallel = context_parallel
        self._deterministic = deterministic
        num_dense = model.num_layers if moe.num_experts == 0 else moe.first_k_dense
        self.num_moe_layers = model.num_layers - num_dense
        self.parts: dict[str, Part] = {"embedding": Part(lambda rngs: Embedding(model, rngs))}

        def dense(rngs):
            return MLP(model, model.ffn_hidden_size, model.add_bias_linear, rngs)

        def experts(rngs):
            return MoE(model, moe, expert_tensor_parallel, capacity_factor, rngs)

        def last_layer(rngs):
            return TransformerLayer(model, experts if self.num_moe_layers else dense, rngs)

        if num_dense:
            self.parts["dense_layers"] = Part(
                lambda rngs: TransformerLayer(model, dense, rngs),
                num_dense,
                places=places.get("dense_layers"),
            )
        if self.num_moe_layers:
            self.parts["moe_layers"] = Part(
                last_layer, self.num_moe_layers, places=places.get("moe_layers")
            )
        self.parts["head"] = Part(lambda rngs: Head(model, rngs))
        if model.mtp_num_layers:
            self.parts["mtp_layers"] = Part(
                lambda rngs: MTPModule(model, last_layer, rngs),
                model.mtp_num_layers,
                stack="modules",
            )

    @property
    def layer_groups(self) -> list[str]:
        """Names of the stacked groups of the model's layers, in the order in which they run."""
        return [name for name in ("dense_layers", "moe_layers") if name in self.parts]

    @property
    def num_routers(self) -> int:
        """MoE layers, those of multi-token prediction (which come last) included."""
        return self.num_moe_layers + (self.model.mtp_num_layers if self.num_moe_layers else 0)

    @property
    def infos(self) -> dict:
        """`ParamInfo` of every parameter, as a tree like the parameters."""
        return {name: part.infos for name, part in self.parts.items()}

    def init(self, key: jax.Array) -> Params:
        """Initial parameters, global shapes."""
        keys = jax.random.split(key, len(self.parts))
        return {
            name: part.init(part_key)
            for (name, part), part_key in zip(self.parts.items(), keys, strict=True)
        }

    def initial_expert_bias(self) -> jax.Array | None:
        """Balancing bias of every MoE layer, [L, E] fp32; None without experts."""
        if not self.num_routers:
            return None
        return jnp.zeros((self.num_routers, self.moe.num_experts), jnp.float32)

    def context(self, batch: dict[str, jax.Array], key: jax.Array | None) -> LayerContext:
        """Side inputs of one microbatch (arrays [B, S]) on this rank."""
        sequence_parallel = self._sequence_parallel and collectives.axis_size("tp") > 1
        model, rope = self.model, None
        if model.position_embedding == "rope":
            frequencies = rope_frequencies(model.rope_dim, model.rope_theta, model.rope_scaling)
            amplitude = rope_amplitude(model.rope_scaling)
            rope = rope_table(batch["positions"], frequencies, amplitude)
        valid = batch["segment_ids"] > 0
        has_dropout = model.hidden_dropout > 0 or model.attention_dropout > 0
        return LayerContext(
            positions_BS=batch["positions"],
            segment_ids_BS=batch["segment_ids"] if self.document_mask else None,
            valid_Bs=collectives.shard(valid, "tp", dim=1) if sequence_parallel else valid,
            rope=rope,
            key=key if has_dropout else None,
            sequence_parallel=sequence_parallel,
            context_parallel=self._context_parallel,
            deterministic=self._deterministic,
        )

    def hidden(
        self,
        params: Params,
        expert_bias_LE: jax.Array | None,
        tokens_BS: jax.Array,
        ctx: LayerContext,
        wrap: LayerWrapper,
        changes: Sequence[int] = (),
    ) -> tuple[jax.Array, dict[str, LayerAux]]:
        """Residual stream after the last layer, and each group's `aux` stacked over its layers.

        `changes`: numbers of layers from which on `wrap` does something else than before.
        """
        x = self.embed(params, tokens_BS, ctx)
        aux: dict[str, LayerAux] = {}
        first = 0
        for name in self.layer_groups:
            part = self.parts[name]
            bias = expert_bias_LE[: self.num_moe_layers] if name == "moe_layers" else None

            def layer(layer_params, x, ctx, index, bias_E, part=part):
                return part.bind(layer_params)(x, ctx, index, bias_E)

            last = first + part.num_layers
            starts = [first, *(layer for layer in changes if first < layer < last)]
            auxes = []
            for start, end in zip(starts, [*starts[1:], last], strict=True):
                run = wrap(layer, part.layer_infos, start)
                here = slice(start - first, end - first)
                weights, indices = layers_of(params[name], here), jnp.arange(start, end)
                bias_here = None if bias is None else bias[here]
                x, aux_here = run_layers(run, weights, x, ctx, indices, bias_here)
                auxes.append(aux_here)
            aux[name] = jax.tree.map(lambda *parts: jnp.concatenate(parts), *auxes)
            first = last
        return x, aux

    def embed(
        self, params: Params, tokens_BS: jax.Array, ctx: LayerContext, use: int = NO_LAYER
    ) -> jax.Array:
        """Residual stream of these tokens. `use` tells apart the dropout of several calls."""
        embedding = self.parts["embedding"].bind(params["embedding"])
        key = None if ctx.key is None else jax.random.fold_in(ctx.key, use)
        return embedding(tokens_BS, ctx, key)

    def ahead(
        self,
        params: Params,
        expert_bias_LE: jax.Array | None,
        x_BsH: jax.Array,
        tokens: list[jax.Array],
        ctx: LayerContext,
        wrap: LayerWrapper,
    ) -> tuple[list[jax.Array], LayerAux]:
        """Multi-token prediction.

        Args:
          x_BsH: output of the last layer, after the final norm.
          tokens: for module k = 1, 2, ... the token k places ahead of each position, [B, S].

        Returns:
          What the head makes each module's predictions of, and their `aux` stacked.
        """
        part, layers = self.parts["mtp_layers"], params["mtp_layers"]

        def module(module_params, *inputs):
            return part.bind(module_params)(*inputs)

        outputs, auxes = [], []
        for k, tokens_BS in enumerate(tokens):
            weights = layers[k] if isinstance(layers, list) else layer_of(layers, k)
            bias_E = expert_bias_LE[self.num_moe_layers + k] if self.num_moe_layers else None
            embedded = self.embed(params, tokens_BS, ctx, NO_LAYER + 1 + k)
            index = self.model.num_layers + k
            run = wrap(module, part.layer_infos, index)
            x_BsH, aux = run(weights, x_BsH, embedded, ctx, index, bias_E)
            outputs.append(x_BsH)
            auxes.append(aux)
        return outputs, stack_layers(auxes)


def run_layers(
    layer: LayerFunction | Offloading,
    params: Params | list[Params],
    x: jax.Array,
    ctx: LayerContext,
    indices_L: jax.Array,
    bias_LE: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Run a group of layers: stacked parameters in a scan, a list of parameters unrolled."""
    if isinstance(layer, Offloading):
        return run_offloading(layer, params, x, ctx, indices_L, bias_LE)
    if isinstance(params, list):
        auxes = []
        for i, layer_params in enumerate(params):
            bias_E = None if bias_LE is None else bias_LE[i]
            x, aux = layer(layer_params, x, ctx, indices_L[i], bias_E)
            auxes.append(aux)
        return x, stack_layers(auxes)

    def body(x, inputs):
        layer_params, index, bias_E = inputs
        return layer(layer_params, x, ctx, index, bias_E)

    return lax.scan(body, x, (params, indices_L, bias_LE))
