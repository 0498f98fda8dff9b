"""Writing Megatron's ``torch_dist`` format: whole tensors, whatever grid reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mxjax.ckpt.leaves import COMMON_ENTRY
from mxjax.ckpt.megatron.exported import FLOAT32, MOMENTS, Exported
from mxjax.ckpt.torch_format.archive_writer import save
from mxjax.ckpt.torch_format.distributed_writer import DistWriter
from mxjax.ckpt.torch_format.values import LazyTensor

CONTENT = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}
"""What Megatron wants to know of the layout of the content."""

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    # Read up to 0.18.
    "common_backend": "torch",
    "common_backend_version": 1,
}

_MASTER_WEIGHTS = ("param", "fp32_param")
"""fp32 weights by the name of the distributed optimizer, and of the plain one."""

_NO_EXTRA_STATE = ("embedding.", "output_layer.", ".router.")


@dataclass(frozen=True)
class _Entry:
    """Where a tensor stands in the format.

    Attributes:
      keys: its names; the first is that of the entry, the others mean the same.
      index: in the leading dims, of layer and expert.
      sizes: of the leading dims.
    """

    keys: tuple[str, ...]
    index: tuple[int, ...]
    sizes: tuple[int, ...]


def write_dist(
    folder: Path,
    tensors: Sequence[Exported],
    num_layers: int,
    common: dict[str, Any],
    dtype: np.dtype,
    optimizer: bool,
    bar: tqdm,
) -> None:
    """Writes one iteration.

    Every name is there that a module spec or an optimizer of Megatron may ask for: further names
    stand in the description only and cost no bytes. So is every ``_extra_state`` of a module;
    these are empty, but Megatron does not load a checkpoint without those that it expects.

    Args:
      folder: such as ``iter_0000010``; must not exist.
      num_layers: of the decoder; if they are all of one kind, they are stacked.
      common: plain values.
      dtype: of the weights.
      optimizer: write Adam's moments and the fp32 weights too.
      bar: shows the bytes of tensors.
    """
    for tensor in tensors:
        size = prod(tensor.theirs.shape)
        fp32 = len(MOMENTS) + (dtype != FLOAT32) if optimizer and tensor.is_parameter else 0
        bar.total = (bar.total or 0) + size * (dtype.itemsize + fp32 * FLOAT32.itemsize)
    with DistWriter(folder) as writer:
        out = _Output(writer, num_layers, bar)
        for tensor in tensors:
            out.add(tensor, dtype)
        for moment in MOMENTS if optimizer else ():
            for tensor in filter(_is_parameter, tensors):
                out.add(tensor, FLOAT32, (f"optimizer.state.{moment}.",), moment)
        if optimizer:
            prefixes = tuple(f"optimizer.state.{name}." for name in _MASTER_WEIGHTS)
            for tensor in filter(_is_parameter, tensors):
                out.add(tensor, FLOAT32, prefixes)
        out.add_aliases()
        extra, *further = dict.fromkeys(
            name for tensor in tensors for name in _extra_states(_entry(tensor, num_layers))
        )
        writer.add_object(extra, [None])
        for name in further:
            writer.add_alias(name, extra)
        writer.add_object(COMMON_ENTRY, [common])
        save(writer.folder / "common.pt", common)  # read up to 0.18
        (writer.folder / "metadata.json").write_text(json.dumps(_BACKENDS))


class _Output:
    """Entries, each written once under its first name."""

    def __init__(self, writer: DistWriter, num_layers: int, bar: tqdm) -> None:
        self._writer, self._num_layers, self._bar = writer, num_layers, bar
        self._weights: dict[str, np.dtype] = {}
        self._aliases: dict[str, str] = {}

    def add(
        self,
        tensor: Exported,
        dtype: np.dtype,
        prefixes: tuple[str, ...] = ("",),
        moment: str | None = None,
    ) -> None:
        """Writes it, unless the weight itself has the same bytes already."""
        entry = _entry(tensor, self._num_layers)
        first, *others = (prefix + key for prefix in prefixes for key in entry.keys)
        if moment is None and self._weights.get(entry.keys[0]) == dtype and prefixes != ("",):
            self._aliases |= dict.fromkeys((first, *others), entry.keys[0])
            return
        if moment is None:
            self._weights.setdefault(entry.keys[0], dtype)
        self._aliases |= dict.fromkeys(others, first)
        whole = tensor.tensor(dtype, moment)
        shape = tuple(1 for _ in entry.index) + whole.shape
        chunk = LazyTensor(shape, whole.dtype, lambda: whole.numpy().reshape(shape))
        offsets = entry.index + tuple(0 for _ in whole.shape)
        self._writer.add_chunk(first, entry.sizes + whole.shape, offsets, chunk)
        self._bar.update(prod(shape) * whole.dtype.itemsize)

    def add_aliases(self) -> None:
        """To be called when all entries are complete."""
        for name, other in self._aliases.items():
            self._writer.add_alias(name, other)


def _is_parameter(tensor: Exported) -> bool:
    return tensor.is_parameter


def _entry(tensor: Exported, num_layers: int) -> _Entry:
    place, section = tensor.place, tensor.place.section
    prefix = section.prefix.replace("{layer}", str(place.layer))
    index, sizes = (), ()
    if section.prefix.startswith("decoder.") and len(section.layers) == num_layers:
        prefix, index, sizes = "decoder.layers.", (place.layer,), (num_layers,)
    if place.expert is not None:
        index, sizes = (*index, place.expert), (*sizes, place.rule.experts)
    keys = (prefix + name.replace("{expert}", "experts") for name in tensor.theirs.names)
    return _Entry(tuple(keys), index, sizes)


def _extra_states(entry: _Entry) -> list[str]:
    """Names of the extra states of the module that has this tensor as its weight."""
    numbers, sizes = (".".join(map(str, part)) for part in (entry.index, entry.sizes))
    shard = f"_extra_state/shard_{numbers or 0}_{sizes or 1}"
    modules = [
        key.removesuffix("weight")
        for key in entry.keys
        if key.endswith(".weight") and not any(part in key for part in _NO_EXTRA_STATE)
    ]
    cores = [
        module.replace("linear_proj.", "core_attention.")
        for module in modules
        if module.endswith("self_attention.linear_proj.")
    ]
    return [module + shard for module in (*modules, *cores)]
