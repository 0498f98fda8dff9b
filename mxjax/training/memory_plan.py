"""Memory of each pipeline rank by what it is for, tensor by tensor, from shapes alone.

Nothing is compiled: state and buffers are counted from shardings, activations from traces of one
layer of each kind (`residual_plan.py`), times the layers and microbatches that the schedule holds
at once. What only the compiler knows (`temporary`) is an estimate. Works for any mesh.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import jax.numpy as jnp

from mxjax.config.schema import Config
from mxjax.kernels.linear_cross_entropy import LOGITS_BYTES
from mxjax.pipeline.configure import stagewise_schedule, training_table
from mxjax.pipeline.schedule import Cell, Kind
from mxjax.remat.cost import H200, Ceilings
from mxjax.remat.layers import KEEP_ALL, LayerPolicy, Place, places_of
from mxjax.remat.names import Group, groups_of, names_of
from mxjax.training.gradients import Objective
from mxjax.training.pipelined import PipelinedObjective
from mxjax.training.residual_plan import layer_residuals, layer_seconds, layer_split

RESERVE = 2 << 30
"""Bytes left for what no plan sees: the CUDA context, libraries, buffers of NCCL. An assumption."""

UNNAMED = "without a name"

Fate = Literal["saved", "recomputed", "offloaded"]


@dataclass(frozen=True, kw_only=True)
class NamePlan:
    """One tensor of all layers of a group on a pipeline rank, at the rank's peak."""

    group: str
    name: str
    fate: Fate
    bytes: int
    """Saved: on the device; offloaded: on the host; recomputed: what keeping it would take."""
    until_weights: bool = False
    """B makes it, and it waits for W: gradients, and what B computed again for W."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Bytes on one device of a pipeline rank."""

    stages: str
    """Stages of the rank and their layers."""
    parameters: int
    optimizer: int
    weights_for_compute: int
    gradients: int
    activations: int
    """Saved tensors of all microbatches that are held at once; of `names` those on the device."""
    exchange: int
    """Buffers of the experts' exchange, of one layer."""
    pipeline_buffers: int
    """Residual streams and their gradients between stages."""
    temporary: int
    """An estimate: what one layer's backward pass or the head works with."""
    reserve: int
    total: int
    device: int | None
    headroom: int | None
    host: int
    """Bytes of offloaded activations and optimizer state in the host's memory, of one device."""
    names: tuple[NamePlan, ...]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What computing one tensor of a group again would give on the fullest rank."""

    group: str
    name: str
    bytes: int
    seconds: float
    """Of a step, by a roofline."""


@dataclass(frozen=True)
class _Traced:
    """What traces of single layers have told, by group and policy."""

    layers: dict[tuple[Group, LayerPolicy], Counter[NamePlan]] = field(default_factory=dict)
    rings: dict[tuple[Group, LayerPolicy], dict[str, Counter]] = field(default_factory=dict)
    seconds: dict[tuple[Group, LayerPolicy], float] = field(default_factory=dict)
    sizes: dict[Group, dict[str, int]] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    """Of rings between stages, which policies do not change."""


class MemoryModel:
    """Bytes of one configuration on a mesh.

    Args:
      state_bytes: of master weights and of the optimizer's state on the device and on the host.
      weights_for_compute: as in `MemoryPlan`.
      gradients: likewise, by part of the model.
      device: bytes that the device has, None if not known.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        parameters: int,
        optimizer: int,
        optimizer_on_host: int,
        weights_for_compute: int,
        gradients: Mapping[str, int],
        stagewise: bool,
        device: int | None,
    ):
        self.objective, self.config = objective, objective.config
        self.parameters, self.optimizer = parameters, optimizer
        self.optimizer_on_host = optimizer_on_host
        self.weights_for_compute, self.gradients = weights_for_compute, gradients
        self.stagewise, self.device = stagewise, device
        self._traced = _Traced()

    def with_objective(self, objective: Objective) -> MemoryModel:
        """The same for other recompute policies of the same model on the same mesh; what has been
        traced is not traced again."""
        other = copy.copy(self)
        other.objective, other.config = objective, objective.config
        return other

    def stages(self) -> tuple[StagePlan, ...]:
        """One for each pipeline rank; one alone without a pipeline."""
        if isinstance(self.objective, PipelinedObjective):
            lines = self.objective.stacks.layout.describe().splitlines()
            held = self._held_in_pipeline()
            gradients, temporary = sum(self.gradients.values()), self._temporary
            return tuple(
                self._stage(line.partition(": ")[2], names, gradients, temporary)
                for line, names in zip(lines, held, strict=True)
            )
        return (self._stage("all layers", *self._alone()),)

    def _stage(
        self, stages: str, names: Counter[NamePlan], gradients: int, temporary: int
    ) -> StagePlan:
        rows = tuple(
            replace(key, bytes=size)
            for key, size in sorted(names.items(), key=lambda item: -item[1])
            if size
        )
        activations = sum(row.bytes for row in rows if row.fate == "saved")
        offloads = any(row.fate == "offloaded" for row in rows)
        temporary += self._in_flight if offloads else 0
        exchange, buffers = self._exchange, self._pipeline_buffers
        total = (
            self.parameters
            + self.optimizer
            + self.weights_for_compute
            + gradients
            + activations
            + exchange
            + buffers
            + temporary
            + RESERVE
        )
        return StagePlan(
            stages=stages,
            parameters=self.parameters,
            optimizer=self.optimizer,
            weights_for_compute=self.weights_for_compute,
            gradients=gradients,
            activations=activations,
            exchange=exchange,
            pipeline_buffers=buffers,
            temporary=temporary,
            reserve=RESERVE,
            total=total,
            device=self.device,
            headroom=None if self.device is None else self.device - total,
            host=self.optimizer_on_host + sum(r.bytes for r in rows if r.fate == "offloaded"),
            names=rows,
        )

    # Activations

    def _policies_alone(self, places: Sequence[Place]) -> list[LayerPolicy]:
        """Of each layer without a pipeline; one that has no equal beside it offloads nothing."""
        policies = [self.objective.layer_policies[place.layer] for place in places]
        kinds = [None, *zip([place.group for place in places], policies, strict=True), None]
        return [
            policy if kind in (before, after) or kind[0] == "mtp_layers" else policy.on_device
            for policy, before, kind, after in zip(
                policies, kinds, kinds[1:], kinds[2:], strict=False
            )
        ]

    def _alone(self) -> tuple[Counter[NamePlan], int, int]:
        """Tensors, gradients and temporaries without a pipeline, when they are most together.

        Layer by layer the backward pass gives up what was kept and makes gradients. Sums over
        microbatches and scanned stacks have their full size before.
        """
        training, places = self.config.training, places_of(self.config)
        layers = [
            (place.group, self._of_layer(place.group, policy))
            for place, policy in zip(places, self._policies_alone(places), strict=True)
        ]
        names: Counter[NamePlan] = Counter()
        for _, of_layer in layers:
            names.update(of_layer)
        growing = training.num_microbatches == 1 and not training.scan_layers
        number = Counter(place.group for place in places)
        made = sum(self.gradients.values())
        if growing:  # first those of the head, last those of the embedding
            later = number.keys() | (set() if self.config.model.tie_embeddings else {"embedding"})
            made -= sum(self.gradients[part] for part in later)
        moments = [(Counter(names), made, self._logits)]
        for group, of_layer in reversed(layers):
            made += self.gradients[group] // number[group] if growing else 0
            again = sum(size for key, size in of_layer.items() if key.fate == "recomputed")
            gradients = sum(self.bytes_by_name(group).values())
            moments.append((Counter(names), made, again + gradients))
            names.subtract(of_layer)

        def size(moment: tuple[Counter[NamePlan], int, int]) -> int:
            names, *others = moment
            return sum(others) + sum(n for key, n in names.items() if key.fate == "saved")

        return max(moments, key=size)

    def _held_in_pipeline(self) -> list[Counter[NamePlan]]:
        """For each rank, with the modules of multi-token prediction on the last stage's."""
        stacks, layout = self.objective.stacks, self.objective.stacks.layout
        held: list[Counter[NamePlan]] = [Counter() for _ in range(layout.num_ranks)]
        if self.stagewise:
            schedule, _ = stagewise_schedule(self.config, stacks)
            for names, cells in zip(held, schedule.cells, strict=True):
                self._add_peaks(names, cells)
        else:
            table = training_table(self.config, stacks)
            for names in held:
                self._add_rings(names, table.slots)
        last = layout.rank_of(layout.num_stages - 1)
        for place in places_of(self.config):
            if place.group == "mtp_layers":
                policy = self.objective.layer_policies[place.layer]
                held[last].update(self._of_layer(place.group, policy))
        return held

    def _add_rings(self, names: Counter[NamePlan], slots: Mapping[str, int]) -> None:
        """Executor one_program: rings that are equal on all ranks."""
        stacks = self.objective.stacks
        for k, kind in enumerate(stacks.kinds):
            layers = max(counts[k] for counts in stacks.stage_layers)
            for ring in ("residuals", "kept", "cut"):
                times = layers * slots.get(f"{ring}.{kind}", 0)
                self._add(names, kind, ring, times)

    def _add_peaks(self, names: Counter[NamePlan], cells: tuple[Cell, ...]) -> None:
        """Executor stagewise: what the rank's own order of cells holds when that is most, on the
        device and, at another time perhaps, on the host."""
        stacks = self.objective.stacks
        for fates in (("saved", "recomputed"), ("offloaded",)):
            at_peak = self._peak(cells, fates[0])
            for (stage, ring), times in at_peak.items():
                for kind, layers in zip(stacks.kinds, stacks.stage_layers[stage], strict=True):
                    found: Counter[NamePlan] = Counter()
                    self._add(found, kind, ring, layers * times)
                    names.update({key: n for key, n in found.items() if key.fate in fates})

    def _peak(self, cells: tuple[Cell, ...], fate: Fate) -> Counter[tuple[int, str]]:
        """How many microbatches of each stage's rings are there when their bytes are most."""
        held: Counter[tuple[int, str]] = Counter()
        most, at_peak = 0, Counter()
        for cell in cells:
            for op in cell:
                rings = {Kind.F: ("residuals", "kept"), Kind.B: ("cut",)}.get(op.kind, ())
                held.update((op.stage, ring) for ring in rings)
            size = sum(n * self._of_stage(stage, ring, fate) for (stage, ring), n in held.items())
            if size > most:
                most, at_peak = size, Counter(held)
            for op in cell:
                freed = {
                    Kind.B: ("residuals",),
                    Kind.W: ("kept", "cut"),
                    Kind.BW: ("residuals", "kept"),
                }.get(op.kind, ())
                held.subtract((op.stage, ring) for ring in freed)
        return at_peak

    def _of_stage(self, stage: int, ring: str, fate: Fate) -> int:
        stacks = self.objective.stacks
        counts = zip(stacks.kinds, stacks.stage_layers[stage], strict=True)
        return sum(
            n * size
            for kind, n in counts
            for key, size in self._ring(kind, ring).items()
            if key.fate == fate
        )

    def _add(self, names: Counter[NamePlan], kind: str, ring: str, times: int) -> None:
        for key, size in self._ring(kind, ring).items():
            names[key] += size * times
        if ring == "residuals":
            stacks = self.objective.stacks
            kept = {key.name for of in ("residuals", "kept") for key in self._ring(kind, of)}
            group = stacks.group(kind)
            for name, size in self.bytes_by_name(group).items():
                if name not in kept:
                    names[_key(group, name, "recomputed")] += size * times

    def _ring(self, kind: str, ring: str) -> Counter[NamePlan]:
        """What one layer puts into its rings, for one microbatch."""
        group = self.objective.stacks.group(kind)
        policy, known = self.objective.kind_policies[kind], self._traced.rings
        if (group, policy) not in known:
            known[group, policy] = self._split_rings(kind, group)
        return known[group, policy][ring]

    def _split_rings(self, kind: str, group: Group) -> dict[str, Counter[NamePlan]]:
        split = layer_split(self.objective, kind)
        rings: dict[str, Counter] = {name: Counter() for name in ("residuals", "kept", "cut")}
        of_values = ["kept" if wanted else "residuals" for wanted in split.for_weights]
        of_values += ["cut"] * len(split.cut)
        values = (*split.residuals, *split.cut)
        on_host = (*split.on_host, *[False] * len(split.cut))
        for value, name, ring, away in zip(values, split.names, of_values, on_host, strict=True):
            fate = "offloaded" if away else "saved"
            key = _key(group, name or UNNAMED, fate, until_weights=ring == "cut")
            rings[ring][key] += math.prod(value.shape) * value.dtype.itemsize
        return rings

    def _of_layer(self, group: Group, policy: LayerPolicy) -> Counter[NamePlan]:
        """What autodiff keeps of one layer, for one microbatch, and what it does not."""
        layers = self._traced.layers
        if (group, policy) not in layers:
            names: Counter[NamePlan] = Counter()
            for residual in layer_residuals(self.objective, group, policy):
                name = residual.name or UNNAMED
                if residual.argument is not None:
                    name = "layer_input"
                name = "attention_out" if name == "attention_log_sum_exp" else name
                fate = "offloaded" if residual.on_host else "saved"
                names[_key(group, name, fate)] += residual.num_bytes
            kept = {key.name for key in names}
            if policy != KEEP_ALL:
                for name, size in self.bytes_by_name(group).items():
                    if name not in kept:
                        names[_key(group, name, "recomputed")] += size
            layers[group, policy] = names
        return layers[group, policy]

    def bytes_by_name(self, group: Group) -> dict[str, int]:
        """What each name of one layer takes for one microbatch."""
        if group not in self._traced.sizes:
            sizes: Counter[str] = Counter()
            for residual in layer_residuals(self.objective, group, keep_names(self.config, group)):
                if residual.name is not None:
                    sizes[residual.name] += residual.num_bytes
            sizes["attention_out"] += sizes.pop("attention_log_sum_exp", 0)
            self._traced.sizes[group] = dict(sizes)
        return self._traced.sizes[group]

    # Buffers

    @property
    def _stream_bytes(self) -> int:
        training, parallel = self.config.training, self.config.parallel
        rows = training.global_batch_size // training.num_microbatches // parallel.dp // parallel.ep
        tokens = rows * training.seq_length // parallel.cp // parallel.sp
        if parallel.sequence_parallel:
            tokens //= parallel.tp
        return tokens * self.config.model.hidden_size * self._itemsize

    @property
    def _itemsize(self) -> int:
        return jnp.dtype(self.config.training.compute_dtype).itemsize

    @property
    def _pipeline_buffers(self) -> int:
        if not isinstance(self.objective, PipelinedObjective):
            return 0
        slots = self._traced.slots
        if not slots:
            slots |= training_table(self.config, self.objective.stacks).slots
        return sum(slots[ring] + 1 for ring in ("x", "g")) * self._stream_bytes

    @property
    def _exchange(self) -> int:
        """Rows sent to and received from other ranks' experts, and their results likewise."""
        parallel, moe = self.config.parallel, self.config.moe
        ranks = parallel.ep * (1 if parallel.expert_tensor_parallel else parallel.tp)
        if not moe.num_experts or ranks == 1:
            return 0
        group = next(g for g in groups_of(self.config) if "expert_rows" in names_of(self.config, g))
        width = self.config.model.hidden_size * self._itemsize
        # The weights of the received rows are kept in fp32, K to a row.
        rows = self.bytes_by_name(group).get("dispatched_rows", 0) // (4 * moe.router_topk)
        return 4 * rows * width

    @property
    def _temporary(self) -> int:
        """In a pipeline: the larger of a layer's backward pass (all its named tensors, and the
        gradient of the largest) and of the head (logits of a part of the tokens)."""
        of_layers = []
        for group in groups_of(self.config):
            sizes = self.bytes_by_name(group).values()
            of_layers.append(sum(sizes) + max(sizes))
        return max(*of_layers, self._logits)

    @property
    def _logits(self) -> int:
        model, parallel = self.config.model, self.config.parallel
        tokens = self._stream_bytes // model.hidden_size // self._itemsize
        tokens *= parallel.tp if parallel.sequence_parallel else 1
        return min(tokens * model.vocab_size // parallel.tp * self._itemsize, LOGITS_BYTES)

    @property
    def _in_flight(self) -> int:
        """What travels while a layer is computed: in a pipeline the next layer's; without, also a
        copy of it."""
        if isinstance(self.objective, PipelinedObjective):
            rings = [
                self._ring(kind, "residuals") + self._ring(kind, "kept")
                for kind in self.objective.stacks.kinds
            ]
        else:
            policies = self.objective.layer_policies
            rings = [self._of_layer(p.group, policies[p.layer]) for p in places_of(self.config)]
        copies = 1 if isinstance(self.objective, PipelinedObjective) else 2
        return copies * max(
            sum(size for key, size in ring.items() if key.fate == "offloaded") for ring in rings
        )

    # Advice

    def advice(self, ceilings: Ceilings = H200) -> list[Advice]:
        """For each tensor that the fullest rank saves: what computing it again gives, the most
        bytes for the least time first."""
        fullest = max(self.stages(), key=lambda stage: stage.total)
        found = []
        for row in fullest.names:
            if row.fate != "saved" or row.until_weights or row.name in (UNNAMED, "layer_input"):
                continue
            layers = self._layers_on_a_rank(row.group)
            policy = self._policy_of(row.group, row.name)
            seconds = self.seconds_of(row.group, policy, row.name, ceilings)
            seconds *= layers * self.config.training.num_microbatches
            found.append(Advice(group=row.group, name=row.name, bytes=row.bytes, seconds=seconds))
        return sorted(found, key=lambda a: a.seconds / max(1, a.bytes))

    def _layers_on_a_rank(self, group: Group) -> float:
        layers = sum(place.group == group for place in places_of(self.config))
        return layers / (1 if group == "mtp_layers" else self.config.parallel.pp)

    def _policy_of(self, group: Group, name: str) -> LayerPolicy:
        """Of the group's layers, the first policy that keeps this tensor, by names."""
        every = keep_names(self.config, group)
        for place in places_of(self.config):
            policy = self.objective.layer_policies[place.layer]
            if place.group == group and name in policy.save:
                return policy
        return every

    def seconds_of(self, group: Group, policy: LayerPolicy, name: str, ceilings: Ceilings) -> float:
        """Of computing this tensor of one layer again for one microbatch, where `policy` keeps
        it."""

        def whole(policy: LayerPolicy) -> float:
            known = self._traced.seconds
            if (group, policy) not in known:
                known[group, policy] = layer_seconds(self.objective, group, policy, ceilings)
            return known[group, policy]

        without = replace(policy, save=policy.save - {name})
        again = whole(without) - whole(policy)
        size = self._of_layer(group, policy)[_key(group, name, "saved")]
        # Work that XLA fuses into what reads it writes and reads its result all the same.
        return max(again, 2 * size / ceilings.memory)


def keep_names(config: Config, group: Group) -> LayerPolicy:
    """The policy that keeps every name."""
    return LayerPolicy("names", frozenset(names_of(config, group)) - {"layer_input"})


def _key(group: str, name: str, fate: Fate, until_weights: bool = False) -> NamePlan:
    """What bytes are counted by."""
    return NamePlan(group=group, name=name, fate=fate, bytes=0, until_weights=until_weights)
