"""The judge of mxjax/ckpt/torch_format is torch itself. To be run by hand, in two environments:

    python tests/ckpt/torch_interop.py make            with torch: writes tests/data/torch_files/
    python tests/ckpt/torch_interop.py rewrite FOLDER  with mxjax: writes the same anew to FOLDER
    python tests/ckpt/torch_interop.py check FOLDER    with torch: loads FOLDER and compares

The files in tests/data/torch_files/ were made with torch 2.13.0 on Python 3.11. `expected.npz` has
the bytes of each tensor as torch gives them.
"""

import argparse
import io
import os
import sys
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np

try:
    import torch
    import torch.distributed.checkpoint as dcp
except ImportError:  # the project's environment, where only `rewrite` works
    torch = dcp = None

FILES = Path(__file__).parent.parent / "data" / "torch_files"
DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint64", "uint32",
    "uint16", "uint8", "bool", "complex64", "complex128",
]  # fmt: skip


def tensors_of_all_dtypes() -> dict[str, "torch.Tensor"]:
    numbers = torch.tensor([[0.5, 1.0, 2.0, 4.0], [8.0, 16.0, 32.0, 1.0], [2.0, 0.0, 4.0, 96.0]])
    return {name: numbers.to(getattr(torch, name)) for name in DTYPES}


def views() -> dict[str, "torch.Tensor"]:
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    fp8 = torch.arange(12.0).to(torch.float8_e4m3fn)
    return {
        "base": base,
        "slice": base[1],
        "column": base[:, 2, :],
        "transposed": base.permute(2, 0, 1),
        "stepped": base[::2, :, 1::3],
        "expanded": base[0, 0, :2, None].expand(2, 3),
        "scalar": torch.tensor(7.25, dtype=torch.float64),
        "element": base[2, 3, 4],
        "empty": torch.empty(0, 5),
        "empty_view": base[:, :0],
        "parameter": torch.nn.Parameter(torch.arange(4.0)),
        "fp8_tail": fp8[5:],
        "channels_last": torch.arange(24.0)
        .reshape(1, 2, 3, 4)
        .to(memory_format=torch.channels_last),
    }


def objects() -> dict:
    state = torch.nn.Linear(2, 1, bias=False).state_dict()
    state["weight"].copy_(torch.tensor([[1.0, 2.0]]))
    attributed = torch.arange(3.0)
    attributed.tensor_model_parallel = True
    return {
        "numbers": [0, 1, 255, 256, 65536, -1, 2**40, -(2**70), 1.5, float("inf"), True, None],
        "text": ["", "straße", "x" * 300],
        "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
        "sets": [{1, 2}, frozenset({3})],
        "complex": 1 + 2j,
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "dicts": [
            OrderedDict(a=1),
            defaultdict(list, {"a": [1]}),
            Counter("aab"),
            {(torch.bfloat16, 1): 2},
        ],
        "state": state,
        "args": argparse.Namespace(num_layers=4, params_dtype=torch.bfloat16, nested={"a": [1]}),
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "numpy": np.arange(6, dtype=np.int16).reshape(2, 3),
        "numpy_scalar": np.float32(1.5),
        "buffer": io.BytesIO(b"extra state"),
        "attributed": attributed,
        "shared": [attributed, attributed],
    }


def expected() -> dict[str, np.ndarray]:
    """Bytes of each tensor in logical order."""
    found = {f"dtypes/{name}": tensor for name, tensor in tensors_of_all_dtypes().items()}
    found |= {f"views/{name}": tensor.detach() for name, tensor in views().items()}
    return {name: raw(tensor) for name, tensor in found.items()}


def raw(tensor: "torch.Tensor") -> np.ndarray:
    return np.frombuffer(bytes(tensor.contiguous().clone().untyped_storage()), np.uint8)


def make() -> None:
    FILES.mkdir(parents=True, exist_ok=True)
    torch.save(tensors_of_all_dtypes(), FILES / "dtypes.pt")
    torch.save(views(), FILES / "views.pt")
    torch.save(objects(), FILES / "objects.pt")
    torch.save(views(), FILES / "legacy.pt", _use_new_zipfile_serialization=False)
    np.savez(FILES / "expected.npz", **expected())
    os.chdir(FILES)  # the path that is given to the writer is stored in the file
    state = {
        **tensors_of_all_dtypes(),
        "entry": ["plain", {"step": 3}],
        "scalar": torch.tensor(2.5),
    }
    dcp.save(
        state,
        storage_writer=dcp.FileSystemWriter("dcp"),
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )


def rewrite(folder: Path) -> None:
    from mxjax.ckpt.torch_format.archive import TorchArchive
    from mxjax.ckpt.torch_format.archive_writer import save
    from mxjax.ckpt.torch_format.distributed import DistCheckpoint
    from mxjax.ckpt.torch_format.distributed_writer import DistWriter
    from mxjax.ckpt.torch_format.values import LazyTensor

    folder.mkdir(parents=True)
    for name in ("dtypes", "views", "objects"):
        save(folder / f"{name}.pt", TorchArchive(FILES / f"{name}.pt").load())
    plain = TorchArchive(FILES / "objects.pt").load()
    for key in ("args", "device", "numpy", "buffer", "sets", "dicts"):
        del plain[key]
    save(folder / "weights_only.pt", plain)
    stored = DistCheckpoint(FILES / "dcp")
    with DistWriter(folder / "dcp", file_bytes=4000) as writer:
        for name, entry in stored.byte_entries.items():
            writer.add_object(name, entry.load())
        for name, tensor in stored.tensors.items():
            if not tensor.shape:
                writer.add(name, tensor)
                continue
            array = tensor.numpy()
            for row, column in ((0, 0), (0, 3), (2, 0), (2, 3)):
                part = array[row : row + 2 if row == 0 else 3, column : 3 if column == 0 else 4]
                lazy = LazyTensor(part.shape, part.dtype, lambda part=part: part)
                writer.add_chunk(name, tensor.shape, (row, column), lazy)


def check(folder: Path) -> None:
    for name, made in (("dtypes", tensors_of_all_dtypes()), ("views", views())):
        for options in ({}, {"mmap": True}):
            loaded = torch.load(folder / f"{name}.pt", weights_only=True, **options)
            for key, tensor in made.items():
                same(f"{name}/{key}", loaded[key], tensor.detach())
    compare("weights_only", torch.load(folder / "weights_only.pt", weights_only=True), objects())
    compare("objects", torch.load(folder / "objects.pt", weights_only=False), objects())
    made = tensors_of_all_dtypes()
    state = {name: torch.empty_like(tensor) for name, tensor in made.items()}
    state |= {"scalar": torch.tensor(0.0), "entry": io.BytesIO()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder / "dcp"), no_dist=True)
    for name, tensor in made.items():
        same(f"dcp/{name}", state[name], tensor)
    same("dcp/scalar", state["scalar"], torch.tensor(2.5))
    assert state["entry"] == ["plain", {"step": 3}], state["entry"]
    print(f"torch {torch.__version__} reads {folder} as it should")


def compare(name: str, loaded: dict, made: dict) -> None:
    for key, value in loaded.items():
        wanted = made[key]
        if isinstance(wanted, torch.Tensor):
            same(f"{name}/{key}", value, wanted)
        elif key == "shared":
            assert value[0].data_ptr() == value[1].data_ptr()
        elif key == "state":
            same("state/weight", value["weight"], wanted["weight"])
        elif isinstance(wanted, np.ndarray):
            np.testing.assert_array_equal(value, wanted, strict=True)
        elif isinstance(wanted, io.BytesIO):
            assert value.getvalue() == wanted.getvalue()
        else:
            assert value == wanted, (name, key, value)


def same(name: str, loaded: "torch.Tensor", made: "torch.Tensor") -> None:
    assert (loaded.shape, loaded.dtype) == (made.shape, made.dtype), name
    assert bytes(raw(loaded)) == bytes(raw(made)), name


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make"]:
            make()
        case ["rewrite", folder]:
            rewrite(Path(folder))
        case ["check", folder]:
            check(Path(folder))
        case _:
            sys.exit(__doc__)
