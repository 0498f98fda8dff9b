"""What the layers of a configuration leave for their backward passes: names and bytes.

One layer is traced for shapes, as one device of the mesh sees it. Nothing is compiled or created,
whatever the size of model and mesh, which may be an `AbstractMesh`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.config.schema import KernelsConfig
from mxjax.kernels.implementation import selected
from mxjax.models.parts import layer_of
from mxjax.models.transformer import LayerAux
from mxjax.pipeline.split import LayerSplit, split_layer
from mxjax.remat.cost import Ceilings, seconds_of
from mxjax.remat.layers import LayerPolicy
from mxjax.remat.names import Group, names_of
from mxjax.remat.policy import rematerialise
from mxjax.remat.residuals import Residual, residuals_of
from mxjax.training.gradients import BATCH_SPEC, REPLICATED, Objective
from mxjax.training.pipelined import PipelinedObjective, Staged


def layer_residuals(
    objective: Objective, group: Group, policy: LayerPolicy, *, with_dropout: bool = True
) -> list[Residual]:
    """What autodiff keeps of one layer for one microbatch, on one device: what depends on the
    layer's input. Weights and what all layers share (rotary tables) are not in it."""

    def look(run, weights, streams):
        num_weights = len(jax.tree.leaves(weights))
        return [
            residual
            for residual in residuals_of(run, weights, *streams)
            if any(argument >= num_weights for argument in residual.depends_on)
        ]

    return _look_at_layer(objective, group, policy, look, with_dropout)


def layer_seconds(
    objective: Objective, group: Group, policy: LayerPolicy, ceilings: Ceilings
) -> float:
    """Forward and backward of one layer for one microbatch on one device, by `seconds_of`. Of plain
    JAX, whose operations can be counted; a kernel's cannot."""

    def look(run, weights, streams):
        def both(weights, *streams):
            with selected(KernelsConfig(implementation="xla")):
                results, pullback = jax.vjp(lambda *a: _floats(run(*a)), weights, *streams)
                return results, pullback(results)

        return seconds_of(jax.make_jaxpr(both)(weights, *streams).jaxpr, ceilings)

    return _look_at_layer(objective, group, policy, look, False)


def _look_at_layer(
    objective: Objective,
    group: Group,
    policy: LayerPolicy,
    look: Callable[..., Any],
    with_dropout: bool,
) -> Any:
    """`look(layer, weights, its other inputs)` with tracers of what one device has."""
    found: list[Any] = []

    def shard(params, bias_LE, batch, key):
        weights = _one_layer(objective, group, params)
        arrays = jax.tree.map(lambda a: a[0], batch)
        ctx = objective.model.context(arrays, key if with_dropout else None)
        config, part = objective.config, objective.model.parts[group]
        bias_E = bias_LE[0] if "expert_rows" in names_of(config, group) else None

        def layer(weights, *streams):
            if config.parallel.zero_stage == 3:
                weights = objective.zero[group].gather(weights, part.layer_infos)
            return part.bind(weights)(*streams, ctx, jnp.int32(0), bias_E)

        gathers = config.parallel.zero_stage == 3
        run = rematerialise(layer, policy, gathers_weights=gathers, in_scan=True)
        x = jnp.zeros(_stream(objective, arrays), jnp.dtype(config.training.compute_dtype))
        found.append(look(run, weights, [x, x] if group == "mtp_layers" else [x]))

    _trace(objective, shard)
    return found[0]


def _floats(results: tuple[jax.Array, LayerAux]) -> tuple[jax.Array, Any]:
    """What of a layer's results is differentiated."""
    y, aux = results
    router = None if aux.moe is None else aux.moe.router
    return y, router and (router.score_sums_BE, router.z_sum)


def layer_split(objective: PipelinedObjective, kind: str) -> LayerSplit:
    """The F, B and W of a kind of layer of a pipeline; its residuals are what rings hold."""
    found: list[LayerSplit] = []

    def look(params, bias_LE, batch, key):
        staged = Staged(objective, bias_LE, batch, key, None)
        group = staged.group(kind)
        weights = _one_layer(objective, group, params)
        first = jnp.int32(staged.first_layer[group])
        side = staged.side(kind, staged.context(jnp.int32(0)), first)
        x = jnp.zeros(staged.stream().shape, staged.stream().dtype)
        layer, offload = partial(staged.layer, kind), staged.offloaded(kind)
        found.append(split_layer(layer, weights, x, side, offload))

    _trace(objective, look)
    return found[0]


def _trace(objective: Objective, look: Callable[..., None]) -> None:
    """Calls `look(params, bias_LE, batch, key)` with tracers of what one device has."""
    training, model = objective.config.training, objective.model
    rows = training.global_batch_size // training.num_microbatches
    ids = jax.ShapeDtypeStruct((training.num_microbatches, rows, training.seq_length), jnp.int32)
    batch = dict.fromkeys(("tokens", "segment_ids", "positions"), ids)
    params = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(info.shape, jnp.dtype(training.param_dtype)), model.infos
    )
    bias = jax.eval_shape(model.initial_expert_bias)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def shard(*arguments):
        with selected(objective.kernels):
            look(*arguments)
        return jnp.zeros(())

    mapped = jax.shard_map(
        shard,
        mesh=objective.mesh,
        in_specs=(objective.param_specs, REPLICATED, BATCH_SPEC, REPLICATED),
        out_specs=REPLICATED,
        check_vma=False,
    )
    jax.eval_shape(mapped, params, bias, batch, key)


def _one_layer(objective: Objective, group: Group, params: Any) -> Any:
    """Weights of a layer as compute gets them: gathered, or, with ZeRO-3, this device's shards."""
    part, zero = objective.model.parts[group], objective.zero[group]
    weights = layer_of(params[group], 0)
    if objective.config.parallel.zero_stage == 3:
        return weights
    return zero.gather(weights, part.layer_infos)


def _stream(objective: Objective, arrays: dict[str, jax.Array]) -> tuple[int, int, int]:
    """Shape of the residual stream."""
    B, S = arrays["tokens"].shape
    parallel = objective.config.parallel
    if parallel.sequence_parallel:
        S //= parallel.tp
    return B, S, objective.config.model.hidden_size
