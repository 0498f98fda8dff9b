"""Writing folders that ``torch.distributed.checkpoint`` reads, one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from mxjax.ckpt.atomic import new_folder
from mxjax.ckpt.torch_format.archive_writer import write_archive
from mxjax.ckpt.torch_format.distributed import METADATA, Blob, Chunk, DistTensor, coverage_problem
from mxjax.ckpt.torch_format.pickle_writer import dump
from mxjax.ckpt.torch_format.values import (
    TORCH_NAMES,
    Global,
    Record,
    TensorLike,
    TorchFormatError,
)

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"


class DistWriter:
    """Writes one checkpoint; use it in a ``with`` block, which completes it.

    The folder gets its name at the end of the block, and ``.metadata`` is written last. If the
    block fails nothing is left.

    Args:
      folder: the checkpoint, such as ``.../iter_0000010``. It must not exist.
      file_bytes: a new ``.distcp`` file is begun when the last one has this size.

    Attributes:
      folder: within the block, the temporary folder, for files beside those of torch, such as
        Megatron's ``metadata.json``.

    Raises:
      FileExistsError: `folder` exists.
    """

    def __init__(self, folder: str | Path, file_bytes: int = 4 << 30) -> None:
        self._cleanup = contextlib.ExitStack()
        self._target = Path(folder)
        self._file_bytes = file_bytes
        self._file: BinaryIO | None = None
        self._files = 0
        self._tensors: dict[str, DistTensor] = {}
        self._objects: dict[str, Blob] = {}

    def __enter__(self) -> DistWriter:
        self.folder = self._cleanup.enter_context(new_folder(self._target))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            with contextlib.suppress(OSError):
                self._close()
            self._cleanup.__exit__(kind, error, traceback)
            return
        with self._cleanup:  # it removes the folder if the end of the block fails here
            self._finish()

    def add(self, name: str, tensor: TensorLike | np.ndarray) -> None:
        """Writes a whole tensor.

        Raises:
          TorchFormatError: it has no dtype of torch, or there is an entry of that name.
        """
        self.add_chunk(name, tensor.shape, (0,) * len(tensor.shape), tensor)

    def add_chunk(
        self,
        name: str,
        shape: Sequence[int],
        offsets: Sequence[int],
        chunk: TensorLike | np.ndarray,
    ) -> None:
        """Writes the block of a tensor that begins at `offsets`. All blocks must cover it once.

        Args:
          shape: of the whole tensor.
          offsets: first element of the block, in each dim.

        Raises:
          TorchFormatError: shape or dtype is not that of the blocks before.
        """
        shape, offsets = tuple(map(int, shape)), tuple(map(int, offsets))
        dtype = np.dtype(chunk.dtype)
        before = self._tensors.get(name, DistTensor(name, shape, dtype, ()))
        if name in self._objects or (before.shape, before.dtype) != (shape, dtype):
            raise TorchFormatError(f"There is another entry named {name}.")
        stored = Chunk(offsets, tuple(map(int, chunk.shape)), self._append(chunk))
        self._tensors[name] = DistTensor(name, shape, dtype, (*before.chunks, stored))

    def add_object(self, name: str, value: Any) -> None:
        """Writes what is not a tensor, as ``torch.save`` would.

        Raises:
          TorchFormatError: it cannot be written, or there is an entry of that name.
        """
        if name in self._objects or name in self._tensors:
            raise TorchFormatError(f"There is another entry named {name}.")
        self._objects[name] = self._append(value)

    def add_alias(self, name: str, other: str) -> None:
        """A further name for an entry that is complete; it takes no space but for the description.

        Raises:
          TorchFormatError: there is an entry of that name, or none named `other`.
        """
        if name in self._objects or name in self._tensors:
            raise TorchFormatError(f"There is another entry named {name}.")
        if other in self._objects:
            self._objects[name] = self._objects[other]
        elif other in self._tensors:
            self._tensors[name] = replace(self._tensors[other], name=name)
        else:
            raise TorchFormatError(f"There is no entry named {other}.")

    def _append(self, value: Any) -> Blob:
        if self._file is not None and self._file.tell() >= self._file_bytes:
            self._close()
        if self._file is None:
            self._file = (self.folder / f"__0_{self._files}.distcp").open("wb")
            self._files += 1
        offset = self._file.tell()
        return Blob(Path(self._file.name), offset, write_archive(self._file, value))

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _finish(self) -> None:
        self._close()
        for tensor in self._tensors.values():
            if problem := coverage_problem(tensor):
                raise TorchFormatError(f"{tensor.name} of shape {tensor.shape} {problem}.")
        with (self.folder / METADATA).open("wb") as file:
            file.write(dump(_metadata(self._tensors, self._objects)))
            file.flush()
            os.fsync(file.fileno())


def _metadata(tensors: dict[str, DistTensor], objects: dict[str, Blob]) -> Record:
    kinds: dict[str, Record] = {name: _dataclass("BytesStorageMetadata") for name in objects}
    places = {_index(name, None): _place(blob) for name, blob in objects.items()}
    for name, tensor in tensors.items():
        chunks = [
            _dataclass("ChunkStorageMetadata", offsets=_size(c.offsets), sizes=_size(c.sizes))
            for c in tensor.chunks
        ]
        kinds[name] = _dataclass(
            "TensorStorageMetadata",
            properties=_properties(tensor.dtype),
            size=_size(tensor.shape),
            chunks=chunks,
        )
        places |= {_index(name, chunk.offsets): _place(chunk.blob) for chunk in tensor.chunks}
    return _dataclass(
        "Metadata",
        state_dict_metadata=kinds,
        planner_data=None,
        storage_data=places,
        storage_meta=_dataclass(
            "StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]
        ),
        version="1.0.0",
    )


def _dataclass(name: str, **fields: Any) -> Record:
    return Record(Global(_METADATA_MODULE, name), state=fields or None)


@functools.lru_cache(1 << 12)  # the same object twice is written once
def _size(numbers: tuple[int, ...]) -> Record:
    return Record(Global("torch", "Size"), (numbers,), called=True)


def _index(name: str, offsets: tuple[int, ...] | None) -> Record:
    fields = {"fqn": name, "index": None}
    if offsets is not None:
        fields["offset"] = _size(offsets)
    return _dataclass("MetadataIndex", **fields)


def _place(blob: Blob) -> Record:
    return Record(
        Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        state={"relative_path": blob.path.name, "offset": blob.offset, "length": blob.length},
    )


@functools.cache
def _properties(dtype: np.dtype) -> Record:
    layout = Record(Global("torch.serialization", "_get_layout"), ("torch.strided",), called=True)
    contiguous = Record(Global(_METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (0,), called=True)
    return Record(
        Global(_METADATA_MODULE, "TensorProperties"),
        # dtype, layout, requires_grad, memory format, pin_memory
        state=(Global("torch", TORCH_NAMES[dtype]), layout, False, contiguous, False),
    )
