"""Loss and gradients of a model whose layers are spread over pipeline stages.

What `gradients.py` does in a loop over microbatches, the tick executor does here, stage by stage:
`Staged` shows it the same model in pieces. Embedding, head and multi-token prediction are computed
by the first and the last stage only, but with one program for all ranks each has room for them;
between steps ZeRO shards them over `pp` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from mxjax.config.schema import Config
from mxjax.kernels.implementation import with_kernels
from mxjax.models.parts import Params, unstack_layers
from mxjax.models.transformer import LayerAux
from mxjax.pipeline.configure import (
    costs,
    evaluation_table,
    stage_layout,
    stagewise_schedule,
    training_table,
)
from mxjax.pipeline.executor import Pipeline
from mxjax.pipeline.stacks import Stacks, in_order
from mxjax.pipeline.stagewise import Stagewise
from mxjax.remat.layers import layer_policies, places_of, runs
from mxjax.remat.policy import rematerialise, with_softmax
from mxjax.sharding import collectives
from mxjax.sharding.mesh import DATA_AXES
from mxjax.training.gradients import (
    BATCH_SPEC,
    REPLICATED,
    Batch,
    BatchStatistics,
    Objective,
)


def build_objective(config: Config, mesh: Mesh, capacity_factor: float = float("inf")) -> Objective:
    """The objective of a configuration, pipelined or not."""
    if config.parallel.pp == 1:
        return Objective(config, mesh, capacity_factor)
    return PipelinedObjective(config, mesh, capacity_factor)


def layer_stacks(config: Config) -> Stacks:
    """Where layers lie. Their kinds are the model's layer groups, or, if not all layers of a group
    have the same recompute policy, runs of those that have."""
    policies, places = layer_policies(config), places_of(config)
    kinds: dict[str, int] = {}
    group_of: dict[str, str] = {}
    for group in ("dense_layers", "moe_layers"):
        of_group = [p for p, place in zip(policies, places, strict=True) if place.group == group]
        found = runs(of_group)
        for number, layers in enumerate(found):
            kind = group if len(found) == 1 else f"{group}.{number}"
            kinds[kind], group_of[kind] = len(layers), group
    return Stacks(stage_layout(config), kinds, group_of)


class PipelinedObjective(Objective):
    """`Objective` over `parallel.pp` ranks."""

    def __init__(self, config: Config, mesh: Mesh, capacity_factor: float = float("inf")):
        self.stacks = layer_stacks(config)
        places = {group: self.stacks.places(group) for group in self.stacks.groups}
        super().__init__(
            config,
            mesh,
            capacity_factor,
            {group: found for group, found in places.items() if not in_order(found)},
        )
        ends = np.cumsum(list(self.stacks.kinds.values()))
        self.kind_policies = {
            kind: self.layer_policies[end - 1]
            for kind, end in zip(self.stacks.kinds, ends, strict=True)
        }

    def _loss_and_gradients(self, params, bias_LE, batch: Batch, key):
        num_targets = self._count_targets(batch)
        staged = Staged(self, bias_LE, batch, self._rank_key(key), num_targets)
        table = training_table(self.config, self.stacks)
        layers, outer = self._layers_and_outer(params)
        sums = Pipeline(staged, table, layers, outer).train()
        return self._finish(*sums, num_targets)

    def stagewise(
        self, compiler_options: Mapping[str, Any] | None = None
    ) -> Callable[..., tuple[Params, BatchStatistics]]:
        """As `loss_and_gradients`, in many programs that the host sends off: not for `jit`."""
        schedule, _ = stagewise_schedule(self.config, self.stacks)
        runner = Stagewise(
            self._staged_of,
            schedule,
            self.stacks,
            self.mesh,
            compiler_options or {},
            costs(self.config),
        )
        begin = runner.over_mesh(
            self._begin, (self.param_specs, REPLICATED, BATCH_SPEC, REPLICATED), None
        )
        finish = runner.over_mesh(self._finish, None, (self.param_specs, REPLICATED))

        def run(params, bias_LE, batch, key):
            inputs, layers, outer = begin(params, bias_LE, batch, key)
            sums = runner.train(inputs, layers, outer)
            return finish(*sums, inputs["num_targets"])

        return run

    def _begin(self, params, bias_LE, batch: Batch, key):
        """What the programs of a stagewise step share, on one device."""
        layers, outer = self._layers_and_outer(params)
        layers = {
            kind: tree if isinstance(tree, list) else unstack_layers(tree)
            for kind, tree in layers.items()
        }
        inputs = {
            "bias_LE": bias_LE,
            "batch": batch,
            "key": jax.random.key_data(self._rank_key(key)),
            "num_targets": self._count_targets(batch),
        }
        return inputs, layers, outer

    def _staged_of(self, inputs) -> Staged:
        key = jax.random.wrap_key_data(inputs["key"])
        return Staged(self, inputs["bias_LE"], inputs["batch"], key, inputs["num_targets"])

    def _finish(self, grads, d_outer, stats, num_targets):
        """Gradients and statistics of the whole mesh, of one device's sums over microbatches."""
        infos = self.model.infos
        d_outer = {n: self.zero[n].scatter_gradients(d, infos[n]) for n, d in d_outer.items()}
        grads = self._stack(grads)
        if self.config.parallel.zero_stage == 1:
            grads = self._scatter(grads)
        return self._sum(grads | d_outer), self._global(stats, num_targets)

    @staticmethod
    def _rank_key(key: jax.Array) -> jax.Array:
        return jax.random.fold_in(key, collectives.axis_index(DATA_AXES))

    def _evaluate(self, params, bias_LE, batch: Batch, key):
        num_targets = self._count_targets(batch)
        staged = Staged(self, bias_LE, batch, None, num_targets)
        table = evaluation_table(self.stacks, batch["tokens"].shape[0])
        stats, broken = Pipeline(staged, table, *self._layers_and_outer(params)).evaluate()
        broken = collectives.psum(broken, self.mesh.axis_names)
        return self._global(stats, num_targets), jax.tree.map(lambda b: b == 0, broken)

    def _global(self, stats: BatchStatistics, num_targets) -> BatchStatistics:
        # Each stage has counted its own layers.
        counts_LE = jax.tree.map(lambda counts: collectives.psum(counts, "pp"), stats.counts_LE)
        return super()._global(replace(stats, counts_LE=counts_LE), num_targets)

    def greedy(self, params: Params, bias_LE, arrays: dict[str, jax.Array]) -> jax.Array:
        return self._predict("greedy", params, bias_LE, arrays)

    def logits(self, params: Params, bias_LE, arrays: dict[str, jax.Array]) -> jax.Array:
        return self._predict("logits", params, bias_LE, arrays)

    def _predict(self, what: str, params: Params, bias_LE, arrays) -> jax.Array:
        batch = jax.tree.map(lambda a: a[None], arrays)
        staged = _Predicting(self, bias_LE, batch, None, None)
        staged.what = what
        layers, outer = self._layers_and_outer(params)
        staged.like = jax.eval_shape(staged.predict, outer, staged.stream(), jnp.int32(0))
        table = evaluation_table(self.stacks, 1)
        return collectives.psum(Pipeline(staged, table, layers, outer).evaluate(), "pp")

    def _layers_and_outer(self, params: Params) -> tuple[Params, Params]:
        """What the executor computes with. Only weights of layers can be gathered while it runs:
        others are needed by some ranks alone, which could not gather them over `pp`."""
        weights = self._weights(params)
        layers = {group: weights.pop(group) for group in self.stacks.groups}
        if self.config.parallel.zero_stage == 3:
            infos = self.model.infos
            weights = {name: self.zero[name].gather(params[name], infos[name]) for name in weights}
        else:
            weights = {name: self._stack({name: tree})[name] for name, tree in weights.items()}
        return layers, weights

    def _wrap(self, layer, infos, index: int, in_scan: bool | None = None):
        """Multi-token prediction: its weights are there already."""
        policy = self.layer_policies[index]
        in_scan = self.config.training.scan_layers if in_scan is None else in_scan
        return rematerialise(layer, policy, gathers_weights=False, in_scan=in_scan)


class Staged:
    """An `Objective` and a batch [M, B, S] as the executor's `StagedModel`."""

    def __init__(
        self, objective: PipelinedObjective, bias_LE, batch: Batch, key, num_targets
    ) -> None:
        """`key`: of this data rank; None: no dropout, and evaluation. `num_targets`: as of
        `Objective._count_targets`; None for predictions."""
        self.objective, self.model = objective, objective.model
        self.kernels = objective.kernels
        self.bias_LE, self.batch = bias_LE, batch
        self.num_microbatches = batch["tokens"].shape[0]
        self.num_targets, self.key = num_targets, key
        self.with_finite = key is None
        self.reduces = objective.config.parallel.zero_stage == 2
        num_dense = self.model.model.num_layers - self.model.num_moe_layers
        self.first_layer = {"dense_layers": 0, "moe_layers": num_dense}

    def group(self, kind: str) -> str:
        """The part of the model that layers of a kind belong to."""
        return self.objective.stacks.group(kind)

    def arrays(self, microbatch: jax.Array) -> dict[str, jax.Array]:
        """The batch's arrays of one microbatch."""
        return jax.tree.map(
            lambda a: lax.dynamic_index_in_dim(a, microbatch, keepdims=False), self.batch
        )

    def stream(self) -> jax.ShapeDtypeStruct:
        _, B, S = self.batch["tokens"].shape
        config = self.objective.config
        if config.parallel.sequence_parallel:
            S //= config.parallel.tp
        shape = (B, S, config.model.hidden_size)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(config.training.compute_dtype))

    def context(self, microbatch: jax.Array) -> Any:
        key = None if self.key is None else jax.random.fold_in(self.key, microbatch)
        return self.model.context(self.arrays(microbatch), key)

    def side(self, kind: str, ctx: Any, index: jax.Array) -> Any:
        bias_E = None
        if self.group(kind) == "moe_layers":
            row = index - self.first_layer["moe_layers"]
            bias_E = lax.dynamic_index_in_dim(self.bias_LE, row, keepdims=False)
        return ctx, index, bias_E

    @with_kernels
    def layer(self, kind: str, weights: Any, x: jax.Array, side: Any) -> tuple:
        objective, group = self.objective, self.group(kind)
        part = self.model.parts[group]

        def run(weights, x, ctx, index, bias_E):
            if objective.config.parallel.zero_stage == 3:
                weights = objective.zero[group].gather(weights, part.layer_infos)
            return part.bind(weights)(x, ctx, index, bias_E)

        # What is offloaded is moved between programs, not within one.
        policy = objective.kind_policies[kind].on_device
        run = rematerialise(run, policy, gathers_weights=False, in_scan=True)
        x, aux = run(weights, x, *side)
        router_loss, of_layer = self._of_routers({kind: _as_stack(aux)}, side[0])
        if self.with_finite:
            of_layer = (of_layer, aux.finite)
        return x, router_loss, of_layer

    def offloaded(self, kind: str) -> set[str]:
        return with_softmax(self.objective.kind_policies[kind].offload)

    def _of_routers(self, aux: dict[str, LayerAux], ctx: Any) -> tuple[jax.Array, _RouterReport]:
        loss, counts_LE, needed = self.objective._router(aux, ctx.sequence_parallel)
        loss = loss / self.num_microbatches
        return loss, _RouterReport(lax.stop_gradient(loss), counts_LE, needed)

    @with_kernels
    def embed(self, outer: Any, microbatch: jax.Array) -> jax.Array:
        arrays = self.arrays(microbatch)
        return self.model.embed(outer, arrays["tokens"], self.context(microbatch))

    @with_kernels
    def head(self, outer: Any, x: jax.Array, microbatch: jax.Array) -> tuple:
        arrays, ctx = self.arrays(microbatch), self.context(microbatch)
        losses, ahead = self.objective._head_losses(
            outer, self.bias_LE, x, arrays, ctx, self.num_targets
        )
        router_loss, of_routers = self._of_routers(ahead, ctx)
        finite = {name: group.finite for name, group in ahead.items()}
        return losses.objective + router_loss, (losses, of_routers, finite)

    def empty_statistics(self) -> Any:
        model = self.model
        zero = jnp.zeros(())
        routers = model.num_routers
        stats = BatchStatistics(
            loss=zero,
            router_loss=zero,
            z_loss=zero,
            num_targets=zero,
            counts_LE=jnp.zeros((routers, model.moe.num_experts)) if routers else None,
            needed_capacity=zero,
            mtp_loss=zero if model.model.mtp_num_layers else None,
        )
        if not self.with_finite:
            return stats
        groups = [name for name, part in model.parts.items() if part.num_layers is not None]
        return stats, {
            name: jnp.zeros((model.parts[name].num_layers,), jnp.int32) for name in groups
        }

    def add_layer(self, stats: Any, kind: str, index: jax.Array, objective, of_layer) -> Any:
        group = self.group(kind)
        row = index - self.first_layer[group]
        if not self.with_finite:
            return _with_routers(stats, row, of_layer)
        (stats, broken), (of_routers, finite) = stats, of_layer
        counts = broken[group].at[row].add(1 - finite.astype(jnp.int32))
        return _with_routers(stats, row, of_routers), broken | {group: counts}

    def add_head(self, stats: Any, microbatch: jax.Array, of_head) -> Any:
        losses, of_routers, finite = of_head
        stats, broken = stats if self.with_finite else (stats, {})
        stats = replace(
            stats,
            loss=stats.loss + losses.loss,
            z_loss=stats.z_loss + losses.z_loss,
            mtp_loss=jax.tree.map(jnp.add, stats.mtp_loss, losses.mtp_loss),
        )
        stats = _with_routers(stats, self.model.num_moe_layers, of_routers)
        if not self.with_finite:
            return stats
        return stats, broken | {
            name: broken[name] + (1 - flags.astype(jnp.int32)) for name, flags in finite.items()
        }

    def reduce(self, kind: str, grads: Any) -> Any:
        objective, group = self.objective, self.group(kind)
        if not self.reduces:
            return grads
        return objective.zero[group].scatter_gradients(grads, self.model.parts[group].layer_infos)


class _Predicting(Staged):
    """The same, with the head's predictions for the one microbatch as the only statistics."""

    what: str
    like: jax.ShapeDtypeStruct

    def layer(self, kind, weights, x, side):
        x, objective, _ = super().layer(kind, weights, x, side)
        return x, objective, None

    @with_kernels
    def predict(self, outer: Any, x: jax.Array, microbatch: jax.Array) -> jax.Array:
        """Likely tokens, or logits."""
        ctx = self.context(microbatch)
        head = self.model.parts["head"].bind(outer["head"])
        method = getattr(head, self.what)
        return method(head.norm(x), outer["embedding"]["weight"], ctx.sequence_parallel)

    def head(self, outer, x, microbatch):
        return jnp.zeros(()), self.predict(outer, x, microbatch)

    def empty_statistics(self):
        return jnp.zeros(self.like.shape, self.like.dtype)

    def add_layer(self, stats, kind, index, objective, of_layer):
        return stats

    def add_head(self, stats, microbatch, of_head):
        return of_head


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _RouterReport:
    """Of one layer, or of all modules of multi-token prediction."""

    loss: jax.Array
    counts_LE: jax.Array | None
    needed: jax.Array


def _with_routers(stats: BatchStatistics, row: Any, report: _RouterReport) -> BatchStatistics:
    """`stats` with a report of the routers from `row` on."""
    counts_LE = stats.counts_LE
    if report.counts_LE is not None:
        rows = lax.dynamic_slice_in_dim(counts_LE, row, report.counts_LE.shape[0])
        counts_LE = lax.dynamic_update_slice_in_dim(counts_LE, rows + report.counts_LE, row, 0)
    return replace(
        stats,
        router_loss=stats.router_loss + report.loss,
        counts_LE=counts_LE,
        needed_capacity=jnp.maximum(stats.needed_capacity, report.needed),
    )


def _as_stack(aux: LayerAux) -> LayerAux:
    """One layer's report as that of a stack of one."""
    return jax.tree.map(lambda a: a[None], aux)
