"""What lies at a path: format, model, grid, step, sizes, and what is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.leaves import (
    COMMON_ENTRY,
    Leaf,
    Value,
    common_values,
    dist_leaves,
    flatten,
    plain,
    rank_files,
    run_leaves,
    safetensors_files,
)
from mxjax.ckpt.locate import RANK_FOLDER, Kind, Location, locate
from mxjax.ckpt.safetensors import read_safetensors
from mxjax.ckpt.torch_format.archive import TorchArchive
from mxjax.ckpt.torch_format.distributed import DistCheckpoint
from mxjax.ckpt.torch_format.values import Record

GRID = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Megatron's arguments by axis."""


@dataclass
class Summary:
    """What ``inspect`` prints.

    Attributes:
      format: versions and kinds within the format, such as that of the optimizer state.
      step: the iteration; None if it is not recorded (a release, a Hugging Face folder).
      others: further checkpoints beside this one.
      grid: sizes of the parallel axes of the run that saved it, as far as it is recorded.
      model: its arguments.
      dtypes: number of tensors, elements and bytes by dtype, as they are stored: in Megatron's
        ``torch`` format those of all ranks.
      file_bytes: size of its files.
      missing: what should be there and is not; empty if the checkpoint is complete.
    """

    kind: Kind
    path: str
    format: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    others: tuple[str, ...] = ()
    grid: dict[str, int] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, dict[str, int]] = field(default_factory=dict)
    file_bytes: int = 0
    missing: list[str] = field(default_factory=list)


def inspect(path: str | Path, checksums: bool = False) -> Summary:
    """Describes the checkpoint at `path` without reading its tensors.

    Args:
      checksums: read all bytes of torch files and compare the checksums stored with them.

    Raises:
      CheckpointFormatError: there is none, or its description is damaged.
    """
    location = locate(path)
    files = [location.folder] if location.folder.is_file() else _files(location.folder)
    summary = Summary(
        location.kind,
        str(location.folder),
        step=location.step,
        others=location.others,
        missing=list(location.missing),
        file_bytes=sum(file.stat().st_size for file in files),
    )
    describe = {
        Kind.MXJAX: _mxjax,
        Kind.MEGATRON_TORCH: _megatron_torch,
        Kind.MEGATRON_DIST: _torch_dist,
        Kind.TORCH_DIST: _torch_dist,
        Kind.SAFETENSORS: _safetensors,
        Kind.TORCH_FILE: _torch_file,
    }[location.kind]
    leaves = describe(summary, location)
    summary.dtypes = _dtypes(leaves)
    if checksums:
        summary.missing += _damaged(location)
    return summary


def _mxjax(summary: Summary, location: Location) -> Mapping[str, Leaf]:
    leaves = run_leaves(location.folder)
    metadata = json.loads((location.folder / "metadata" / "metadata").read_text())
    config = yaml.safe_load(metadata.get("config", "")) or {}
    summary.step = metadata.get("step", summary.step)
    summary.grid = metadata.get("mesh", {})
    summary.model = config.get("model", {}) | {"moe": config.get("moe", {})} if config else {}
    summary.format = {"mxjax": metadata.get("version", "unknown")}
    return leaves


def _megatron_torch(summary: Summary, location: Location) -> Mapping[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    args: dict[str, Any] = {}
    files = rank_files(location.folder)
    for file in files:
        try:
            content = TorchArchive(file).load()
        except CheckpointFormatError as error:
            summary.missing.append(str(error))
            continue
        leaves |= flatten(content, f"{file.parent.name}.{file.stem}")
        if file.name == "model_optim_rng.pt" and not args and isinstance(content, dict):
            args = _describe_common(summary, content)
            chunks = [key for key in content if re.fullmatch(r"model\d+", str(key))]
            if chunks:
                summary.grid["vpp"] = len(chunks)
    present = {file.parent.name for file in files if file.name == "model_optim_rng.pt"}
    folders = {e.name for e in location.folder.iterdir() if RANK_FOLDER.fullmatch(e.name)}
    wanted = expected_ranks(args) | folders
    summary.missing += [f"{name}/model_optim_rng.pt" for name in sorted(wanted - present)]
    sharded = {file.parent.name for file in files if file.name == "distrib_optim.pt"}
    if sharded:
        summary.format["optimizer"] = "distributed, in distrib_optim.pt"
        summary.missing += [f"{name}/distrib_optim.pt" for name in sorted(wanted - sharded)]
    return leaves


_MOST_RANKS = 1 << 20
"""A grid with more ranks is no grid; listing them could take all memory."""


def expected_ranks(args: Mapping[str, Any]) -> set[str]:
    """Names of the folders that a ``torch`` checkpoint of this grid has; empty if it is unknown.

    Ranks count through ``tp``, ``cp``, ``dp``, then ``pp``, and within a pipeline stage once more
    through ``etp``, ``ep``. With folded experts only some pairs of both exist.
    """
    sizes = {axis: args.get(name) for axis, name in GRID.items()}
    given = [size for size in sizes.values() if size is not None]
    if any(not isinstance(size, int) or size < 1 for size in given) or prod(given) > _MOST_RANKS:
        return set()
    tp, pp, ep = (sizes[axis] or 1 for axis in ("tp", "pp", "ep"))
    if not sizes["tp"] or (ep > 1 and not sizes["dp"]):
        return set()
    stage = tp * (sizes["cp"] or 1) * (sizes["dp"] or 1)
    etp = sizes["etp"] or tp
    pairs = {(rank % tp, rank // etp % ep) for rank in range(stage)}
    return {
        f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        for t, e in pairs
        for p in range(pp)
    }


def _torch_dist(summary: Summary, location: Location) -> Mapping[str, Leaf]:
    checkpoint = DistCheckpoint(location.folder)
    summary.missing += checkpoint.missing()
    summary.format = {"torch.distributed.checkpoint": checkpoint.version}
    common: Any = None
    try:
        backend = location.folder / "metadata.json"
        if backend.exists():
            summary.format |= json.loads(backend.read_text())
        common = common_values(checkpoint, location.folder)
    except ValueError as error:
        summary.missing.append(str(error))
    if isinstance(common, dict):
        _describe_common(summary, common)
    elif location.kind is Kind.MEGATRON_DIST:
        summary.missing.append(f"common.pt or the entry {COMMON_ENTRY}")
    return dist_leaves(checkpoint, location.folder)


def _describe_common(summary: Summary, common: dict[Any, Any]) -> dict[str, Any]:
    """Puts Megatron's plain values into the summary; returns the arguments."""
    args = common.get("args")
    found = plain(args.fields) if isinstance(args, Record) else {}
    if not found:
        summary.missing.append("args, the model's arguments")
    summary.model = found
    summary.grid = {axis: found[name] for axis, name in GRID.items() if found.get(name)}
    if isinstance(iteration := common.get("iteration"), int):
        summary.step = iteration
    if "checkpoint_version" in common:
        summary.format["checkpoint_version"] = common["checkpoint_version"]
    content = common.get("content_metadata") or {}
    if sharding := content.get("distrib_optim_sharding_type"):
        summary.format["optimizer"] = sharding
    elif common.get("optimizer"):
        summary.format["optimizer"] = "not distributed"
    return found


def _safetensors(summary: Summary, location: Location) -> Mapping[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    found: dict[str, str] = {}
    for file in safetensors_files(location.folder):
        try:
            tensors = read_safetensors(file)
        except CheckpointFormatError as error:
            summary.missing.append(str(error))
            continue
        leaves |= tensors
        found |= dict.fromkeys(tensors, file.name)
    if location.folder.is_file():
        return leaves
    try:
        index = location.folder / "model.safetensors.index.json"
        wanted = json.loads(index.read_text())["weight_map"] if index.exists() else {}
        config = location.folder / "config.json"
        if config.exists():
            summary.model = dict(json.loads(config.read_text()))
        else:
            summary.missing.append("config.json")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointFormatError(f"{location.folder} has damaged JSON: {error}.") from error
    for shard in sorted(set(wanted.values())):
        absent = [name for name, file in wanted.items() if file == shard != found.get(name)]
        if absent:
            summary.missing.append(f"{shard}: {len(absent)} tensors, such as {absent[0]}")
    summary.format = {"shards": len(safetensors_files(location.folder))}
    return leaves


def _torch_file(summary: Summary, location: Location) -> Mapping[str, Leaf]:
    content = TorchArchive(location.folder).load()
    if isinstance(content, dict) and isinstance(content.get("args"), Record):
        _describe_common(summary, content)
    return flatten(content)


def _dtypes(leaves: Mapping[str, Leaf]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for leaf in leaves.values():
        if not isinstance(leaf, Value):
            dtype = np.dtype(leaf.dtype)
            size = int(np.prod(leaf.shape, dtype=np.int64))
            nothing = {"tensors": 0, "elements": 0, "bytes": 0}
            counts = found.setdefault(dtype.name, nothing)
            counts["tensors"] += 1
            counts["elements"] += size
            counts["bytes"] += size * dtype.itemsize
    return found


def _damaged(location: Location) -> list[str]:
    archives: list[TorchArchive] = []
    match location.kind:
        case Kind.MEGATRON_TORCH:
            archives = [TorchArchive(file) for file in rank_files(location.folder)]
        case Kind.TORCH_FILE:
            archives = [TorchArchive(location.folder)]
        case Kind.MEGATRON_DIST | Kind.TORCH_DIST:
            checkpoint = DistCheckpoint(location.folder)
            blobs = [c.blob for tensor in checkpoint.tensors.values() for c in tensor.chunks]
            blobs += [entry.blob for entry in checkpoint.byte_entries.values()]
            archives = [blob.archive() for blob in blobs]
    return [
        f"{archive.path}: {name} does not have the checksum stored with it"
        for archive in archives
        for name in archive.damaged()
    ]


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]
