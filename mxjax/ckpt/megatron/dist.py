"""Megatron's ``torch_dist`` format: whole tensors, layers and experts stacked or by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.leaves import COMMON_ENTRY, common_values, plain
from mxjax.ckpt.mapping.matching import Place
from mxjax.ckpt.mapping.rules import Section, Theirs
from mxjax.ckpt.megatron.dist_adam import OPTIMIZER, FlatAdam
from mxjax.ckpt.megatron.saved_adam import MOMENTS, OptimizerStateError, SavedAdam, adam_count
from mxjax.ckpt.torch_format.distributed import DistCheckpoint, DistTensor
from mxjax.ckpt.torch_format.values import LazyTensor, Record, TensorLike

_OPTIMIZER = "optimizer.state."
_STACKED_LAYERS = re.compile(r"decoder\.layers\.(?!\d)")
_EXPERTS = ".mlp.experts.experts."


class DistributedModel:
    """A folder with ``.metadata``; see `opened.MegatronModel`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checkpoint = DistCheckpoint(folder)
        if missing := self._checkpoint.missing():
            raise CheckpointFormatError(f"{folder} is incomplete: {'; '.join(missing[:8])}.")
        self.common = self._read_common()
        args = self.common.get("args")
        if not isinstance(args, Record):
            raise CheckpointFormatError(f"{folder} has no `args`, Megatron's arguments.")
        self.args: dict[str, Any] = plain(args.fields)
        self._places: dict[str, tuple[str, tuple[int, ...]]] = {}
        for key, tensor in self._checkpoint.tensors.items():
            if not OPTIMIZER.match(key) and "._extra_state" not in key:
                for name, index in _singles(key, tensor):
                    self._places[name] = key, index
        self.names = set(self._places)

    def _read_common(self) -> dict[str, Any]:
        common = common_values(self._checkpoint, self.folder)
        if common is None:
            raise CheckpointFormatError(
                f"{self.folder} has neither common.pt nor the entry {COMMON_ENTRY}, so that"
                " Megatron's arguments are not known."
            )
        if not isinstance(common, dict):
            raise CheckpointFormatError(f"{self.folder}: its plain values are no dictionary.")
        return common

    def tensor(self, name: str, theirs: Theirs) -> TensorLike:
        """See `opened.MegatronModel`; tensors are whole here."""
        key, index = self._places[name]
        return _single(self._checkpoint.tensors[key], index)

    def optimizer_state(self, sections: Sequence[Section]) -> SavedAdam | None:
        """See `opened.MegatronModel`."""
        keys = [*self._checkpoint.tensors, *self._checkpoint.byte_entries]
        if any(key.startswith(_OPTIMIZER) for key in keys):
            return self._by_parameter()
        if not any(OPTIMIZER.match(key) for key in keys):
            return None
        if any(".param_state" in key for key in keys):
            raise OptimizerStateError(
                f"{self.folder} has the optimizer state of each rank as one object"
                " (dp_zero_gather_scatter), which is not read."
            )
        return FlatAdam(self._checkpoint, self.args, sections, self._weight).saved()

    def _weight(self, place: Place, theirs: Theirs) -> TensorLike:
        name = next(name for name in place.names(theirs) if name in self._places)
        return self.tensor(name, theirs)

    def _by_parameter(self) -> SavedAdam:
        """Each tensor of the state is shaped as the weight, with the same key."""
        keys: dict[str, set[str]] = {kind: set() for kind in MOMENTS}
        for key in self._checkpoint.tensors:
            kind, _, parameter = key.removeprefix(_OPTIMIZER).partition(".")
            if key.startswith(_OPTIMIZER):
                keys.setdefault(kind, set()).add(parameter)
        names = {
            kind: {name for name, (key, _) in self._places.items() if key in keys[kind]}
            for kind in keys
        }

        def tensor(name: str, theirs: Theirs, kind: str) -> TensorLike:
            key, index = self._places[name]
            return _single(self._checkpoint.tensors[f"{_OPTIMIZER}{kind}.{key}"], index)

        return SavedAdam(adam_count(self.common.get("optimizer")), names, tensor)


def _single(tensor: DistTensor, index: tuple[int, ...]) -> TensorLike:
    """What lies below an index of the first dims."""
    if not index:
        return tensor
    shape = tensor.shape[len(index) :]
    begin, size = (*index, *(0 for _ in shape)), (*(1 for _ in index), *shape)
    return LazyTensor(shape, tensor.dtype, lambda: tensor.read(begin, size).reshape(shape))


def _singles(key: str, tensor: DistTensor) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of the single layers and experts of a tensor, and where they are in it."""
    layers = range(tensor.shape[0]) if _STACKED_LAYERS.match(key) else (None,)
    dims = tensor.shape if layers == (None,) else tensor.shape[1:]
    stacked_experts = _EXPERTS in key and len(dims) == 3
    experts = range(dims[0]) if stacked_experts else (None,)
    for layer in layers:
        named = key if layer is None else f"decoder.layers.{layer}.{key[len('decoder.layers.') :]}"
        named = named.replace(_EXPERTS, ".mlp.experts.")
        head, middle, tail = named.partition(".mlp.experts.")
        for expert in experts:
            name = named if expert is None else f"{head}{middle}{expert}.{tail}"
            yield name, tuple(i for i in (layer, expert) if i is not None)
