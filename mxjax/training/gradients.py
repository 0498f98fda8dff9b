"""Loss and gradients: the one fully manual `shard_map` of a training step.

Shapes: M microbatches, B sequences of a microbatch, S sequence, L MoE layers, E experts. Inside the
`shard_map` B and S are this rank's parts. `sharding/collectives.py` says how gradients are meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from mxjax.config.schema import Config
from mxjax.data.mtp import mtp_names
from mxjax.kernels.implementation import with_kernels
from mxjax.models.parts import Params, stack_layers, unstack_layers
from mxjax.models.transformer import LayerAux, Transformer
from mxjax.moe.balance import router_loss
from mxjax.pipeline.gradient_sums import add, zero_sums
from mxjax.remat.layers import layer_policies, runs
from mxjax.remat.offload import Offloading
from mxjax.remat.policy import rematerialise, with_softmax
from mxjax.sharding import collectives
from mxjax.sharding.context_parallel import ContextParallel
from mxjax.sharding.mesh import BATCH_AXES, DATA_AXES, SEQUENCE_AXES
from mxjax.sharding.rules import compute_rules, stored_rules
from mxjax.sharding.zero import ZeroPlan

Batch = dict[str, jax.Array]

BATCH_SPEC = PartitionSpec(None, BATCH_AXES, SEQUENCE_AXES)
"""Placement of batch arrays [M, B, S]."""

REPLICATED = PartitionSpec()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchStatistics:
    """What a pass over one global batch reports; every field is global and equal on all ranks."""

    loss: jax.Array
    """Mean negative log-likelihood per real target token, nats."""
    router_loss: jax.Array
    """What the routers' losses add to the objective."""
    z_loss: jax.Array
    """What the head's z-loss adds to the objective."""
    num_targets: jax.Array
    counts_LE: jax.Array | None
    """Tokens sent to each expert; None without experts."""
    needed_capacity: jax.Array
    """Least capacity factor with which no buffer overflows; 0: nothing can overflow."""
    mtp_loss: jax.Array | None = None
    """Mean over the modules of multi-token prediction of their negative log-likelihood per target;
    None without such modules."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadLosses:
    """This rank's shares of the losses of one microbatch that follow the last layer."""

    objective: jax.Array
    """What is differentiated."""
    loss: jax.Array
    z_loss: jax.Array
    mtp_loss: jax.Array | None


class Objective:
    """The model on a mesh: sharding of its parameters, its loss, its gradients."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        capacity_factor: float = float("inf"),
        places: Mapping[str, np.ndarray] | None = None,
    ):
        """`places`: of stacked layers, see `Part`."""
        training, parallel = config.training, config.parallel
        self.config = config
        self.mesh = mesh
        self.kernels = config.kernels
        self.layer_policies = layer_policies(config)
        self.model = Transformer(
            config.model,
            config.moe,
            expert_tensor_parallel=parallel.expert_tensor_parallel,
            sequence_parallel=parallel.sequence_parallel,
            context_parallel=ContextParallel(parallel.cp_method, parallel.cp_rotation),
            document_mask=config.data.document_mask,
            deterministic=training.deterministic,
            capacity_factor=capacity_factor,
            places=places,
        )
        layers, outer = (
            ZeroPlan(
                stored=stored_rules(parallel, config.model, of_layers=of_layers),
                compute=compute_rules(parallel, config.model),
                compute_dtype=jnp.dtype(training.compute_dtype),
                reduce_dtype=jnp.dtype(parallel.grad_reduce_dtype),
            )
            for of_layers in (True, False)
        )
        self.zero = {
            name: layers if name in self.model.layer_groups else outer for name in self.model.parts
        }
        self.param_specs = {
            name: jax.tree.map(lambda info, plan=plan: plan.stored.spec(info.axes), infos)
            for (name, infos), plan in zip(
                self.model.infos.items(), self.zero.values(), strict=True
            )
        }

    def loss_and_gradients(self) -> Callable[..., tuple[Params, BatchStatistics]]:
        """(params, expert_bias_LE, batch [M, B, S], key) -> gradients (placed and split like the
        parameters), statistics. To be called under `jit` with global arrays."""
        return self._shard(self._loss_and_gradients, (self.param_specs, REPLICATED))

    def copies(self, params: Params) -> Params:
        """Of the master weights in the dtype that layers compute with; None where that is theirs.

        With ZeRO-3 there are none: each rank casts its few shards as it gathers them, and their
        gradients come back in fp32.
        """

        def copy(plan, master, info):
            dtype = plan.leaf(info).compute_dtype
            if master.dtype == dtype or self.config.parallel.zero_stage == 3:
                return None
            return master.astype(dtype)

        infos = self.model.infos
        return {
            name: jax.tree.map(partial(copy, self.zero[name]), tree, infos[name])
            for name, tree in params.items()
        }

    def evaluate(self) -> Callable[..., tuple[BatchStatistics, dict[str, jax.Array]]]:
        """(params, expert_bias_LE, batch, key) -> statistics without dropout, and for each layer
        group a bool per layer: all its output is finite."""
        return self._shard(self._evaluate, (REPLICATED, REPLICATED))

    @with_kernels
    def greedy(self, params: Params, bias_LE, arrays: dict[str, jax.Array]) -> jax.Array:
        """Most likely next token at each position, [B, S]; to be called inside a `shard_map`."""
        head, inputs = self._head_inputs(params, bias_LE, arrays)
        return head.greedy(*inputs)

    @with_kernels
    def logits(self, params: Params, bias_LE, arrays: dict[str, jax.Array]) -> jax.Array:
        """Logits at each position, [B, S, V], V split over `tp`; as `greedy`."""
        head, inputs = self._head_inputs(params, bias_LE, arrays)
        return head.logits(*inputs)

    @with_kernels
    def _head_inputs(self, params: Params, bias_LE, arrays: dict[str, jax.Array]):
        weights = self._outer_weights(self._weights(params))
        ctx = self.model.context(arrays, key=None)
        x, _ = self._hidden(weights, bias_LE, arrays, ctx)
        head = self.model.parts["head"].bind(weights["head"])
        return head, (head.norm(x), weights["embedding"]["weight"], ctx.sequence_parallel)

    def _shard(self, function, out_specs):
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(self.param_specs, REPLICATED, BATCH_SPEC, REPLICATED),
            out_specs=out_specs,
            check_vma=False,
        )

    def _loss_and_gradients(self, params, bias_LE, batch: Batch, key):
        num_targets = self._count_targets(batch)
        num_microbatches = batch["tokens"].shape[0]
        weights = self._weights(params)
        rank_key = jax.random.fold_in(key, collectives.axis_index(DATA_AXES))

        def microbatch(index, arrays):
            share = partial(self._share, num_targets=num_targets, num_parts=num_microbatches)
            micro_key = jax.random.fold_in(rank_key, index)
            gradient = jax.grad(share, has_aux=True)
            grads, stats = gradient(weights, bias_LE, arrays, micro_key)
            if self.config.parallel.zero_stage == 2:
                grads = self._scatter(self._stack(grads))
            return grads, stats

        if num_microbatches == 1:
            grads, stats = microbatch(0, jax.tree.map(lambda a: a[0], batch))
        else:
            grads, stats = _accumulate(microbatch, batch, num_microbatches)
        grads = self._stack(grads)
        if self.config.parallel.zero_stage == 1:
            grads = self._scatter(grads)
        return self._sum(grads), self._global(stats, num_targets)

    def _evaluate(self, params, bias_LE, batch: Batch, key):
        num_targets = self._count_targets(batch)
        num_microbatches = batch["tokens"].shape[0]
        weights = self._weights(params)

        def microbatch(_, arrays):
            ctx = self.model.context(arrays, key=None)
            _, report = self._forward(weights, bias_LE, arrays, ctx, num_targets, num_microbatches)
            return None, report

        _, (stats, finite) = lax.scan(microbatch, None, batch)
        finite = jax.tree.map(lambda f: jnp.all(f, axis=0).astype(jnp.int32), finite)
        finite = collectives.psum(jax.tree.map(lambda f: 1 - f, finite), self.mesh.axis_names)
        stats = _merge_microbatches(stats)
        return self._global(stats, num_targets), jax.tree.map(lambda f: f == 0, finite)

    def _share(self, weights, bias_LE, arrays, key, *, num_targets, num_parts):
        ctx = self.model.context(arrays, key)
        objective, (stats, _) = self._forward(weights, bias_LE, arrays, ctx, num_targets, num_parts)
        return objective, stats

    @with_kernels
    def _forward(self, weights, bias_LE, arrays, ctx, num_targets, num_parts):
        """This rank's share of the objective of one microbatch, its statistics, finite flags."""
        weights = self._outer_weights(weights)
        x, aux = self._hidden(weights, bias_LE, arrays, ctx)
        head, ahead = self._head_losses(weights, bias_LE, x, arrays, ctx, num_targets)
        router, counts_LE, needed = self._router(aux | ahead, ctx.sequence_parallel)
        router_loss = router / num_parts
        stats = BatchStatistics(
            head.loss, router_loss, head.z_loss, num_targets[0], counts_LE, needed, head.mtp_loss
        )
        finite = {name: group.finite for name, group in (aux | ahead).items()}
        return head.objective + router_loss, (stats, finite)

    def _head_losses(
        self, weights, bias_LE, x, arrays, ctx, num_targets
    ) -> tuple[HeadLosses, dict[str, LayerAux]]:
        """This rank's shares of what follows the last layer, and the `aux` of multi-token
        prediction by the name of its part."""
        config = self.config
        head = self.model.parts["head"].bind(weights["head"])
        embedding_VH = weights["embedding"]["weight"]
        x = head.norm(x)
        z_loss_coeff = config.training.z_loss_coeff
        sums = head.losses(x, arrays["targets"], embedding_VH, ctx.sequence_parallel, z_loss_coeff)
        # The head's sums are equal on all tp ranks.
        copies = collectives.axis_size("tp")
        objective, loss, z_loss = (total / num_targets[0] / copies for total in sums)
        z_loss *= z_loss_coeff
        if not config.model.mtp_num_layers:
            return HeadLosses(objective, loss, z_loss, None), {}
        nll_K, aux = self._ahead(weights, bias_LE, x, head, arrays, ctx)
        mtp_loss = jnp.mean(nll_K / num_targets[1:]) / copies
        objective += config.model.mtp_loss_scaling_factor * mtp_loss
        return HeadLosses(objective, loss, z_loss, mtp_loss), {"mtp_layers": aux}

    def _ahead(self, weights, bias_LE, x, head, arrays, ctx) -> tuple[jax.Array, LayerAux]:
        """Sums over targets of each module of multi-token prediction, and the modules' `aux`."""
        token_names, target_names = mtp_names(self.config.model.mtp_num_layers)
        tokens = [arrays[name] for name in token_names]
        wrap = partial(self._wrap, in_scan=False)
        outputs, aux = self.model.ahead(weights, bias_LE, x, tokens, ctx, wrap)
        embedding_VH = weights["embedding"]["weight"]
        sums = [
            head.losses(x, arrays[name], embedding_VH, ctx.sequence_parallel)[0]
            for x, name in zip(outputs, target_names, strict=True)
        ]
        return jnp.stack(sums), aux

    def _router(self, aux: dict[str, LayerAux], sequence_parallel: bool):
        """This rank's share of the router losses, counts [L, E] or None, needed capacity."""
        with_experts = [group.moe for group in aux.values() if group.moe is not None]
        if not with_experts:
            return jnp.zeros(()), None, jnp.zeros(())
        moe_aux = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *with_experts)
        split_tp = ("tp",) if sequence_parallel else ()
        loss, counts_LE = router_loss(
            moe_aux.router, self.config.moe, DATA_AXES + split_tp, SEQUENCE_AXES + split_tp
        )
        copies = 1 if sequence_parallel else collectives.axis_size("tp")
        return loss / copies, counts_LE, jnp.max(moe_aux.needed_capacity)

    def _hidden(self, weights, bias_LE, arrays, ctx):
        changes = [layers.start for layers in runs(self.layer_policies)]
        return self.model.hidden(weights, bias_LE, arrays["tokens"], ctx, self._wrap, changes)

    def _wrap(self, layer, infos, index: int, in_scan: bool | None = None):
        """ZeRO-3 gathering and recompute around the layer of this number. `in_scan`: see
        `rematerialise`; None: as the model's layers."""
        gathers = self.config.parallel.zero_stage == 3
        if gathers:
            plain, zero = layer, self.zero[self.model.layer_groups[-1]]

            def layer(shards, *inputs):
                return plain(zero.gather(shards, infos), *inputs)

        policy = self.layer_policies[index]
        in_scan = self.config.training.scan_layers if in_scan is None else in_scan
        run = partial(rematerialise, layer, gathers_weights=gathers, in_scan=in_scan)
        if policy.offload and index < self.config.model.num_layers:
            return Offloading(run(policy.on_device), with_softmax(policy.offload))
        return run(policy)

    def _weights(self, params: Params) -> Params:
        """What the loss is differentiated by: stored shards (stage 3) or gathered weights; each
        layer by itself if the layer loop is unrolled."""
        weights = {}
        for name, part in self.model.parts.items():
            stacked = part.num_layers is not None and not self.config.training.scan_layers
            trees = unstack_layers(params[name]) if stacked else [params[name]]
            if self.config.parallel.zero_stage < 3:
                infos = part.layer_infos if stacked else part.infos
                trees = [self.zero[name].gather(tree, infos) for tree in trees]
            weights[name] = trees if stacked else trees[0]
        return weights

    def _outer_weights(self, weights: Params) -> Params:
        """Stage 3: gather what is outside of the layers (embedding, head), which gather theirs."""
        if self.config.parallel.zero_stage < 3:
            return weights
        parts = {name: part for name, part in self.model.parts.items() if part.num_layers is None}
        return weights | {
            name: self.zero[name].gather(weights[name], part.infos) for name, part in parts.items()
        }

    def _scatter(self, grads: Params) -> Params:
        """See `ZeroPlan.scatter_gradients`."""
        infos = self.model.infos
        return {n: self.zero[n].scatter_gradients(grad, infos[n]) for n, grad in grads.items()}

    def _sum(self, grads: Params) -> Params:
        """See `ZeroPlan.sum_gradients`."""
        infos = self.model.infos
        return {n: self.zero[n].sum_gradients(grad, infos[n]) for n, grad in grads.items()}

    def _stack(self, grads: Params) -> Params:
        """Gradients of unrolled layers, stacked as parameters are."""
        return {
            name: stack_layers(tree) if isinstance(tree, list) else tree
            for name, tree in grads.items()
        }

    def _count_targets(self, batch: Batch) -> jax.Array:
        """Real targets of the head and of each module of multi-token prediction, [1 + modules]."""
        names = ["targets", *mtp_names(self.config.model.mtp_num_layers)[1]]
        real = jnp.stack([jnp.sum((batch[name] >= 0).astype(jnp.float32)) for name in names])
        return jnp.maximum(collectives.psum(real, DATA_AXES), 1)

    def _global(self, stats: BatchStatistics, num_targets) -> BatchStatistics:
        axes = self.mesh.axis_names
        return BatchStatistics(
            loss=collectives.psum(stats.loss, axes),
            router_loss=collectives.psum(stats.router_loss, axes),
            z_loss=collectives.psum(stats.z_loss, axes),
            mtp_loss=jax.tree.map(lambda share: collectives.psum(share, axes), stats.mtp_loss),
            num_targets=num_targets[0],
            counts_LE=stats.counts_LE,
            needed_capacity=collectives.pmax(stats.needed_capacity, axes),
        )


def _accumulate(microbatch, batch: Batch, num_microbatches: int):
    """Sum gradients over microbatches in fp32, in a scan."""
    first = jax.tree.map(lambda a: a[0], batch)
    shapes, _ = jax.eval_shape(microbatch, 0, first)

    def body(total, inputs):
        index, arrays = inputs
        grads, stats = microbatch(index, arrays)
        return add(total, grads), stats

    grads, stats = lax.scan(body, zero_sums(shapes), (jnp.arange(num_microbatches), batch))
    return grads, _merge_microbatches(stats)


def _merge_microbatches(stats: BatchStatistics) -> BatchStatistics:
    """Leaves [M, ...] to one batch's statistics."""
    return BatchStatistics(
        loss=jnp.sum(stats.loss),
        router_loss=jnp.sum(stats.router_loss),
        z_loss=jnp.sum(stats.z_loss),
        mtp_loss=jax.tree.map(jnp.sum, stats.mtp_loss),
        num_targets=stats.num_targets[0],
        counts_LE=None if stats.counts_LE is None else jnp.sum(stats.counts_LE, axis=0),
        needed_capacity=jnp.max(stats.needed_capacity),
    )
