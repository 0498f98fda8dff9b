"""Adam's state in Megatron's ``torch_dist`` format.

Plain Adam and the distributed optimizer with ``fully_reshardable`` store it by parameter. With
``dp_reshardable``, the default of the distributed optimizer, there are only the flat buffers of
each rank (`flat`), without names, while the weights have no trace of the ranks any more. Which
parameter lies where follows from what megatron-core does:

* the order in which modules register parameters, `module_names.registration_order`. It depends on
  the module spec: Transformer Engine's linear modules have the norm before them as a parameter, and
  experts are modules of their own or grouped;
* the stages of the pipeline, chunk by chunk, which have consecutive parts of the model each. How
  many, the sizes of their buffers say.

The buffers hold the fp32 weights too. The spec is the one under which those of the first layers are
the weights of the model; all others are compared when they are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from mxjax.ckpt.mapping.matching import Place, places
from mxjax.ckpt.mapping.rules import Cut, Section, Theirs
from mxjax.ckpt.megatron.flat import slots
from mxjax.ckpt.megatron.legacy import Shards, whole
from mxjax.ckpt.megatron.module_names import Spelling, registration_order
from mxjax.ckpt.megatron.saved_adam import (
    MOMENTS,
    OptimizerStateError,
    SavedAdam,
    adam_count,
    rounds_to,
)
from mxjax.ckpt.torch_format.distributed import DistCheckpoint, DistTensor
from mxjax.ckpt.torch_format.values import LazyTensor, TensorLike

OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
"""What names of the optimizer's entries begin with."""

_FLAT = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)"
    r"\.gbuf_idx_(\d+)\.dtype_\(.+\)\.bucket_idx_(\d+)\.(\w+)"
)
_OF_GROUP = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)"
    r"\.(optimizer|per_bucket_numel_unpadded)/.+"
)
_KINDS = ("param", *MOMENTS)

_HEAD = "output_layer.weight"
_TOPS = ("embedding.", "decoder.layers.", "decoder.final_", "mtp.layers.", "output_layer.")

Buffer = list[dict[str, DistTensor]]
"""Buckets of a flat buffer; tensors by kind."""

Weight = Callable[[Place, Theirs], TensorLike]
"""Gives the whole weight of a use of a rule."""


class Spec(NamedTuple):
    """What module specs of Megatron differ in."""

    local: bool
    """Megatron's own modules, not Transformer Engine's."""
    grouped: bool
    """All experts of a rank are one module."""


@dataclass(frozen=True)
class Ranks:
    """Sizes of the axes of the run that saved the state."""

    tp: int
    pp: int
    vpp: int
    ep: int
    etp: int

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Ranks:
        """By Megatron's arguments."""
        tp = args.get("tensor_model_parallel_size") or 1
        return cls(
            tp,
            args.get("pipeline_model_parallel_size") or 1,
            args.get("virtual_pipeline_model_parallel_size") or 1,
            args.get("expert_model_parallel_size") or 1,
            args.get("expert_tensor_parallel_size") or tp,
        )


@dataclass(frozen=True)
class Parameter:
    """A parameter as a tensor parallel rank has it.

    Attributes:
      order: sorts the parameters of a chunk as they are registered.
      names: what it may be called in the table.
      expert: its number in the model.
    """

    order: tuple
    names: list[str]
    shape: tuple[int, ...]
    expert: int | None


Part = list[Parameter]
"""What always is on the same stage, such as a layer."""


class FlatAdam:
    """State in flat buffers, by the names of parameters.

    Raises:
      OptimizerStateError: the buffers do not hold the parameters of the model.
    """

    def __init__(
        self,
        checkpoint: DistCheckpoint,
        args: Mapping[str, Any],
        sections: Sequence[Section],
        weight: Weight,
    ) -> None:
        self._folder = checkpoint.folder
        self._ranks = Ranks.of(args)
        self._sections = [s for s in sections if s.part.startswith("params.")]
        self._num_experts = max(rule.experts or 0 for s in self._sections for rule in s.rules)
        self._weight = weight
        self._dense, self._experts = self._buffers(checkpoint)
        self._check(checkpoint)
        local = args.get("transformer_impl") == "local"
        grouped = bool(args.get("moe_grouped_gemm"))
        self._shards = self._confirmed(
            [Spec(a, b) for a in (local, not local) for b in (grouped, not grouped)]
        )
        entries = checkpoint.byte_entries.items()
        self._count = adam_count(
            [
                entry.load()
                for name, entry in entries
                if (found := _OF_GROUP.fullmatch(name)) and found[3] == "optimizer"
            ]
        )

    def saved(self) -> SavedAdam:
        """All of it."""
        names = {kind: self._shards[kind].keys() for kind in _KINDS}
        return SavedAdam(self._count, names, lambda *what: self._whole(self._shards, *what))

    def _whole(
        self, shards: Mapping[str, Shards], name: str, theirs: Theirs, kind: str
    ) -> TensorLike:
        ranks = self._ranks.etp if ".mlp.experts." in name else self._ranks.tp
        return whole(shards[kind][name], ranks, theirs, f"{self._folder}: {kind} of {name}")

    # -- what is stored ---------------------------------------------------------------------------

    def _buffers(
        self, checkpoint: DistCheckpoint
    ) -> tuple[dict[int, list[Buffer]], dict[int, list[Buffer]]]:
        """Buffers of the model and of experts that are apart, by group of ranks."""
        found: dict[tuple[int, ...], dict[str, DistTensor]] = {}
        for key, tensor in checkpoint.tensors.items():
            if match := _FLAT.fullmatch(key):
                place = tuple(int(number or 0) for number in match.groups()[:4])
                found.setdefault(place, {})[match[5]] = tensor
        chains: tuple[dict[int, list[Buffer]], ...] = ({}, {})
        for chain, group, buffer, bucket in sorted(found):
            tensors = found[chain, group, buffer, bucket]
            shapes = {tensors[kind].shape if kind in tensors else None for kind in _KINDS}
            if len(shapes) > 1 or chain >= len(chains):
                raise OptimizerStateError(
                    f"{self._folder}: bucket {bucket} of buffer {buffer}, group {group} and"
                    f" optimizer {chain} should have {', '.join(_KINDS)} of one size, and has"
                    f" { {kind: tensor.shape for kind, tensor in tensors.items()} }."
                )
            buffers = chains[chain].setdefault(group, [])
            if buffer == len(buffers):
                buffers.append([])
            if buffer != len(buffers) - 1 or bucket != len(buffers[buffer]):
                raise OptimizerStateError(
                    f"{self._folder}: of group {group} the buffer or bucket before number {bucket}"
                    f" of buffer {buffer} is missing."
                )
            buffers[buffer].append(tensors)
        return chains

    def _check(self, checkpoint: DistCheckpoint) -> None:
        ranks = self._ranks
        wanted = [(self._dense, ranks.tp * ranks.pp, "the model")]
        if self._experts:
            wanted.append((self._experts, ranks.etp * ranks.ep * ranks.pp, "experts"))
        for groups, number, what in wanted:
            if sorted(groups) != list(range(number)):
                raise OptimizerStateError(
                    f"{self._folder} has flat optimizer state of {len(groups)} groups of ranks for"
                    f" {what}; the parallel sizes in `args` make {number}."
                )
        if any(len(buffers) != ranks.vpp for buffers in self._dense.values()):
            raise OptimizerStateError(
                f"{self._folder}: a rank has another number of flat buffers than the {ranks.vpp}"
                " chunks of its pipeline stage: its parameters are of several dtypes (fp8), or a"
                " stage is empty."
            )
        for name, entry in checkpoint.byte_entries.items():
            match = _OF_GROUP.fullmatch(name)
            if match and match[3] != "optimizer":
                chain = self._experts if match[1] == "1" else self._dense
                stored = [_bucket_sizes(buffer) for buffer in chain.get(int(match[2]), [])]
                said = [sizes for by in entry.load()[0] for sizes in by.values()]
                if stored != said:
                    raise OptimizerStateError(
                        f"{self._folder}: buckets have {stored} elements, and {name} says {said}."
                    )

    # -- which parameter lies where ---------------------------------------------------------------

    def _confirmed(self, specs: Sequence[Spec]) -> dict[str, Shards]:
        """Slices of the buffers by kind, name and tensor parallel rank."""
        fits = False
        for spec in specs:
            if (found := self._laid_out(spec)) is not None:
                fits = True
                if self._holds_weights(found):
                    return found
        reason = (
            "whose fp32 weights are not those of the model"
            if fits
            else ("that the model's parameters do not fill, in whatever order")
        )
        raise OptimizerStateError(f"{self._folder} has flat optimizer state {reason}.")

    def _holds_weights(self, shards: Mapping[str, Shards]) -> bool:
        """Compares the first layer of each kind with its first expert."""
        for section in self._sections:
            for rule in section.rules:
                layer = section.layers[0] if section.layers else None
                place = Place(section, rule, layer, 0 if rule.experts else None)
                for theirs in rule.theirs:
                    master = self._whole(shards, place.names(theirs)[0], theirs, "param")
                    if not rounds_to(master.numpy(), self._weight(place, theirs).numpy()):
                        return False
        return True

    def _laid_out(self, spec: Spec) -> dict[str, Shards] | None:
        """None: the parameters do not fill the buffers."""
        ranks, rest = self._ranks, self._parts(spec)
        embedding = rest[0][0]
        found: dict[str, Shards] = {kind: {} for kind in _KINDS}
        expert_buffers = dict.fromkeys(range(ranks.pp), 0)
        for stage in range(ranks.pp * ranks.vpp):
            chunk, rank = divmod(stage, ranks.pp)
            sizes = _bucket_sizes(self._dense[rank * ranks.tp][chunk])
            taken = self._taken(rest, sizes, embedding if stage else None)
            if taken is None:
                return None
            number, members = taken
            rest = rest[number:]
            dense = [p for p in members if not self._is_apart(p)]
            for t in range(ranks.tp):
                buffer = self._dense[rank * ranks.tp + t][chunk]
                if not _add(found, t, dense, buffer):
                    return None
            if len(dense) == len(members):
                continue
            for e in range(ranks.ep):
                mine = [p for p in members if self._is_apart(p) and self._on_rank(p, e)]
                for t in range(ranks.etp):
                    group = self._experts[(rank * ranks.ep + e) * ranks.etp + t]
                    at = expert_buffers[rank]
                    if at >= len(group) or not _add(found, t, mine, group[at]):
                        return None
            expert_buffers[rank] += 1
        return None if rest else found

    def _taken(
        self, parts: list[Part], sizes: list[int], embedding: Parameter | None
    ) -> tuple[int, list[Parameter]] | None:
        """How many of the next parts fill a stage's buffer, and all parameters of the stage.

        Args:
          embedding: which the stage may have a copy of.
        """
        for copies in self._copies(embedding) if embedding else [[]]:
            for number in range(1, len(parts) + 1):
                members = [*copies, *(p for part in parts[:number] for p in part)]
                members.sort(key=lambda parameter: parameter.order)
                dense = [prod(p.shape) for p in members if not self._is_apart(p)]
                if slots(dense, sizes) is not None:
                    return number, members
        return None

    def _copies(self, embedding: Parameter) -> Iterator[list[Parameter]]:
        """Later stages may have the embedding again: for multi-token prediction, and as head."""
        head = replace(embedding, order=registration_order(_HEAD))
        yield from ([], [embedding], [head], [embedding, head])

    def _is_apart(self, parameter: Parameter) -> bool:
        return bool(self._experts) and parameter.expert is not None

    def _on_rank(self, parameter: Parameter, rank: int) -> bool:
        return parameter.expert // (self._num_experts // self._ranks.ep) == rank

    def _parts(self, spec: Spec) -> list[Part]:
        """The model in the order of the pipeline."""
        found: dict[tuple[int, int], Part] = {}
        for place in places(self._sections):
            for theirs in place.rule.theirs:
                parameter = self._parameter(place, theirs, spec)
                top = next(i for i, top in enumerate(_TOPS) if parameter.names[0].startswith(top))
                found.setdefault((top, place.layer or 0), []).append(parameter)
        return [found[key] for key in sorted(found)]

    def _parameter(self, place: Place, theirs: Theirs, spec: Spec) -> Parameter:
        spelling = Spelling(spec.local, "mtp_model_layer")
        name = spelling.name(_Held(place, theirs), place.layer, place.expert)
        if place.expert is not None:
            head, _, tail = place.names(theirs)[0].partition(f".experts.{place.expert}.")
            one = f"local_experts.{place.expert}.{tail}"
            name = f"{head}.experts.{f'{tail}{place.expert}' if spec.grouped else one}"
        shape = list(self._weight(place, theirs).shape)
        ranks = self._ranks.etp if place.expert is not None else self._ranks.tp
        dim = 1 if theirs.cut is Cut.COLUMNS else 0
        if theirs.cut is not Cut.WHOLE and (theirs.cut is not Cut.WHOLE_OR_ROWS or spec.local):
            shape[dim] //= ranks
        return Parameter(registration_order(name), place.names(theirs), tuple(shape), place.expert)


class _Held(NamedTuple):
    """What `module_names.Spelling.name` asks for."""

    place: Place
    theirs: Theirs


def _bucket_sizes(buffer: Buffer) -> list[int]:
    return [prod(tensors["param"].shape) for tensors in buffer]


def _add(found: dict[str, Shards], rank: int, parameters: list[Parameter], buffer: Buffer) -> bool:
    """Adds a tensor parallel rank's parts of parameters; False: they do not fill its buffer."""
    where = slots([prod(p.shape) for p in parameters], _bucket_sizes(buffer))
    if where is None:
        return False
    for slot, parameter in zip(where, parameters, strict=True):
        for kind in _KINDS:
            part = _slice(buffer[slot.bucket][kind], slot.start, parameter.shape)
            for name in parameter.names:
                # An earlier stage may have the same embedding.
                found[kind].setdefault(name, {}).setdefault(rank, part)
    return True


def _slice(bucket: DistTensor, start: int, shape: tuple[int, ...]) -> LazyTensor:
    return LazyTensor(
        shape, bucket.dtype, lambda: bucket.read((start,), (prod(shape),)).reshape(shape)
    )
