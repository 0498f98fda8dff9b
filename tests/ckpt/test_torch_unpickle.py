"""Pickles that would run something when Python loads them run nothing here, and are refused."""

import os
import pickle
import struct
import subprocess
import time

import numpy as np
import pytest

from mxjax.ckpt.torch_format.unpickle import unpickle
from mxjax.ckpt.torch_format.values import Global, Record, Storage, Tensor, TorchFormatError


class Calls:
    """Pickles as a call of `function` with `args`."""

    def __init__(self, function, *args):
        self.reduced = (function, args)

    def __reduce__(self):
        return self.reduced


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


HOSTILE = {
    # What pickle calls it, and the module's name in Python 2 for the older protocols.
    r"(posix|nt)\.system": lambda: Calls(os.system, "touch HERE"),
    r"(subprocess|commands)\.Popen": lambda: Calls(subprocess.Popen, ["touch", "HERE"]),
    r"builtins\.eval": lambda: Calls(eval, "open('HERE', 'w')"),
    r"builtins\.exec": lambda: Calls(exec, "open('HERE', 'w')"),
    r"builtins\.__import__": lambda: Calls(__import__, "os"),
    r"_?io\.open": lambda: Calls(open, "HERE", "w"),
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", HOSTILE)
def test_a_call_of_a_function_is_refused_by_name(name, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps({"weights": [1], "evil": HOSTILE[name]()}, protocol)
    with pytest.raises(TorchFormatError, match=rf"evil\.pt is refused: it names {name}"):
        unpickle(data, "evil.pt")
    assert list(tmp_path.iterdir()) == []


GETATTR = b"\x80\x02cbuiltins\ngetattr\n"
CRAFTED = {
    "INST": (b"(S'touch HERE'\nios\nsystem\n.", "names os.system"),
    "OBJ": (b"(cos\nsystem\nS'touch HERE'\no.", "names os.system"),
    "dotted name": (b"\x80\x04" + text("builtins") + text("str.__class__") + b"\x93.", "str.__class__"),
    "getattr of a module": (GETATTR + b"cmegatron.core\nos\n" + text("__globals__") + b"\x86R.", "getattr"),
    "getattr of text": (GETATTR + text("a") + text("join") + b"\x86R.", "getattr"),
    "call of a dtype": (b"\x80\x02ctorch\nfloat32\n)R.", "torch.float32, which a checkpoint may name"),
    "call of data": (b"\x80\x02]q\x00)R.", "calls a list"),
    "call of a record": (b"\x80\x02cmegatron.a\nB\n)\x81)R.", "calls a Record"),
    "object of a function": (b"\x80\x02c_codecs\nencode\n)\x81.", "object of _codecs.encode"),
    "state of a class": (b"\x80\x02cmegatron.a\nB\n}b.", "state of a Global"),
    "state of a list": (b"\x80\x02]}b.", "state of a list"),
    "codec that unpacks": (b"\x80\x02c_codecs\nencode\n" + text("a") + text("zip") + b"\x86R.", "encoded as zip"),
    "memory filler": (b"\x80\x02c__builtin__\nbytes\n\x8a\x06\0\0\0\0\0\x01\x85R.", "bytes out of a int"),
    "extension registry": (b"\x80\x02\x82\x01.", "opcode 0x82"),
    "storage outside": (b"\x80\x02" + text("id") + b"Q.", "storage outside"),
    "unknown protocol": (b"\x80\x63N.", "protocol 99"),
    "sparse tensor": (b"\x80\x02ctorch._utils\n_rebuild_sparse_tensor\n.", "_rebuild_sparse_tensor"),
    "deep key": (b"\x80\x02}" + b")" + b"\x85" * 1000 + b"K\x01s.", "nested too deeply"),
    "deep set": (b"\x80\x02cbuiltins\nset\n])" + b"\x85" * 1000 + b"a\x85R.", "nested too deeply"),
    "two objects": (b"\x80\x02NN.", "within an object"),
    "open mark": (b"\x80\x02N(.", "within an object"),
    "huge text": (b"\x80\x02X\xff\xff\xff\xff", "ends at byte"),
    "negative text": (b"\x80\x02T\xff\xff\xff\xff", "ends at byte"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CRAFTED)
def test_a_crafted_pickle_is_refused_with_what_it_tries(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, message = CRAFTED[kind]
    with pytest.raises(TorchFormatError, match=message):
        unpickle(data, "evil.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"\x80\x02", b".", b"a.", b"\x80\x02K\x01a.", b"\x80\x02h\x07."]
)
def test_a_damaged_pickle_is_refused_with_its_source(data):
    with pytest.raises(TorchFormatError, match=r"broken\.pt"):
        unpickle(data, "broken.pt")


def test_a_memo_index_takes_no_memory():
    begin = time.monotonic()
    assert unpickle(b"\x80\x02Nr\xff\xff\xff\xff.", "a.pt") is None
    assert time.monotonic() - begin < 0.5


def test_any_pickle_of_plain_data_is_read_as_python_does():
    generator = np.random.default_rng(0)

    def value(depth):
        kinds = ["int", "float", "str", "bytes", "none", "bool"]
        kinds += ["list", "tuple", "dict", "set"] * (depth < 4)
        match generator.choice(kinds):
            case "int":
                return int(generator.integers(-9, 9)) ** int(generator.integers(1, 40))
            case "float":
                return float(generator.normal())
            case "str":
                return "ä€𝄞\n'"[: generator.integers(0, 6)] * int(generator.integers(1, 80))
            case "bytes":
                return generator.bytes(generator.integers(0, 300))
            case "none":
                return None
            case "bool":
                return bool(generator.integers(2))
            case "list":
                return [value(depth + 1) for _ in range(generator.integers(0, 5))]
            case "tuple":
                return tuple(value(depth + 1) for _ in range(generator.integers(0, 5)))
            case "dict":
                return {f"k{i}": value(depth + 1) for i in range(generator.integers(0, 5))}
            case "set":
                return {int(i) for i in generator.integers(0, 99, 4)}

    for _ in range(60):
        made = [value(0) for _ in range(3)]
        for protocol in range(6):
            found = unpickle(pickle.dumps(made, protocol), "a.pt")
            assert found == made
            assert repr(found) == repr(made) or "{" in repr(made)


def test_objects_that_contain_themselves_are_read():
    made: list = [1]
    made.append(made)
    found = unpickle(pickle.dumps(made), "a.pt")
    assert found[1] is found


def test_classes_of_megatron_become_records_whatever_they_are():
    # An enum, a dataclass, one with __slots__, a subclass of dict: by the opcodes pickle writes.
    data = (
        b"\x80\x02(cmegatron.core.enums\nAttnBackend\nK\x05\x85R"
        b"cmegatron.core.plan\nPlan\n)\x81}" + text("items") + b"]sb"
        b"ctransformer_engine.a\nB\n)\x81N}" + text("x") + b"K\x01s\x86b"
        b"cmegatron.core.d\nD\n)\x81" + text("k") + b"K\x02st."
    )
    enum, plan, slots, mapping = unpickle(data, "a.pt")
    assert (enum.cls, enum.args, enum.called) == (
        Global("megatron.core.enums", "AttnBackend"),
        (5,),
        True,
    )
    assert plan.fields == {"items": []}
    assert slots.get("x") == 1
    assert mapping.items == {"k": 2}


def test_enum_members_named_through_getattr_are_read():
    data = GETATTR + b"cmegatron.core.enums\nAttnBackend\n" + text("auto") + b"\x86R."
    member = unpickle(data, "a.pt")
    assert isinstance(member, Record)
    assert (member.cls.name, member.args) == ("AttnBackend", ("auto",))


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(0, (5,), (1,)), (1, (2, 2), (2, 1)), (4, (1,), (1,)), (0, (2,), (4,)), (-1, (1,), (1,)),
     (0, (2,), (-1,)), (0, (-2,), (1,)), (0, (2, 2), (1,)), (0, ("2",), (1,)), (0, (2**70,), (1,))],
)  # fmt: skip
def test_a_tensor_that_reaches_out_of_its_storage_is_refused(offset, shape, strides):
    storage = Storage(
        "0", np.dtype(np.float32), 16, lambda start, stop: np.zeros(stop - start, np.uint8)
    )
    with pytest.raises(TorchFormatError, match="tensor of shape"):
        Tensor.view(storage, storage.dtype, offset, shape, strides)
