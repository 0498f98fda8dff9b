"""A writer of pickles that names classes of torch and megatron without importing them.

Protocol 2, with those opcodes only that ``torch.load(weights_only=True)`` reads.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mxjax.ckpt.torch_format.values import (
    STORAGE_NAMES,
    TORCH_NAMES,
    Global,
    Record,
    TensorLike,
    TorchFormatError,
)


def dump(value: Any, storage_key: Callable[[TensorLike], str] | None = None) -> bytes:
    """The pickle of `value`.

    Args:
      value: plain values, containers, :class:`Global`, :class:`Record`, tensors.
      storage_key: gives the name of the record that holds a tensor's bytes; None: no tensors.

    Raises:
      TorchFormatError: something in it cannot be written; its type is named.
    """
    writer = _Writer(storage_key)
    writer.out.write(pickle.PROTO + b"\x02")
    writer.write(value)
    writer.out.write(pickle.STOP)
    return writer.out.getvalue()


class _Writer:
    def __init__(self, storage_key: Callable[[TensorLike], str] | None) -> None:
        self.out = io.BytesIO()
        self.storage_key = storage_key
        # Text and globals by value, objects by identity; the values keep the objects alive, so
        # that no other gets the same identity.
        self.memo: dict[Any, tuple[int, Any]] = {}

    def write(self, value: Any) -> None:
        match value:
            case None:
                self.out.write(pickle.NONE)
            case bool():
                self.out.write(pickle.NEWTRUE if value else pickle.NEWFALSE)
            case int():
                self._int(value)
            case float():
                self.out.write(pickle.BINFLOAT + struct.pack(">d", value))
            case np.generic():
                self.write(value.item())
            case str():
                self._once(value, value, self._text)
            case Global():
                self._once(value, value, self._global)
            case tuple():
                self._tuple(value)
            case bytes():
                self._call("_codecs", "encode", (value.decode("latin1"), "latin1"))
            case list() | dict() | Record() | io.BytesIO() | np.ndarray() | TensorLike():
                self._once(id(value), value, self._object)
            case bytearray():
                self._call("__builtin__", "bytearray", (value.decode("latin1"), "latin-1"))
            case set():
                self._call("__builtin__", "set", (list(value),))
            case frozenset():
                self._call("__builtin__", "frozenset", (list(value),))
            case complex():
                self._call("__builtin__", "complex", (value.real, value.imag))
            case _:
                raise TorchFormatError(
                    f"A {type(value).__module__}.{type(value).__qualname__} cannot be written to a"
                    " torch file: use plain values, containers, numpy arrays or records."
                )

    def _once(self, key: Any, value: Any, write: Callable[[Any], None]) -> None:
        if known := self.memo.get(key):
            self._memo_opcode(pickle.BINGET, pickle.LONG_BINGET, known[0])
        else:
            write(value)

    def _remember(self, key: Any, value: Any) -> None:
        index = len(self.memo)
        self.memo[key] = (index, value)
        self._memo_opcode(pickle.BINPUT, pickle.LONG_BINPUT, index)

    def _memo_opcode(self, short: bytes, long: bytes, index: int) -> None:
        self.out.write(short + bytes([index]) if index < 256 else long + struct.pack("<I", index))

    def _int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.out.write(pickle.BININT1 + bytes([value]))
        elif 0 <= value < 1 << 16:
            self.out.write(pickle.BININT2 + struct.pack("<H", value))
        elif -(1 << 31) <= value < 1 << 31:
            self.out.write(pickle.BININT + struct.pack("<i", value))
        else:
            data = pickle.encode_long(value)
            self.out.write(pickle.LONG1 + struct.pack("<B", len(data)) + data)

    def _text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.out.write(pickle.BINUNICODE + struct.pack("<I", len(data)) + data)
        self._remember(value, value)

    def _global(self, value: Global) -> None:
        self.out.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        self._remember(value, value)

    def _tuple(self, values: tuple[Any, ...]) -> None:
        short = {0: pickle.EMPTY_TUPLE, 1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}
        if len(values) > 3:
            self.out.write(pickle.MARK)
        for value in values:
            self.write(value)
        self.out.write(short.get(len(values), pickle.TUPLE))

    def _call(self, module: str, name: str, args: tuple[Any, ...]) -> None:
        self.write(Global(module, name))
        self.write(args)
        self.out.write(pickle.REDUCE)

    def _object(self, value: Any) -> None:
        match value:
            case OrderedDict():
                self._call("collections", "OrderedDict", ())
                self._remember(id(value), value)
                self._items(value)
            case dict():
                self.out.write(pickle.EMPTY_DICT)
                self._remember(id(value), value)
                self._items(value)
            case list():
                self.out.write(pickle.EMPTY_LIST)
                self._remember(id(value), value)
                self._elements(value)
            case Record():
                self._record(value)
            case io.BytesIO():
                self.write(Global("_io", "BytesIO"))
                self.out.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
                self._remember(id(value), value)
                self.write((value.getvalue(), value.tell(), None))
                self.out.write(pickle.BUILD)
            case _:
                self._tensor(value)
                self._remember(id(value), value)

    def _elements(self, values: Iterable[Any]) -> None:
        self.out.write(pickle.MARK)
        for value in values:
            self.write(value)
        self.out.write(pickle.APPENDS)

    def _items(self, values: dict[Any, Any]) -> None:
        self.out.write(pickle.MARK)
        for key, value in values.items():
            self.write(key)
            self.write(value)
        self.out.write(pickle.SETITEMS)

    def _record(self, record: Record) -> None:
        self.write(record.cls)
        self.write(record.args)
        self.out.write(pickle.REDUCE if record.called else pickle.NEWOBJ)
        self._remember(id(record), record)
        if isinstance(record.items, list):
            self._elements(record.items)
        elif record.items is not None:
            self._items(record.items)
        if record.state is not None:
            self.write(record.state)
            self.out.write(pickle.BUILD)

    def _tensor(self, tensor: Any) -> None:
        dtype = np.dtype(tensor.dtype)
        if dtype not in TORCH_NAMES:
            raise TorchFormatError(f"torch has no dtype for numpy's {dtype}.")
        if self.storage_key is None:
            raise TorchFormatError("A tensor cannot be written here.")
        shape = tuple(map(int, tensor.shape))
        count = int(np.prod(shape, dtype=np.int64))
        typed = STORAGE_NAMES.get(dtype)
        storage = (
            "storage",
            Global("torch", typed) if typed else Global("torch.storage", "UntypedStorage"),
            self.storage_key(tensor),
            "cpu",
            count if typed else count * dtype.itemsize,
        )
        self.write(Global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"))
        self.out.write(pickle.MARK)
        self.write(storage)
        self.out.write(pickle.BINPERSID)
        for value in (0, shape, _contiguous(shape), False, OrderedDict()):
            self.write(value)
        if not typed:
            self.write(Global("torch", TORCH_NAMES[dtype]))
        self.out.write(pickle.TUPLE + pickle.REDUCE)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
