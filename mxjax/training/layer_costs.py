"""F, B and W of a model's layers, measured on the devices that will run them.

`pipeline.costs: measured` does it when a run starts. The figures stay in a file of its folder, from
which a run that resumes takes them: another choice of cells or transfers adds in another order, and
a resumed run must be the uninterrupted one bit by bit.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mxjax.config import Config
from mxjax.pipeline.gradient_sums import add, zero_sums
from mxjax.pipeline.simulate import Costs
from mxjax.pipeline.split import LayerSplit, split_layer
from mxjax.sharding.context_parallel import sequence_order
from mxjax.training.gradients import BATCH_SPEC, Batch
from mxjax.training.pipelined import PipelinedObjective, Staged
from mxjax.training.programs import runs_stagewise
from mxjax.training.run_dir import clear_write_errors

_CALLS = 10
"""Sent off in a row, so that the host's work is hidden; the median of three such rows counts."""


def with_costs(config: Config, mesh: Mesh) -> Config:
    """`config` with numbers for `pipeline.costs: measured`: those that a run in its folder measured
    with the same settings and devices, else new ones. All processes get the same.

    Raises:
      RunDirError: the numbers cannot be written.
    """
    if config.parallel.pp == 1 or config.pipeline.costs != "measured":
        return config
    file = _file(config, mesh)
    known = _read(file) if jax.process_index() == 0 else np.zeros(4)
    times = multihost_utils.broadcast_one_to_all(known)
    if not times.any():
        capacity = min((*config.moe.capacity_buckets, float("inf")))
        objective = PipelinedObjective(config, mesh, capacity)
        costs = measure_costs(objective, runs_stagewise(config, mesh))
        found = [float(f"{time:.4g}") for time in (costs.F, costs.B, costs.W, costs.both)]
        times = multihost_utils.broadcast_one_to_all(np.asarray(found))
        if jax.process_index() == 0:
            _write(file, found)
    numbers = tuple(float(f"{time:.4g}") for time in times)
    return replace(config, pipeline=replace(config.pipeline, costs=numbers))


def _file(config: Config, mesh: Mesh) -> Path:
    """Where such numbers are kept, by what they depend on and somewhat more."""
    settings = (
        config.model, config.moe, config.parallel, config.remat, config.kernels, config.pipeline,
        config.data.document_mask, replace(config.training, num_steps=1),
        mesh.devices.flat[0].device_kind,
    )  # fmt: skip
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()
    return Path(config.run_dir) / f"layer_costs_{digest[:12]}.json"


def _read(file: Path) -> np.ndarray:
    """Zeros, if there are no such numbers."""
    try:
        times = np.asarray(json.loads(file.read_text()), float)
        Costs(*times)
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return np.zeros(4)
    return times if times.shape == (4,) and (times > 0).all() else np.zeros(4)


def _write(file: Path, times: list[float]) -> None:
    with clear_write_errors(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.with_suffix(".new")
        whole.write_text(json.dumps(times))
        whole.replace(file)


def measure_costs(objective: PipelinedObjective, stagewise: bool) -> Costs:
    """Milliseconds of a rank's layers, an even share of the model, for one microbatch.

    Weights and inputs are random; every rank runs the same layer. Layers of each kind are measured
    alone and count as often as there are. `stagewise`: as that executor runs them.
    """
    total = dict.fromkeys(("F", "B", "W", "BW"), 0.0)
    for kind, number in objective.stacks.kinds.items():
        for name, seconds in _measure_layer(objective, kind, stagewise).items():
            total[name] += 1e3 * seconds * number / objective.stacks.layout.num_ranks
    return Costs(**total)


def _measure_layer(objective: PipelinedObjective, kind: str, stagewise: bool) -> dict[str, float]:
    """Seconds of F, B, W and BW of one layer; the last two with the sum over microbatches."""
    layer = _Layer(objective, kind, stagewise)
    program = partial(_program, objective.mesh)
    batch = _batch(objective)
    bias_LE = objective.model.initial_expert_bias()
    key = jax.random.key_data(jax.random.key(0))
    given = batch, bias_LE, key
    weights, x = program(layer.example)(given)
    forward, backward = program(layer.forward), program(layer.backward)
    y, residuals = forward(given, weights, x)
    _, cut = backward(given, weights, residuals, y)
    sums = program(layer.zero_sums)
    late = partial(program(layer.late, donate=(2,)), given, weights)
    both = partial(program(layer.both, donate=(2,)), given, weights)
    return {
        "F": _seconds(partial(forward, given, weights, x)),
        "B": _seconds(partial(backward, given, weights, residuals, y)),
        "W": _seconds(_adding(late, sums(given, weights), residuals, cut)),
        "BW": _seconds(_adding(both, sums(given, weights), residuals, y)),
    }


def _adding(program: Callable, sums: Any, *rest: Any) -> Callable[[], Any]:
    """Calls of a program that gives up the sums and returns the new ones, last."""

    def call():
        nonlocal sums
        *others, sums = program(sums, *rest)
        return others, sums

    return call


@dataclass
class _Layer:
    """What is timed, on one device. `given` is (batch, bias of routers, key)."""

    objective: PipelinedObjective
    kind: str
    stagewise: bool
    split: LayerSplit | None = None

    def example(self, given) -> tuple[Any, jax.Array]:
        """Weights of a layer and its input."""
        like = jax.eval_shape(self.objective._layers_and_outer, _local_shards(self.objective))
        stack = like[0][self.objective.stacks.group(self.kind)]
        one = stack[0] if isinstance(stack, list) else jax.tree.map(_first, stack)
        stream = self._staged(given).stream()
        leaves, tree = jax.tree.flatten((one, stream))
        keys = jax.random.split(jax.random.key(1), len(leaves))
        values = [
            0.02 * jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, values)

    def forward(self, given, weights, x):
        side = self._side(given)
        layer = partial(self._staged(given).layer, self.kind)
        on_cpu = self.objective.mesh.devices.flat[0].platform == "cpu"
        in_fp32 = self.stagewise and not on_cpu
        self.split = split_layer(layer, weights, x, side, fp32_gradients=in_fp32)
        y, _, _, residuals = self.split.forward(weights, x, side)
        return y, residuals

    def backward(self, given, weights, residuals, dy):
        return self.split.backward(weights, self._side(given), residuals, dy)

    def late(self, given, weights, sums, residuals, cut):
        kept = self.split.kept_of(residuals)
        into = self._into(given, sums)
        grads = self.split.weight_gradients(weights, self._side(given), kept, cut, into)
        return (self._added(given, sums, grads),)

    def both(self, given, weights, sums, residuals, dy):
        into = self._into(given, sums)
        dx, grads = self.split.backward_both(weights, self._side(given), residuals, dy, into)
        return dx, self._added(given, sums, grads)

    def _into(self, given, sums) -> Any:
        return sums if self.stagewise and not self._staged(given).reduces else None

    def _added(self, given, sums, grads) -> Any:
        staged = self._staged(given)
        if self._into(given, sums) is not None:
            return grads
        return add(sums, staged.reduce(self.kind, grads))

    def zero_sums(self, given, weights):
        return zero_sums(jax.eval_shape(partial(self._staged(given).reduce, self.kind), weights))

    def _staged(self, given) -> Staged:
        batch, bias_LE, key = given
        return Staged(self.objective, bias_LE, batch, jax.random.wrap_key_data(key), None)

    def _side(self, given) -> Any:
        staged = self._staged(given)
        first = jnp.int32(staged.first_layer[staged.group(self.kind)])
        return staged.side(self.kind, staged.context(jnp.int32(0)), first)


def _program(mesh: Mesh, function: Callable, donate: tuple[int, ...] = ()) -> Callable:
    """`function` on each device; it may use the memory of the arguments `donate`.

    The first argument is what all know, as `call` says; all other arrays have a leading dim for
    devices, since nothing is known to be equal on several.
    """
    varying = PartitionSpec(mesh.axis_names)

    def shard(given, *arguments):
        results = function(given, *jax.tree.map(lambda a: a[0], arguments))
        return jax.tree.map(lambda a: a[None], results)

    def call(given, *arguments):
        specs = ((BATCH_SPEC, PartitionSpec(), PartitionSpec()), *[varying] * len(arguments))
        mapped = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=varying, check_vma=False)
        return mapped(given, *arguments)

    return jax.jit(call, donate_argnums=donate)


def _batch(objective: PipelinedObjective) -> Batch:
    """One microbatch of single documents, [1, sequences, tokens]."""
    training = objective.config.training
    rows = training.global_batch_size // training.num_microbatches
    shape = (1, rows, training.seq_length)
    order = sequence_order(training.seq_length, objective.config.parallel.cp)
    batch = {
        "tokens": np.zeros(shape, np.int32),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.asarray(order, np.int32), shape),
    }
    sharding = NamedSharding(objective.mesh, BATCH_SPEC)
    return {
        name: jax.make_array_from_callback(shape, sharding, lambda index, a=array: a[index])
        for name, array in batch.items()
    }


def _local_shards(objective: PipelinedObjective) -> Any:
    """Shapes of one device's part of all parameters, in the precision in which they are kept."""
    dtype = jnp.dtype(objective.config.training.param_dtype)

    def local(info, spec):
        shape = NamedSharding(objective.mesh, spec).shard_shape(info.shape)
        return jax.ShapeDtypeStruct(shape, dtype)

    return jax.tree.map(local, objective.model.infos, objective.param_specs)


def _first(stacked: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)


def _seconds(call: Callable[[], Any]) -> float:
    """Median time of a call."""
    jax.block_until_ready(call())
    rows = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(_CALLS):
            result = call()
        jax.block_until_ready(result)
        rows.append((time.perf_counter() - started) / _CALLS)
    return sorted(rows)[1]
