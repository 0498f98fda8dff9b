"""What torch files hold, as plain data: no class of torch, megatron or anyone else is needed.

A pickle says "import this name", "call it with these arguments", "make an object of it and give it
this state". Reading keeps the first as a :class:`Global` and the others as a :class:`Record`;
tensors become :class:`Tensor`, which reads its bytes only when asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from mxjax.ckpt.errors import CheckpointFormatError


class TorchFormatError(CheckpointFormatError):
    """A file that cannot be read as a torch checkpoint, or holds what a checkpoint must not."""


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function, such as ``torch.bfloat16``. It is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Record:
    """An object of a class that exists only in the program that wrote it.

    Attributes:
      cls: its class.
      args: what the class was called with; an enum has its value here.
      state: what it was filled with, a dictionary of its fields unless the class says otherwise.
      called: made by calling the class (an enum, ``torch.Size``) rather than by ``__new__``.
      items: what a subclass of ``dict`` or ``list`` held.
    """

    cls: Global
    args: tuple[Any, ...] = ()
    state: Any = None
    called: bool = False
    items: Any = None

    def get(self, name: str, default: Any = None) -> Any:
        """The field `name` of a dataclass or namespace."""
        return self.fields.get(name, default)

    @property
    def fields(self) -> dict[str, Any]:
        """All fields. Objects with ``__slots__`` keep them in the second half of their state."""
        if isinstance(self.state, dict):
            return self.state
        if isinstance(self.state, tuple) and len(self.state) == 2:
            return {k: v for part in self.state if isinstance(part, dict) for k, v in part.items()}
        return {}


_NAMES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint64": np.uint64,
    "uint32": np.uint32,
    "uint16": np.uint16,
    "uint8": np.uint8,
    "bool": np.bool_,
    "complex64": np.complex64,
    "complex128": np.complex128,
}
DTYPES: dict[str, np.dtype] = {name: np.dtype(scalar) for name, scalar in _NAMES.items()}
"""numpy's dtype by torch's name, as in ``torch.bfloat16``."""

TORCH_NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""The reverse of :data:`DTYPES`."""

STORAGES: dict[str, np.dtype] = {
    "DoubleStorage": DTYPES["float64"],
    "FloatStorage": DTYPES["float32"],
    "HalfStorage": DTYPES["float16"],
    "BFloat16Storage": DTYPES["bfloat16"],
    "LongStorage": DTYPES["int64"],
    "IntStorage": DTYPES["int32"],
    "ShortStorage": DTYPES["int16"],
    "CharStorage": DTYPES["int8"],
    "ByteStorage": DTYPES["uint8"],
    "BoolStorage": DTYPES["bool"],
    "ComplexFloatStorage": DTYPES["complex64"],
    "ComplexDoubleStorage": DTYPES["complex128"],
    "UntypedStorage": DTYPES["uint8"],
}
"""dtype of the elements in which a storage class counts its length."""

STORAGE_NAMES: dict[np.dtype, str] = {
    dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"
}
"""Classes of storage to write; newer dtypes have none and use ``UntypedStorage``."""


@runtime_checkable
class TensorLike(Protocol):
    """What can be written as a tensor: shape and dtype at once, the elements when their turn is."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def numpy(self) -> np.ndarray:
        """The elements."""


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor to be written that is made by `read` when its turn comes, and dropped after.

    Attributes:
      order: a file has the bytes of its tensors in the order of these numbers, so that what is
        read from one place can be read together.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray] = field(repr=False)
    order: int = 0

    def numpy(self) -> np.ndarray:
        """The elements."""
        return self.read()


@dataclass(frozen=True, eq=False)
class Storage:
    """Bytes that one or several tensors view.

    Attributes:
      key: name of the record in the file, unique there.
      nbytes: length in bytes.
      map: ``map(start, stop)`` gives these bytes as a ``uint8`` array, mapped from the file.
    """

    key: str
    dtype: np.dtype
    nbytes: int
    map: Callable[[int, int], np.ndarray] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor in a file: a view of a storage. Nothing is read before :meth:`numpy`.

    Attributes:
      offset: index of its first element in the storage, in elements of `dtype`.
      strides: steps between elements of each dimension, in elements of `dtype`.
    """

    storage: Storage
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def view(cls, storage: Any, dtype: np.dtype, offset: Any, shape: Any, strides: Any) -> Tensor:
        """Checks that the view lies within its storage.

        Raises:
          TorchFormatError: it does not, or the arguments are not those of a tensor.
        """
        numbers = [offset, *shape, *strides]
        sane = isinstance(storage, Storage) and all(type(n) is int and n >= 0 for n in numbers)
        if not sane or len(shape) != len(strides):
            raise TorchFormatError(
                f"a tensor of shape {shape}, strides {strides} and offset {offset} is not valid"
            )
        tensor = cls(storage, dtype, tuple(shape), offset, tuple(strides))
        end = (offset + tensor._extent) * dtype.itemsize
        if end > storage.nbytes:
            raise TorchFormatError(
                f"a tensor of shape {tensor.shape} at offset {offset} ends at byte {end} of storage"
                f" {storage.key}, which has {storage.nbytes}"
            )
        return tensor

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, which may be fewer or, with stride 0, more than it views."""
        return self.size * self.dtype.itemsize

    @property
    def _extent(self) -> int:
        """Elements of the storage from its first to its last one."""
        if self.size == 0:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))

    def numpy(self) -> np.ndarray:
        """The elements, read-only, mapped from the file: no memory of its own until copied.

        The mapping ends when the array and all views of it are gone.

        Raises:
          TorchFormatError: the file has become shorter since it was opened.
        """
        itemsize = self.dtype.itemsize
        start = self.offset * itemsize
        data = self.storage.map(start, start + self._extent * itemsize)
        if self.size == 0:
            return np.empty(self.shape, self.dtype)
        strides = tuple(step * itemsize for step in self.strides)
        return np.ndarray(self.shape, self.dtype, buffer=data, strides=strides)


def as_numpy(value: Any) -> np.ndarray:
    """The array in the :class:`Record` of a pickled ``numpy.ndarray``, such as numpy's RNG state.

    Raises:
      TorchFormatError: it is not one, or holds Python objects.
    """
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, Record) and value.cls.name == "_reconstruct":
        match value.state:
            case (_, tuple(shape), Record() as dtype, bool(fortran), bytes(data)):
                order = "F" if fortran else "C"
                try:
                    return np.frombuffer(data, numpy_dtype(dtype)).reshape(shape, order=order)
                except (TypeError, ValueError) as error:
                    raise TorchFormatError(f"a pickled numpy array is damaged: {error}") from error
    raise TorchFormatError(f"{value!r:.200} is not an array")


def numpy_dtype(record: Record) -> np.dtype:
    """The dtype in the :class:`Record` of a pickled ``numpy.dtype``; numbers and bool only."""
    match record:
        case Record(cls=Global("numpy", "dtype"), args=(str(code), *_), state=(_, str(order), *_)):
            dtype = np.dtype(code).newbyteorder("=" if order == "|" else order)
            if dtype.kind in "biufc":
                return dtype
    raise TorchFormatError(f"numpy dtype {record.args} is not one of numbers")
