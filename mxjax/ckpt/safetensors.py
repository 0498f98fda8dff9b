"""Reading ``.safetensors`` files: a JSON header, then the bytes of all tensors."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from mxjax.ckpt.errors import CheckpointFormatError

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
      CheckpointFormatError: it is truncated, damaged, or has dtypes that are not read.
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
        return {name: _tensor(path, name, v, 8 + length, size) for name, v in header.items()}
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
