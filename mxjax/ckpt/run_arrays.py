"""One of our own checkpoints, its arrays read block by block."""

from __future__ import annotations

import functools
import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
import yaml
from etils import epath

from mxjax.ckpt.errors import CheckpointFormatError, ExportError
from mxjax.ckpt.locate import Kind, locate
from mxjax.ckpt.tree import named_leaves
from mxjax.config import Config, load_settings

_CACHE_BYTES = 1 << 26
"""Decoded chunks kept beside the largest: a stored chunk may hold many blocks, which are asked for
one after the other."""


def saved_step(source: str | Path, step: int | None) -> tuple[Path, dict[str, Any], Config]:
    """Folder, metadata and configuration of one step of a run; None: the newest.

    Raises:
      ExportError: the step does not exist.
      CheckpointFormatError: `source` is no run.
    """
    location = locate(source)
    if location.kind is not Kind.MXJAX:
        raise ExportError(f"{source} is of kind {location.kind!s}; only runs are exported.")
    folder = location.folder
    if step not in (None, location.step):
        if str(step) not in location.others:
            steps = ", ".join([*location.others, str(location.step)])
            raise ExportError(f"--step {step}: {source} has {steps}. Choose one of these.")
        folder = folder.with_name(str(step))
    metadata = json.loads((folder / "metadata" / "metadata").read_text())
    config = load_settings(yaml.safe_load(metadata["config"]), "the run's configuration")
    return folder, metadata, config


class RunArrays:
    """The training state in one step of a run.

    Attributes:
      shapes: of all arrays, by name.
      dtypes: the same.

    Raises:
      CheckpointFormatError: the checkpoint is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute() / "state"
        try:
            tree = ocp.StandardCheckpointHandler().metadata(epath.Path(self._folder)).tree
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointFormatError(f"{folder} cannot be read: {error}") from error
        leaves = named_leaves(tree)
        self.shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        self.dtypes = {name: np.dtype(leaf.dtype) for name, leaf in leaves.items()}
        self._stores: dict[str, ts.TensorStore] = {}

    def read(self, name: str, index: tuple[int, ...] = ()) -> np.ndarray:
        """What lies below an index of the first dims of an array.

        Raises:
          CheckpointFormatError: it cannot be read.
        """
        if name not in self._stores:
            self._stores[name] = self._open(name, self._context)
        return self._read(name, self._stores[name][index])

    def whole(self, name: str) -> np.ndarray:
        """An array that is wanted once: nothing of it is kept.

        Raises:
          CheckpointFormatError: it cannot be read.
        """
        return self._read(name, self._open(name))

    def _read(self, name: str, store: ts.TensorStore) -> np.ndarray:
        try:
            return store.read().result()
        except ValueError as error:
            raise self._unreadable(name, error) from error

    @functools.cached_property
    def _context(self) -> ts.Context:
        largest = max(self._chunk_bytes(name) for name in self.shapes)
        return ts.Context({"cache_pool": {"total_bytes_limit": largest + _CACHE_BYTES}})

    def _open(self, name: str, context: ts.Context | None = None) -> ts.TensorStore:
        spec = {
            "driver": "zarr",
            "kvstore": {
                "driver": "ocdbt",
                "base": f"file://{self._folder}/",
                "path": f"{name}/",
            },
            "recheck_cached_data": "open",
        }
        try:
            return ts.open(spec, open=True, read=True, context=context).result()
        except ValueError as error:
            raise self._unreadable(name, error) from error

    def _chunk_bytes(self, name: str) -> int:
        store = self._open(name)
        return prod(store.chunk_layout.read_chunk.shape or ()) * store.dtype.numpy_dtype.itemsize

    def _unreadable(self, name: str, error: Exception) -> CheckpointFormatError:
        return CheckpointFormatError(f"{self._folder}: {name} cannot be read: {error}")
