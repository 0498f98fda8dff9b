"""The names that a checkpoint may hold, and what becomes of each. Everything else is refused.

Nothing here is imported from torch or megatron: a class turns into a
:class:`~mxjax.ckpt.torch_format.values.Record`, a function of torch that rebuilds a tensor into
our own few lines.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from mxjax.ckpt.torch_format.values import (
    DTYPES,
    STORAGES,
    Global,
    Record,
    Tensor,
    TorchFormatError,
    numpy_dtype,
)

_OPEN_PACKAGES = (
    "megatron",
    "transformer_engine",
    "transformer_engine_torch",
    "nvidia_resiliency_ext",
)
"""Their classes (arguments, enums, plans) become records, whatever they are called."""

_DCP = "torch.distributed.checkpoint"

_RECORDS = frozenset(
    {
        "argparse.Namespace",
        "types.SimpleNamespace",
        "datetime.datetime",
        "datetime.timedelta",
        "pathlib.PosixPath",
        "signal.Signals",
        "numpy.dtype",
        "torch.device",
        f"{_DCP}.filesystem._StorageInfo",
        f"{_DCP}.filesystem._StoragePrefix",
        f"{_DCP}.metadata.BytesStorageMetadata",
        f"{_DCP}.metadata.ChunkStorageMetadata",
        f"{_DCP}.metadata.Metadata",
        f"{_DCP}.metadata.MetadataIndex",
        f"{_DCP}.metadata.StorageMeta",
        f"{_DCP}.metadata.TensorProperties",
        f"{_DCP}.metadata.TensorStorageMetadata",
        f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
        f"{_DCP}.planner.BytesIOWriteData",
        f"{_DCP}.planner.SavePlan",
        f"{_DCP}.planner.TensorWriteData",
        f"{_DCP}.planner.WriteItem",
        f"{_DCP}.planner.WriteItemType",
    }
)
"""Classes kept as records. "Calling" one is kept too, and never done."""

_MENTIONED = frozenset(
    {
        "builtins.bool",
        "builtins.dict",
        "builtins.float",
        "builtins.int",
        "builtins.list",
        "builtins.str",
        "numpy.ndarray",
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
        "torch.storage.TypedStorage",
        "torch.storage.UntypedStorage",
        *(f"torch.{name}" for name in DTYPES),
        *(f"torch.{name}" for name in STORAGES),
    }
)
"""Names that a checkpoint may mention but not call."""

_MAX_KEY_DEPTH = 8

_OLD_MODULES = {"__builtin__": "builtins"}
"""Protocol 2 writes the module names of Python 2."""


def resolve(module: Any, name: Any) -> Global:
    """The global of that name, not imported.

    Raises:
      TorchFormatError: it is not on the list.
    """
    found = Global(_OLD_MODULES.get(module, module), name)
    path = str(found)
    if path in _CALLS or path in _MENTIONED or _is_record(found):
        return found
    raise TorchFormatError(
        f"it names {path}, which is not on the list of what a checkpoint may hold"
        " (mxjax/ckpt/torch_format/allowed.py); nothing of it was run. If you trust the file, load"
        " it where it was made and save it again with tensors and plain values only"
    )


def call(function: Any, args: Any) -> Any:
    """What becomes of a call in a pickle: data.

    Raises:
      TorchFormatError: `function` may not be called, or not with `args`.
    """
    if not isinstance(function, Global) or not isinstance(args, tuple):
        raise TorchFormatError(f"it calls a {type(function).__name__}, which is no function")
    if handler := _CALLS.get(str(function)):
        return handler(*args)
    if _is_record(function):
        return Record(function, args, called=True)
    raise TorchFormatError(f"it calls {function}, which a checkpoint may name but not call")


def new(cls: Any, args: Any) -> Any:
    """What becomes of an object made without calling its class.

    Raises:
      TorchFormatError: it is not one of the classes kept as records.
    """
    if isinstance(cls, Global) and isinstance(args, tuple):
        if _is_record(cls):
            return Record(cls, args)
        if str(cls) in ("collections.OrderedDict", "_io.BytesIO"):
            return call(cls, args)
    raise TorchFormatError(f"it makes an object of {cls}, which a checkpoint may not")


def key(value: Any, depth: int = 0) -> Any:
    """`value`, fit to be the key of a dictionary or an element of a set.

    Raises:
      TorchFormatError: tuples are nested so deep that hashing would overflow Python's C stack.
    """
    if isinstance(value, tuple | frozenset):
        if depth == _MAX_KEY_DEPTH:
            raise TorchFormatError("a dictionary key is nested too deeply")
        for part in value:
            key(part, depth + 1)
    return value


def _is_record(name: Global) -> bool:
    return str(name) in _RECORDS or name.module.partition(".")[0] in _OPEN_PACKAGES


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    return Tensor.view(storage, storage.dtype, offset, shape, strides)


def _tensor_of_newer_dtype(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Any,
    *_: Any,
) -> Tensor:
    return Tensor.view(storage, DTYPES[dtype.name], offset, shape, strides)


def _tensor_with_attributes(function: Any, _cls: Any, args: Any, _state: Any) -> Tensor:
    # The attributes mean something to the program that set them only.
    if function not in (
        Global("torch._utils", "_rebuild_tensor_v2"),
        Global("torch._utils", "_rebuild_tensor_v3"),
    ):
        raise TorchFormatError(f"it holds a tensor made by {function}, a kind that is not read")
    return call(function, args)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _dict(items: Any = (), *_: Any) -> dict[Any, Any]:
    pairs = items.items() if isinstance(items, dict) else items
    return {key(name): value for name, value in pairs}


def _default_dict(_factory: Any = None, items: Any = (), *_: Any) -> dict[Any, Any]:
    return _dict(items)


def _set(items: Any = ()) -> set[Any]:
    return {key(item) for item in items}


def _frozen_set(items: Any = ()) -> frozenset[Any]:
    return frozenset(_set(items))


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    # How protocol 2 spells bytes. Other codecs of Python compress, or transform text.
    if codecs.lookup(encoding).name not in ("iso8859-1", "utf-8", "ascii"):
        raise TorchFormatError(f"it holds bytes encoded as {encoding}")
    return text.encode(encoding)


def _bytes(data: Any = b"", encoding: str = "latin1") -> bytes:
    # bytes(n) would make n zeros: a few bytes of pickle could fill the memory.
    if isinstance(data, str):
        return _encoded(data, encoding)
    if not isinstance(data, bytes | bytearray | list | tuple):
        raise TorchFormatError(f"it makes bytes out of a {type(data).__name__}")
    return bytes(data)


def _byte_array(*args: Any) -> bytearray:
    return bytearray(_bytes(*args))


def _enum_member(cls: Any, name: Any) -> Record:
    # Some releases of Python 3.11 pickle a member of an enum as getattr(class, name).
    plain = isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name)
    if not (isinstance(cls, Global) and _is_record(cls) and plain):
        raise TorchFormatError("it calls builtins.getattr on something other than an enum")
    return Record(cls, (name,), called=True)


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    if isinstance(data, str):
        data = data.encode("latin1")
    return np.frombuffer(data, numpy_dtype(dtype))[0]


def _numpy_array(*args: Any) -> Record:
    return Record(Global("numpy._core.multiarray", "_reconstruct"), args, called=True)


def _layout(name: Any) -> Record:
    if name != "torch.strided":
        raise TorchFormatError(f"it holds a tensor of layout {name}; only dense ones are read")
    return Record(Global("torch.serialization", "_get_layout"), (name,), called=True)


_CALLS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _encoded,
    "_io.BytesIO": io.BytesIO,
    "builtins.bytearray": _byte_array,
    "builtins.bytes": _bytes,
    "builtins.complex": complex,
    "builtins.frozenset": _frozen_set,
    "builtins.getattr": _enum_member,
    "builtins.set": _set,
    "collections.Counter": _dict,
    "collections.OrderedDict": _dict,
    "collections.defaultdict": _default_dict,
    "numpy._core.multiarray._reconstruct": _numpy_array,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "numpy.core.multiarray._reconstruct": _numpy_array,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "torch.Size": tuple,
    "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_newer_dtype,
    "torch.serialization._get_layout": _layout,
}
"""Functions that a checkpoint calls, and what we do instead."""
