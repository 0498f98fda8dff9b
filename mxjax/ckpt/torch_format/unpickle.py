"""A reader of pickles that builds data and runs nothing.

Python's own unpickler imports names and calls them. This one is a stack machine for the opcodes of
protocols 0 to 5: it looks names up in :mod:`mxjax.ckpt.torch_format.allowed`, and what a pickle
"calls" becomes data.
"""

from __future__ import annotations

import codecs
import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

from mxjax.ckpt.torch_format import allowed
from mxjax.ckpt.torch_format.values import Record, TorchFormatError

_STOP = pickle.STOP[0]
_U8, _U16, _U32, _U64 = (struct.Struct(code) for code in ("<B", "<H", "<I", "<Q"))
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")


def unpickle(data: bytes, source: str, storage_of: Callable[[Any], Any] | None = None) -> Any:
    """The object that `data` describes, as plain data.

    Args:
      source: what to call it in messages.
      storage_of: gives the object that a persistent id stands for, such as a tensor's storage.

    Raises:
      TorchFormatError: it is damaged, or holds something else than data. The message names it.
    """
    machine = _Machine(data, storage_of)
    try:
        return machine.run()
    except TorchFormatError as error:
        raise TorchFormatError(f"{source} is refused: {error}.") from error
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise TorchFormatError(
            f"{source} is damaged: the pickle in it cannot be read at byte {machine.position} of"
            f" {len(data)} ({type(error).__name__}: {error})."
        ) from error


class _Machine:
    """One run over one pickle. Method names are those of the opcodes in ``pickletools``."""

    def __init__(self, data: bytes, storage_of: Callable[[Any], Any] | None) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # stacks below the marks
        self.memo: dict[int, Any] = {}
        self.storage_of = storage_of

    def run(self) -> Any:
        # The metadata of a large checkpoint has tens of millions of opcodes: this loop and the
        # short methods for the most frequent ones are what its reading costs.
        data = self.data
        while (opcode := data[self.position]) != _STOP:
            self.position += 1
            operation = _OPERATIONS.get(opcode)
            if operation is None:
                raise TorchFormatError(f"opcode {opcode:#x} at byte {self.position - 1} is unknown")
            operation(self)
        if self.outer or len(self.stack) != 1:
            raise TorchFormatError("it ends within an object")
        return self.stack[0]

    # --- reading ---

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if count < 0 or end > len(self.data):
            raise TorchFormatError(f"it ends at byte {len(self.data)}, within an object")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def _number(self, layout: struct.Struct) -> Any:
        (number,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return number

    def _sized(self, layout: struct.Struct) -> bytes:
        return self._take(self._number(layout))

    def _line(self) -> str:
        return self._line_bytes().decode()

    def _line_bytes(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        line = self._take(max(end, self.position) - self.position)
        self._take(1)
        return line

    def _unmark(self) -> list[Any]:
        above, self.stack = self.stack, self.outer.pop()
        return above

    # --- objects ---

    def proto(self) -> None:
        if (version := self._number(_U8)) > pickle.HIGHEST_PROTOCOL:
            raise TorchFormatError(f"it has pickle protocol {version}, which is unknown")

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def binput(self) -> None:
        self.memo[self.data[self.position]] = self.stack[-1]
        self.position += 1

    def binget(self) -> None:
        self.stack.append(self.memo[self.data[self.position]])
        self.position += 1

    def long_binget(self) -> None:
        self.stack.append(self.memo[self._number(_U32)])

    def binint1(self) -> None:
        self.stack.append(self.data[self.position])
        self.position += 1

    def mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._unmark()

    def int_line(self) -> None:
        line = self._line()
        self.stack.append({"00": False, "01": True}[line] if line in ("00", "01") else int(line))

    def string_line(self) -> None:
        # As Python's own unpickler does it; a parser would give way to deep nesting.
        self.stack.append(codecs.escape_decode(self._line_bytes()[1:-1])[0].decode("latin1"))

    def global_line(self) -> None:
        module = self._line()
        self.stack.append(allowed.resolve(module, self._line()))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise TorchFormatError("it names a global by something other than text")
        self.stack.append(allowed.resolve(module, name))

    def inst(self) -> None:
        module = self._line()
        found = allowed.resolve(module, self._line())
        args = tuple(self._unmark())
        self.stack.append(allowed.call(found, args))

    def obj(self) -> None:
        found, *args = self._unmark()
        self.stack.append(allowed.call(found, tuple(args)))

    def reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = allowed.call(self.stack[-1], args)

    def newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = allowed.new(self.stack[-1], args)

    def newobj_ex(self) -> None:
        if self.stack.pop():
            raise TorchFormatError("it makes an object with keyword arguments")
        self.newobj()

    def build(self) -> None:
        state = self.stack.pop()
        match self.stack[-1]:
            case Record() as record:
                record.state = state
            case io.BytesIO() as buffer:
                content, position, _attributes = state
                buffer.write(content)
                buffer.seek(position)
            case dict():
                pass  # attributes of an OrderedDict, such as the versions of torch's modules
            case other:
                raise TorchFormatError(f"it sets the state of a {type(other).__name__}")

    def persistent(self, identifier: Any) -> None:
        if self.storage_of is None:
            raise TorchFormatError("it refers to a storage outside of it")
        self.stack.append(self.storage_of(identifier))

    # --- containers ---

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Record):
            target.items = target.items or []
            target = target.items
        if not isinstance(target, list):
            raise TorchFormatError(f"it appends to a {type(target).__name__}")
        target.extend(values)

    def set_items(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Record):
            target.items = target.items or {}
            target = target.items
        if not isinstance(target, dict) or len(flat) % 2:
            raise TorchFormatError(f"it sets items of a {type(target).__name__}")
        for index in range(0, len(flat), 2):
            target[allowed.key(flat[index])] = flat[index + 1]

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def add_items(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], set):
            raise TorchFormatError(f"it adds to a {type(self.stack[-1]).__name__}")
        self.stack[-1].update(map(allowed.key, values))

    def dict_of_mark(self) -> None:
        flat = self._unmark()
        self.stack.append({})
        self.set_items(flat)

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise TorchFormatError("it makes a tuple out of nothing")
        self.stack[-count:] = [tuple(self.stack[-count:])]


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_Operation = Callable[[_Machine], None]


def _pushing(read: Callable[[_Machine], Any]) -> _Operation:
    def push(machine: _Machine) -> None:
        value = read(machine)  # first: it may replace the stack
        machine.stack.append(value)

    return push


def _putting(index: Callable[[_Machine], int]) -> _Operation:
    def put(machine: _Machine) -> None:
        machine.memo[index(machine)] = machine.stack[-1]

    return put


def _text(layout: struct.Struct) -> _Operation:
    # "surrogatepass" as in Python's own unpickler.
    return _pushing(lambda m: m._sized(layout).decode("utf-8", "surrogatepass"))


_OPERATIONS: dict[int, _Operation] = {
    opcode[0]: operation
    for opcode, operation in {
        pickle.PROTO: _Machine.proto,
        pickle.FRAME: lambda m: m._number(_U64),
        pickle.MARK: _Machine.mark,
        pickle.POP: _Machine.pop,
        pickle.POP_MARK: lambda m: m._unmark(),
        pickle.DUP: _pushing(lambda m: m.stack[-1]),
        pickle.NONE: _pushing(lambda m: None),
        pickle.NEWTRUE: _pushing(lambda m: True),
        pickle.NEWFALSE: _pushing(lambda m: False),
        pickle.INT: _Machine.int_line,
        pickle.LONG: _pushing(lambda m: int(m._line().removesuffix("L"))),
        pickle.FLOAT: _pushing(lambda m: float(m._line())),
        pickle.BININT: _pushing(lambda m: m._number(_I32)),
        pickle.BININT1: _Machine.binint1,
        pickle.BININT2: _pushing(lambda m: m._number(_U16)),
        pickle.LONG1: _pushing(lambda m: _long(m._sized(_U8))),
        pickle.LONG4: _pushing(lambda m: _long(m._sized(_I32))),
        pickle.BINFLOAT: _pushing(lambda m: m._number(_F64)),
        pickle.STRING: _Machine.string_line,
        pickle.UNICODE: _pushing(lambda m: m._line_bytes().decode("raw-unicode-escape")),
        pickle.BINSTRING: _pushing(lambda m: m._sized(_I32).decode("latin1")),
        pickle.SHORT_BINSTRING: _pushing(lambda m: m._sized(_U8).decode("latin1")),
        pickle.BINUNICODE: _text(_U32),
        pickle.SHORT_BINUNICODE: _text(_U8),
        pickle.BINUNICODE8: _text(_U64),
        pickle.BINBYTES: _pushing(lambda m: m._sized(_U32)),
        pickle.SHORT_BINBYTES: _pushing(lambda m: m._sized(_U8)),
        pickle.BINBYTES8: _pushing(lambda m: m._sized(_U64)),
        pickle.BYTEARRAY8: _pushing(lambda m: bytearray(m._sized(_U64))),
        pickle.EMPTY_LIST: _pushing(lambda m: []),
        pickle.EMPTY_DICT: _pushing(lambda m: {}),
        pickle.EMPTY_SET: _pushing(lambda m: set()),
        pickle.EMPTY_TUPLE: _pushing(lambda m: ()),
        pickle.TUPLE1: lambda m: m.tuple_of(1),
        pickle.TUPLE2: lambda m: m.tuple_of(2),
        pickle.TUPLE3: lambda m: m.tuple_of(3),
        pickle.TUPLE: _pushing(lambda m: tuple(m._unmark())),
        pickle.LIST: _pushing(lambda m: m._unmark()),
        pickle.FROZENSET: _pushing(lambda m: frozenset(map(allowed.key, m._unmark()))),
        pickle.DICT: _Machine.dict_of_mark,
        pickle.APPEND: lambda m: m.append([m.stack.pop()]),
        pickle.APPENDS: lambda m: m.append(m._unmark()),
        pickle.SETITEM: _Machine.set_item,
        pickle.SETITEMS: lambda m: m.set_items(m._unmark()),
        pickle.ADDITEMS: lambda m: m.add_items(m._unmark()),
        pickle.GLOBAL: _Machine.global_line,
        pickle.STACK_GLOBAL: _Machine.stack_global,
        pickle.INST: _Machine.inst,
        pickle.OBJ: _Machine.obj,
        pickle.REDUCE: _Machine.reduce,
        pickle.NEWOBJ: _Machine.newobj,
        pickle.NEWOBJ_EX: _Machine.newobj_ex,
        pickle.BUILD: _Machine.build,
        pickle.PERSID: lambda m: m.persistent(m._line()),
        pickle.BINPERSID: lambda m: m.persistent(m.stack.pop()),
        pickle.MEMOIZE: _Machine.memoize,
        pickle.PUT: _putting(lambda m: int(m._line())),
        pickle.BINPUT: _Machine.binput,
        pickle.LONG_BINPUT: _putting(lambda m: m._number(_U32)),
        pickle.GET: _pushing(lambda m: m.memo[int(m._line())]),
        pickle.BINGET: _Machine.binget,
        pickle.LONG_BINGET: _Machine.long_binget,
    }.items()
}
"""What each opcode does. Missing ones (extension registry, out-of-band buffers) are refused."""
