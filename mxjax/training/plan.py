"""What a step will need, before it runs: memory, collectives and FLOPs of the compiled step.

Nothing is created or read: the step is compiled for shapes alone, for the devices at hand or for a
`Target`, or not compiled at all: then all memory is from shapes, see `memory_plan.py`. One plan is
of one capacity bucket, the first, with which a run begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mxjax.config import ConfigError, Problem
from mxjax.config.schema import Config
from mxjax.kernels.attention import always_tiled, stand_in
from mxjax.moe.buckets import BucketChooser
from mxjax.remat.layers import offloads_activations
from mxjax.remat.sizes import parse_size
from mxjax.sharding.hlo_collectives import KINDS, Collective, collectives
from mxjax.sharding.rules import ParamInfo
from mxjax.training.flops import model_flops_per_token, parameter_counts
from mxjax.training.gradients import Objective
from mxjax.training.memory_plan import Advice, MemoryModel, StagePlan
from mxjax.training.memory_table import as_lines as memory_lines
from mxjax.training.pipeline_plan import PipelinePlan, as_lines, pipeline_plan
from mxjax.training.pipelined import PipelinedObjective, build_objective
from mxjax.training.programs import Programs, runs_stagewise
from mxjax.training.save_memory import Choice, save_memory
from mxjax.training.target import Target

PLAN_VERSION = 1
"""Raised when a key of the JSON changes its meaning or goes away."""


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """What the step is compiled for."""

    kind: str
    count: int
    axes: dict[str, int]
    """Size of each mesh axis, outermost first."""


@dataclass(frozen=True, kw_only=True)
class ParameterPlan:
    """Parameters of the whole model, over all devices."""

    total: int
    active: int
    """Those that one token uses: without the routed experts not chosen for it."""


@dataclass(frozen=True, kw_only=True)
class WorkPlan:
    """One optimizer step on all devices."""

    tokens: int
    model_flops: int
    """Forward and backward, without recompute and padding (see `flops`)."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device, the first: state is split evenly.

    `parameters` to `batch` are exact, from shapes and shardings. `total` is the compiler's. Weights
    for compute and gradients are computed from shapes too; they share the compiler's temporary
    buffers with everything else, and `activations_and_temporaries` is what they leave of these.
    """

    parameters: int
    """Master weights."""
    optimizer: int
    other_state: int
    """Step count, balancing bias of the routers."""
    batch: int
    weights_for_compute: int
    """Copies that compute reads: gathered, in the compute precision, or both. ZeRO-3: those outside
    of the layers and of the largest layer, as the others come and go."""
    gradients: int
    """Accumulators, with several microbatches; else as they are handed to the optimizer."""
    activations_and_temporaries: int
    total: int
    """Arguments, results that are not in the arguments' place, and temporary buffers."""
    device: int | None
    """What the process may use; None where the backend does not say (CPU)."""
    headroom: int | None
    """`device` without `total`; negative: does not fit."""
    host: int
    """In the host's memory, for this device: offloaded state and activations. A CPU's compiler
    does not tell it from the device's."""


@dataclass(frozen=True, kw_only=True)
class CollectivePlan:
    """All collectives of one kind along the same mesh axes, in one step, on one device."""

    axes: tuple[str, ...]
    kind: str
    count: int
    bytes: int
    """Sum of `Collective.payload_bytes`: whole values, gathered or before they are reduced."""
    sent_bytes: int
    """Sum of `Collective.sent_bytes`: what the device must send at least."""
    exact: bool
    """False: some are in a loop of unknown length, counted once, or in a branch. In a
    pipeline these are the cells of a tick, of which all are counted: an upper bound."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that `--plan` shows; its fields are the keys of the JSON."""

    version: int
    devices: DevicePlan
    target: str | None
    """Kind of device that is not here; None: planned for those at hand."""
    capacity_factor: float | None
    """Bucket that the plan is for, in multiples of perfect balance; None: holds any routing, or
    there are no experts."""
    compile_seconds: float | None
    """None: not compiled. Then there are no collectives, and `memory` is that of the fullest of
    `stages` without the reserve."""
    parameters: ParameterPlan
    step: WorkPlan
    memory: MemoryPlan
    collectives: tuple[CollectivePlan, ...]
    pipeline: PipelinePlan | None
    """None with one pipeline rank."""
    stages: tuple[StagePlan, ...]
    """Memory by pipeline rank and by tensor, from shapes."""
    advice: tuple[Advice, ...]
    """What to compute again next on the fullest rank, best first; only with a target."""

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return dataclasses.asdict(self)


def fitted(config: Config, mesh: Mesh | AbstractMesh, target: Target | None = None) -> Choice:
    """The configuration with what `remat.mode: save_memory` chooses for it.

    Raises:
      ConfigError: nothing fits, or there is no budget.
    """
    remat = config.remat
    if remat.mode == "manual":
        return Choice(config, ())
    device = target.memory if target else _device_memory(mesh)
    budget = device if remat.memory_budget is None else parse_size(remat.memory_budget)
    if budget is None:
        message = "is needed here: this device does not say how much memory it has"
        raise ConfigError([Problem("remat.memory_budget", None, message)])
    manual = dataclasses.replace(remat, mode="manual", memory_budget=None)
    config = dataclasses.replace(config, remat=manual)
    bucket = BucketChooser(config.moe.capacity_buckets).current
    with _attention_by_shapes(target):
        programs = Programs(config, mesh)
        model = memory_model(programs, bucket, programs.stagewise, device)
        programs.close()
        return save_memory(model, budget, lambda c: build_objective(c, mesh, bucket))


def make_plan(config: Config, mesh: Mesh | AbstractMesh, target: Target | None = None) -> Plan:
    """Describe the training step of the first bucket; compile it if the mesh has devices."""
    # Of `stagewise`, no program has all of its memory and collectives.
    pipeline = dataclasses.replace(config.pipeline, executor="one_program")
    programs = Programs(dataclasses.replace(config, pipeline=pipeline), mesh)
    bucket = BucketChooser(config.moe.capacity_buckets).current
    compiled, seconds = None, None
    if isinstance(mesh, Mesh):
        started = time.perf_counter()
        with stand_in() if target else contextlib.nullcontext():
            compiled = programs.step_program(bucket)
        seconds = time.perf_counter() - started
    programs.close()
    with _attention_by_shapes(target):
        return _plan_of(config, programs, bucket, target, compiled, seconds)


def _attention_by_shapes(target: Target | None) -> contextlib.AbstractContextManager[None]:
    """Of attention's kernels, what is traced has no operations that could be counted."""
    on_gpus = target is not None or jax.default_backend() == "gpu"
    return always_tiled() if on_gpus else contextlib.nullcontext()


def _plan_of(
    config: Config,
    programs: Programs,
    bucket: float,
    target: Target | None,
    compiled: Any,
    seconds: float | None,
) -> Plan:
    mesh = programs.mesh
    stagewise = runs_stagewise(config, mesh)
    counts, objective = parameter_counts(config.model, config.moe), programs.objective
    device = target.memory if target else _device_memory(mesh)
    model = memory_model(programs, bucket, stagewise, device)
    stages = model.stages()
    # Counted, not computed from the configuration: there may be modules of one's own.
    total = sum(part.num_parameters for part in objective.model.parts.values())
    staged = isinstance(objective, PipelinedObjective)
    training = config.training
    kind = target.device_kind if target else mesh.devices.flat[0].device_kind
    tokens = training.global_batch_size * training.seq_length
    flops = model_flops_per_token(config.model, config.moe, training.seq_length)
    return Plan(
        version=PLAN_VERSION,
        devices=DevicePlan(kind=kind, count=mesh.size, axes=dict(mesh.shape)),
        target=target.name if target else None,
        capacity_factor=bucket if config.moe.num_experts and math.isfinite(bucket) else None,
        compile_seconds=seconds,
        parameters=ParameterPlan(total=total, active=total - counts.total + counts.active),
        step=WorkPlan(tokens=tokens, model_flops=tokens * flops),
        memory=_memory(
            programs,
            # Of `stagewise` with offloading even the sum would be wrong.
            None if stagewise and offloads_activations(config) else compiled,
            max(stages, key=lambda stage: stage.total),
        ),
        collectives=_by_axes(collectives(compiled.as_text()), dict(mesh.shape)) if compiled else (),
        pipeline=pipeline_plan(config, objective, stagewise) if staged else None,
        stages=stages,
        advice=tuple(model.advice(target.ceilings)) if target else (),
    )


def memory_model(
    programs: Programs, bucket: float, stagewise: bool, device: int | None
) -> MemoryModel:
    """Memory from shapes, for this capacity bucket."""
    state = programs.abstract_state
    optimizer, host = _bytes(state.opt_state), _bytes(state.opt_state, on_host=True)
    return MemoryModel(
        build_objective(programs.config, programs.mesh, bucket),
        parameters=_bytes(state.params),
        optimizer=optimizer,
        optimizer_on_host=host,
        weights_for_compute=weights_for_compute(programs.objective, state.params),
        gradients=gradients_by_part(programs),
        stagewise=stagewise,
        device=device,
    )


def _device_memory(mesh: Mesh) -> int | None:
    """Of the smallest device, in whole KiB: all processes must choose alike."""
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in mesh.local_devices]
    least = min(limits) // 1024
    if jax.process_count() > 1:
        least = int(np.min(multihost_utils.process_allgather(np.int32(least))))
    return 1024 * least or None


def _memory(programs: Programs, compiled: Any, fullest: StagePlan) -> MemoryPlan:
    """By the compiler, or, where nothing was compiled, by the fullest rank's shapes."""
    state = programs.abstract_state
    total, host = fullest.total - fullest.reserve, fullest.host
    if compiled is not None:
        sizes = compiled.memory_analysis()
        total, host = (
            getattr(sizes, f"{where}argument_size_in_bytes")
            + getattr(sizes, f"{where}output_size_in_bytes")
            - getattr(sizes, f"{where}alias_size_in_bytes")
            + getattr(sizes, f"{where}temp_size_in_bytes")
            for where in ("", "host_")
        )
    parameters, optimizer = _bytes(state.params), _bytes(state.opt_state)
    other, batch = _bytes(state) - parameters - optimizer, _bytes(programs.abstract_batch())
    weights = weights_for_compute(programs.objective, state.params)
    gradients = fullest.gradients
    known = parameters + optimizer + other + batch + weights + gradients
    device = fullest.device
    return MemoryPlan(
        parameters=parameters,
        optimizer=optimizer,
        other_state=other,
        batch=batch,
        weights_for_compute=weights,
        gradients=gradients,
        activations_and_temporaries=max(0, total - known),
        total=total,
        device=device,
        headroom=None if device is None else device - total,
        host=host,
    )


def weights_for_compute(objective: Objective, params: Any) -> int:
    """Bytes of the weights that one device computes with and that are not master weights.

    `params`: abstract master weights.
    """
    gathers_layers = objective.config.parallel.zero_stage == 3
    total, largest_layer = 0, 0
    for name, part in objective.model.parts.items():
        size, zero = 0, objective.zero[name]
        for info, master in zip(
            jax.tree.leaves(part.infos), jax.tree.leaves(params[name]), strict=True
        ):
            plan, spec = zero.leaf(info), zero.compute.spec(info.axes)
            moved = any(objective.mesh.shape[axis] > 1 for axis in plan.gather_axes)
            cast = plan.compute_dtype != master.dtype
            if moved or cast:
                size += _shard_bytes(objective.mesh, info.shape, plan.compute_dtype, spec)
            if moved and cast and not gathers_layers:  # a copy of the shard stays from step to step
                spec = zero.stored.spec(info.axes)
                size += _shard_bytes(objective.mesh, info.shape, plan.compute_dtype, spec)
        if gathers_layers and part.num_layers is not None:
            layers = jax.tree.leaves(part.infos)[0].shape[0] // objective.mesh.shape["pp"]
            largest_layer = max(largest_layer, size // layers)
        else:
            total += size
    return total + largest_layer


def gradients_by_part(programs: Programs) -> dict[str, int]:
    """Bytes of one device's gradients, see `MemoryPlan.gradients`, by part of the model."""
    objective, state = programs.objective, programs.abstract_state
    training, stage = objective.config.training, objective.config.parallel.zero_stage
    pipelined = isinstance(objective, PipelinedObjective)
    parts = objective.model.parts
    if training.num_microbatches > 1 or pipelined:

        def spec(name: str, info: ParamInfo) -> PartitionSpec:
            # Pipeline stages sum up those of embedding and head whole.
            whole = stage < 2 or (pipelined and name not in objective.stacks.groups)
            zero = objective.zero[name]
            return (zero.compute if whole else zero.stored).spec(info.axes)

        return {
            name: sum(
                _shard_bytes(objective.mesh, info.shape, jnp.float32, spec(name, info))
                for info in jax.tree.leaves(parts[name].infos)
            )
            for name in objective.zero
        }
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = programs.abstract_batch()
    gradients, _ = jax.eval_shape(
        objective.loss_and_gradients(), state.params, state.expert_bias, batch, key
    )
    return {
        name: sum(
            _shard_bytes(objective.mesh, leaf.shape, leaf.dtype, spec)
            for leaf, spec in zip(
                jax.tree.leaves(tree), jax.tree.leaves(objective.param_specs[name]), strict=True
            )
        )
        for name, tree in gradients.items()
    }


def _bytes(tree: Any, on_host: bool = False) -> int:
    """Of the part of these abstract arrays that lies on one device, or on the host for it."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if (leaf.sharding.memory_kind == "pinned_host") == on_host
    )


def _shard_bytes(mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> int:
    return math.prod(NamedSharding(mesh, spec).shard_shape(shape)) * jnp.dtype(dtype).itemsize


def _by_axes(found: Iterable[Collective], mesh_shape: dict[str, int]) -> tuple[CollectivePlan, ...]:
    """Sums over collectives of the same kind and axes, in the order of the mesh's axes."""
    alike: dict[tuple[tuple[str, ...], str], list[Collective]] = {}
    for collective in found:
        alike.setdefault((collective.axes(mesh_shape), collective.kind), []).append(collective)
    names = list(mesh_shape)

    def order(key: tuple[tuple[str, ...], str]):
        axes, kind = key
        return [names.index(axis) for axis in axes], KINDS.index(kind)

    return tuple(
        CollectivePlan(
            axes=axes,
            kind=kind,
            count=sum(c.times for c in alike[axes, kind]),
            bytes=sum(c.times * c.payload_bytes for c in alike[axes, kind]),
            sent_bytes=sum(c.times * c.sent_bytes for c in alike[axes, kind]),
            exact=all(c.times_known for c in alike[axes, kind]),
        )
        for axes, kind in sorted(alike, key=order)
    )


# The table

CPU_NOTE = (
    "This is a CPU's program: bf16 values, if any, are sent as fp32, twice the bytes; activations\n"
    "are not those of a GPU. State, weights for compute and gradients are the same."
)


def as_table(plan: Plan) -> str:
    """The plan for people."""
    devices, memory = plan.devices, plan.memory
    axes = ", ".join(f"{axis} {size}" for axis, size in devices.axes.items())
    bucket = "holds any routing" if plan.capacity_factor is None else f"{plan.capacity_factor:g}"
    rows = [
        ("devices", f"{devices.count} x {devices.kind}: {axes}"),
        ("parameters", f"{_si(plan.parameters.total)}, {_si(plan.parameters.active)} per token"),
        ("one step", f"{plan.step.tokens:,} tokens, {_si(plan.step.model_flops)}FLOP"),
        (
            "compiled in",
            "not compiled" if plan.compile_seconds is None else f"{plan.compile_seconds:.1f} s",
        ),
    ]
    if plan.parameters.active < plan.parameters.total:
        rows.append(("capacity bucket", f"{bucket} (the first)"))
    lines = [f"{name:<16} {text}" for name, text in rows]
    lines += ["", "memory of one device"]
    for field in dataclasses.fields(memory):
        value = getattr(memory, field.name)
        shown = "unknown" if value is None else _binary(value)
        lines.append(f"  {field.name.replace('_', ' '):<28} {shown:>12}")
    if memory.headroom is not None and memory.headroom < 0:
        lines.append("  does not fit")
    lines += ["", *memory_lines(plan.stages, plan.advice)]
    if plan.collectives:
        lines += _collective_lines(plan)
    if plan.pipeline is not None:
        lines += ["", *as_lines(plan.pipeline)]
    if devices.kind == "cpu":
        lines += ["", CPU_NOTE]
    return "\n".join(lines)


def _collective_lines(plan: Plan) -> list[str]:
    columns = ("count", "payload", "sent")
    lines = ["", "collectives of one step, on one device"]
    lines.append(f"  {'axes':<16} {'kind':<18}" + "".join(f" {name:>12}" for name in columns))
    for c in plan.collectives:
        count = f"{c.count:,}"
        if not c.exact:  # a rank has no cell in some ticks, and never all kinds of cells in one
            count += " or more" if plan.pipeline is None else " at most"
        lines.append(
            f"  {'+'.join(c.axes):<16} {c.kind:<18} {count:>12} {_binary(c.bytes):>12}"
            f" {_binary(c.sent_bytes):>12}"
        )
    return lines


def _binary(size: int) -> str:
    unit = min(4, max(0, (abs(size).bit_length() - 1) // 10))
    name = ("B", "KiB", "MiB", "GiB", "TiB")[unit]
    return f"{size:,} B" if unit == 0 else f"{size / 1024**unit:,.2f} {name}"


def _si(value: int) -> str:
    """`7.24 G`: three digits or so and the prefix."""
    unit = min(6, (len(str(value)) - 1) // 3)
    return f"{value / 1000**unit:.3g} {' kMGTPE'[unit].strip()}"
