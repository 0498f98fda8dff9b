"""Megatron's ``torch_dist`` format: whole tensors, layers and experts stacked or by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.leaves import COMMON_ENTRY, common_values, plain
from mxjax.ckpt.mapping.rules import Theirs
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
        kinds = set()
        for key, tensor in self._checkpoint.tensors.items():
            if key.startswith(_OPTIMIZER):
                kinds.add(key.removeprefix(_OPTIMIZER).partition(".")[0])
            elif not key.startswith("optimizer.") and "._extra_state" not in key:
                for name, index in _singles(key, tensor):
                    self._places[name] = key, index
        self.names = set(self._places)
        self.moments = tuple(sorted(kinds))

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

    def tensor(self, name: str, theirs: Theirs, moment: str | None = None) -> TensorLike:
        """See `opened.MegatronModel`; tensors are whole here."""
        key, index = self._places[name]
        if moment is not None:
            key = f"{_OPTIMIZER}{moment}.{key}"
            if key not in self._checkpoint.tensors:
                raise CheckpointFormatError(f"{self.folder} has no {key}.")
        tensor = self._checkpoint.tensors[key]
        if not index:
            return tensor
        shape = tensor.shape[len(index) :]
        return LazyTensor(
            shape,
            tensor.dtype,
            lambda: tensor.read(
                (*index, *(0 for _ in shape)), (*(1 for _ in index), *shape)
            ).reshape(shape),
        )


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
