"""A checkpoint of any kind as leaves with names: tensors, read one at a time, and plain values."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.locate import Kind, Location
from mxjax.ckpt.safetensors import read_safetensors
from mxjax.ckpt.torch_format.archive import TorchArchive
from mxjax.ckpt.torch_format.distributed import DistCheckpoint
from mxjax.ckpt.torch_format.values import (
    Global,
    LazyTensor,
    Record,
    TensorLike,
    TorchFormatError,
    as_numpy,
)


@dataclass(frozen=True)
class Value:
    """A leaf that is not a tensor; `read` gives it as plain Python values."""

    read: Callable[[], Any] = field(repr=False)


Leaf = TensorLike | Value


def leaves_of(location: Location) -> dict[str, Leaf]:
    """All leaves of a checkpoint by name. Tensors and byte entries are read later, by themselves.

    Names are those of the format. In Megatron's ``torch`` format they begin with the folder of the
    rank, such as ``mp_rank_00.model.decoder.final_layernorm.weight``.

    Raises:
      CheckpointFormatError: files are missing, damaged, or hold what a checkpoint must not.
    """
    match location.kind:
        case Kind.MXJAX:
            return run_leaves(location.folder)
        case Kind.MEGATRON_TORCH:
            found: dict[str, Leaf] = {}
            for file in rank_files(location.folder):
                prefix = file.parent.name
                if file.name != "model_optim_rng.pt":
                    prefix += f".{file.stem}"
                found |= flatten(TorchArchive(file).load(), prefix)
            return found
        case Kind.MEGATRON_DIST | Kind.TORCH_DIST:
            return dist_leaves(DistCheckpoint(location.folder), location.folder)
        case Kind.SAFETENSORS:
            return {
                name: tensor
                for file in safetensors_files(location.folder)
                for name, tensor in read_safetensors(file).items()
            }
        case Kind.TORCH_FILE:
            return flatten(TorchArchive(location.folder).load())


def rank_files(folder: Path) -> list[Path]:
    """The ``.pt`` files of all ranks of Megatron's ``torch`` format."""
    return sorted(folder.glob("mp_rank_*/*.pt"))


def safetensors_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, or the one that `path` is."""
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


COMMON_ENTRY = "common_state/shard_0_1"
"""The byte entry that has Megatron's plain values, from 0.19 on."""


def common_values(checkpoint: DistCheckpoint, folder: Path) -> Any:
    """Megatron's plain values beside the tensors of ``torch_dist``; None: they are missing.

    Raises:
      CheckpointFormatError: they are damaged.
    """
    if (path := folder / "common.pt").exists():  # Megatron up to 0.18
        return TorchArchive(path).load()
    if COMMON_ENTRY in checkpoint.byte_entries:
        (values,) = checkpoint.byte_entries[COMMON_ENTRY].load()
        return values
    return None


def dist_leaves(checkpoint: DistCheckpoint, folder: Path) -> dict[str, Leaf]:
    """Tensors and byte entries of a folder of torch.distributed.checkpoint, and ``common.pt``."""
    found: dict[str, Leaf] = dict(checkpoint.tensors)
    for name, entry in checkpoint.byte_entries.items():
        found[name] = Value(lambda entry=entry: plain(entry.load()))
    if (common := folder / "common.pt").exists():  # Megatron up to 0.18
        found |= flatten(TorchArchive(common).load(), "common")
    return found


def run_leaves(folder: Path) -> dict[str, Leaf]:
    """Arrays and metadata of one step of our own; arrays are read one at a time."""
    # Here, because JAX is slow to import and the other kinds do without.
    from mxjax.ckpt.run_arrays import RunArrays

    arrays = RunArrays(folder)
    try:
        metadata = json.loads((folder / "metadata" / "metadata").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointFormatError(f"{folder} cannot be read: {error}") from error
    found: dict[str, Leaf] = {
        name: LazyTensor(shape, arrays.dtypes[name], lambda name=name: arrays.whole(name))
        for name, shape in arrays.shapes.items()
    }
    return found | flatten(metadata, "metadata")


def flatten(value: Any, prefix: str = "") -> dict[str, Leaf]:
    """Leaves of nested containers and records, by names joined with dots."""
    found: dict[str, Leaf] = {}
    try:
        for name, leaf in _walk(value, prefix):
            # Keys with dots may give the same name twice: number the later ones.
            unique, count = name, 1
            while unique in found:
                count += 1
                unique = f"{name}#{count}"
            found[unique] = leaf
    except RecursionError as error:
        raise TorchFormatError("The checkpoint nests its containers too deeply.") from error
    return found


def _walk(value: Any, name: str) -> Iterator[tuple[str, Leaf]]:
    children: dict[str, Any] | None = None
    match value:
        case TensorLike():
            yield name, value
        case Record() if value.cls.name == "_reconstruct":
            array = as_numpy(value)
            yield name, LazyTensor(array.shape, array.dtype, lambda: array)
        case Record() if value.fields:
            children = value.fields
        case dict():
            children = {_name(key): child for key, child in value.items()}
        case list() | tuple() if any(_is_container(child) for child in value):
            children = {str(index): child for index, child in enumerate(value)}
        case _:
            yield name, Value(lambda: plain(value))
    for key, child in (children or {}).items():
        yield from _walk(child, f"{name}.{key}" if name else key)


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | tuple | Record | TensorLike)


def _name(key: Any) -> str:
    return "(" + ", ".join(map(_name, key)) + ")" if isinstance(key, tuple) else str(key)


def plain(value: Any) -> Any:
    """`value` out of values that compare with ``==`` and that JSON can hold."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.generic():
            return value.item()
        case bytes() | bytearray():
            return value.hex()
        case io.BytesIO():
            return value.getvalue().hex()
        case dict():
            return {_name(key): plain(child) for key, child in value.items()}
        case list() | tuple():
            return [plain(child) for child in value]
        case set() | frozenset():
            return sorted((plain(child) for child in value), key=repr)
        case Record() if value.cls.name == "_reconstruct":
            return plain_array(as_numpy(value))
        case Record() if value.state is None and value.items is None:
            return f"{value.cls.name}({', '.join(map(repr, map(plain, value.args)))})"
        case Record():
            return plain(value.fields or value.items or value.state)
        case Global():
            return str(value)
        case TensorLike():
            return plain_array(value.numpy())
    return repr(value)


def plain_array(array: np.ndarray) -> dict[str, Any]:
    """Shape, dtype and bytes of an array within a value."""
    return {"shape": list(array.shape), "dtype": array.dtype.name, "bytes": array.tobytes().hex()}
