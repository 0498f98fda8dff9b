"""``.safetensors`` files: a JSON header, then the bytes of all tensors without gaps.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.torch_format.values import TensorLike

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""numpy's dtype by the name in the header."""

_PIECE_BYTES = 1 << 26
"""What is converted and written at once."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, eq=False)
class SafeTensor:
    """A tensor in a file; nothing is read before :meth:`numpy`."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def numpy(self) -> np.ndarray:
        """The elements, read-only, mapped from the file."""
        if self.nbytes == 0:
            return np.empty(self.shape, self.dtype)
        mapped = np.memmap(self.path, np.uint8, "r", offset=self.begin, shape=(self.nbytes,))
        return np.asarray(mapped).view(self.dtype).reshape(self.shape)


def read_safetensors(path: str | Path) -> dict[str, SafeTensor]:
    """All tensors of a file by name.

    Raises:
      CheckpointFormatError: it is truncated, damaged, or has dtypes that are not read; tensors
        overlap or leave bytes between them.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointFormatError(
                    f"{path} is truncated or not a safetensors file: {size} bytes, header of"
                    f" {length}."
                )
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {name: _tensor(path, name, v, 8 + length, size) for name, v in header.items()}
        _require_no_gaps(path, found, 8 + length, size)
        return found
    except OSError as error:
        raise CheckpointFormatError(f"{path} cannot be read: {error.strerror}.") from error
    except CheckpointFormatError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointFormatError(
            f"{path} has a damaged header ({type(error).__name__}: {error})."
        ) from error


def _tensor(path: Path, name: str, entry: dict, data: int, size: int) -> SafeTensor:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise CheckpointFormatError(
            f"{path}: {name} has dtype {entry['dtype']}, which is not read."
        )
    tensor = SafeTensor(path, DTYPES[entry["dtype"]], tuple(entry["shape"]), data + begin)
    if begin < 0 or min(tensor.shape, default=0) < 0 or end - begin != tensor.nbytes:
        raise CheckpointFormatError(
            f"{path}: {name} of shape {tensor.shape} and dtype {entry['dtype']} has bytes {begin}"
            f" to {end}."
        )
    if data + end > size:
        raise CheckpointFormatError(
            f"{path} is truncated: {name} should end at byte {data + end} of {size}."
        )
    return tensor


def _require_no_gaps(path: Path, tensors: Mapping[str, SafeTensor], data: int, size: int) -> None:
    end, before = data, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if tensor.begin != end:
            how = "overlap" if tensor.begin < end else "have bytes between them that are no tensor"
            raise CheckpointFormatError(
                f"{path} is damaged: {before} and {name} {how} (byte {end} and {tensor.begin})."
            )
        end, before = tensor.begin + tensor.nbytes, name
    if end != size:
        raise CheckpointFormatError(
            f"{path} is damaged: {size - end} bytes follow {before}, which should be the last."
        )


def write_safetensors(
    path: Path,
    tensors: Mapping[str, TensorLike],
    written: Callable[[int], Any] = lambda nbytes: None,
) -> None:
    """Writes a file, making one tensor after the other.

    Args:
      tensors: by name, in the order in which they are made; ``numpy()`` gives an array of the
        shape, which is converted to the dtype.
      written: called with the bytes of each tensor when it is written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for this
    begin = 0
    for name, tensor in tensors.items():
        dtype = np.dtype(tensor.dtype)
        end = begin + math.prod(tensor.shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, tensor in tensors.items():
            _write_elements(file, name, tensor)
            written(math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize)
        file.flush()
        os.fsync(file.fileno())


def _write_elements(file: BinaryIO, name: str, tensor: TensorLike) -> None:
    array, dtype = tensor.numpy(), np.dtype(tensor.dtype)
    if array.shape != tuple(tensor.shape):
        raise ValueError(f"{name} was made of shape {array.shape}, announced as {tensor.shape}.")
    # In pieces: a second copy of the whole tensor is not needed to change dtype and order.
    array = array if array.ndim else array[None]
    rows = max(1, _PIECE_BYTES // max(1, math.prod(array.shape[1:]) * dtype.itemsize))
    for first in range(0, len(array), rows):
        piece = np.asarray(array[first : first + rows], dtype, order="C")
        file.write(piece.reshape(-1).view(np.uint8).data)
