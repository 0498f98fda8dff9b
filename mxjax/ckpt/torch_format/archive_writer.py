"""Writing ``.pt`` files that ``torch.load`` reads, one tensor in memory at a time."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mxjax.ckpt.atomic import new_file
from mxjax.ckpt.torch_format.pickle_writer import dump
from mxjax.ckpt.torch_format.values import LazyTensor, TensorLike, TorchFormatError

_ALIGNMENT = 64
_BLOCK = 1 << 26
_LOCAL_HEADER_SIZE = 30
_ZIP64_EXTRA_SIZE = 20


def save(path: str | Path, value: Any) -> None:
    """Writes what ``torch.save(value, path)`` would.

    The file gets its name when it is complete. Tensors are written contiguous, each with a storage
    of its own unless the same object stands in `value` twice.

    Args:
      value: plain values, containers, :class:`Global`, :class:`Record`, and tensors: numpy arrays
        (ml_dtypes included), tensors of other files, :class:`LazyTensor`.

    Raises:
      TorchFormatError: something in `value` cannot be written, or a lazy tensor is not as declared.
      FileExistsError: there is a file of that name.
    """
    with new_file(path) as file:
        write_archive(file, value, Path(path).stem)


def write_archive(file: BinaryIO, value: Any, name: str = "archive") -> int:
    """Writes `value` at the position of `file`, as :func:`save` does, and returns its length.

    Args:
      name: the folder within the archive.
    """
    tensors: list[TensorLike | np.ndarray] = []

    def storage_key(tensor: TensorLike | np.ndarray) -> str:
        tensors.append(tensor)
        return str(len(tensors) - 1)

    pickled = dump(value, storage_key)
    window = _From(file)
    with zipfile.ZipFile(window, "w", zipfile.ZIP_STORED) as archive:
        _write(archive, f"{name}/data.pkl", pickled)
        _write(archive, f"{name}/.format_version", b"1")
        _write(archive, f"{name}/.storage_alignment", str(_ALIGNMENT).encode())
        _write(archive, f"{name}/byteorder", b"little")
        for index, tensor in sorted(enumerate(tensors), key=_order):
            _write(archive, f"{name}/data/{index}", _bytes_of(tensor))
        _write(archive, f"{name}/version", b"3\n")
    return window.tell()


def _order(numbered: tuple[int, TensorLike | np.ndarray]) -> int:
    _, tensor = numbered
    return tensor.order if isinstance(tensor, LazyTensor) else 0


def _bytes_of(tensor: TensorLike | np.ndarray) -> np.ndarray:
    array = tensor if isinstance(tensor, np.ndarray) else tensor.numpy()
    if array.shape != tuple(tensor.shape) or array.dtype != tensor.dtype:
        raise TorchFormatError(
            f"A tensor declared as {tuple(tensor.shape)} {tensor.dtype} is {array.shape}"
            f" {array.dtype}."
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _write(archive: zipfile.ZipFile, name: str, data: bytes | np.ndarray) -> None:
    info = zipfile.ZipInfo(name)  # dated 1980: the same data gives the same file
    size = len(data)
    zip64 = size >= zipfile.ZIP64_LIMIT
    begin = archive.fp.tell() + _LOCAL_HEADER_SIZE + len(name) + _ZIP64_EXTRA_SIZE * zip64
    # Aligned data can be mapped and used in place; torch pads in the same way.
    padding = -(begin + 4) % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w", force_zip64=zip64) as record:
        for start in range(0, size, _BLOCK):
            record.write(memoryview(data)[start : start + _BLOCK])


class _From:
    """A file seen from its present position on: positions in an archive count from its start."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._start = file, file.tell()

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = self._start if whence == os.SEEK_SET else 0
        return self._file.seek(base + offset, whence) - self._start

    def flush(self) -> None:
        self._file.flush()
