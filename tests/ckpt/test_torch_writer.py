"""Files we write, held against what torch's own look like; torch_interop.py asks torch itself."""

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from mxjax.ckpt.atomic import new_file, new_folder
from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.leaves import plain
from mxjax.ckpt.torch_format.archive import TorchArchive
from mxjax.ckpt.torch_format.archive_writer import save, write_archive
from mxjax.ckpt.torch_format.pickle_writer import dump
from mxjax.ckpt.torch_format.unpickle import unpickle
from mxjax.ckpt.torch_format.values import DTYPES, Global, LazyTensor, Record

FILES = Path(__file__).parent.parent / "data" / "torch_files"
RANK = FILES / "megatron/dense_tp2/torch/iter_0000010/mp_rank_00/model_optim_rng.pt"


@pytest.mark.parametrize("name", ["dtypes.pt", "views.pt", "objects.pt"])
def test_a_file_of_torch_written_anew_holds_the_same(name, tmp_path):
    before = TorchArchive(FILES / name).load()
    save(tmp_path / name, before)
    assert plain(TorchArchive(tmp_path / name).load()) == plain(before)


def test_a_file_of_megatron_written_anew_holds_the_same(tmp_path):
    before = TorchArchive(RANK).load()
    save(tmp_path / "a.pt", before)
    assert plain(TorchArchive(tmp_path / "a.pt").load()) == plain(before)


def test_entries_are_those_of_torch_in_the_same_order(tmp_path):
    save(tmp_path / "dtypes.pt", TorchArchive(FILES / "dtypes.pt").load())
    ours = zipfile.ZipFile(tmp_path / "dtypes.pt").namelist()
    theirs = zipfile.ZipFile(FILES / "dtypes.pt").namelist()
    # An id of the content, which torch does not need.
    assert ours == [name for name in theirs if not name.endswith("serialization_id")]


def test_the_pickle_has_the_names_texts_and_numbers_of_that_of_torch(tmp_path):
    def arguments(path):
        pickled = zipfile.ZipFile(path).read("dtypes/data.pkl")
        kinds = ("BINUNICODE", "GLOBAL", "BININT1", "PROTO")
        return {(op.name, arg) for op, arg, _ in pickletools.genops(pickled) if op.name in kinds}

    save(tmp_path / "dtypes.pt", TorchArchive(FILES / "dtypes.pt").load())
    assert arguments(tmp_path / "dtypes.pt") == arguments(FILES / "dtypes.pt")


WEIGHTS_ONLY = {
    "PROTO", "GLOBAL", "NEWOBJ", "REDUCE", "BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS",
    "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "NONE", "NEWFALSE", "NEWTRUE", "EMPTY_TUPLE",
    "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "BINPERSID", "BININT", "BININT1", "BININT2",
    "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "LONG1", "BINGET", "LONG_BINGET", "BINPUT",
    "LONG_BINPUT", "STOP",
}  # fmt: skip
"""What torch.load(weights_only=True) knows, from torch/_weights_only_unpickler.py of 2.13."""


def test_only_opcodes_that_torch_reads_safely_are_written(tmp_path):
    for name in ("dtypes.pt", "views.pt", "objects.pt"):
        save(tmp_path / name, TorchArchive(FILES / name).load())
        pickled = zipfile.ZipFile(tmp_path / name).read(f"{Path(name).stem}/data.pkl")
        assert {op.name for op, _, _ in pickletools.genops(pickled)} <= WEIGHTS_ONLY


def test_tensors_are_aligned_to_64_bytes_and_checksums_hold(tmp_path):
    path = tmp_path / "a.pt"
    save(path, {f"w{i}": np.full(i, 255, np.uint8) for i in range(1, 200, 7)})
    data = path.read_bytes()
    archive = zipfile.ZipFile(path)
    assert archive.testzip() is None
    for info in archive.infolist():
        name, extra = np.frombuffer(data, "<u2", 2, info.header_offset + 26).tolist()
        begin = info.header_offset + 30 + name + extra
        assert begin % 64 == 0
        assert data[begin : begin + info.file_size] == archive.read(info)


def test_the_same_content_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save(tmp_path / name / "x.pt", {"w": np.arange(5.0), "s": OrderedDict(a=1)})
    assert (tmp_path / "a/x.pt").read_bytes() == (tmp_path / "b/x.pt").read_bytes()


def test_an_archive_within_a_file_is_complete_in_itself(tmp_path):
    path = tmp_path / "several"
    with path.open("wb") as file:
        file.write(b"before")
        lengths = [write_archive(file, np.full(3, value)) for value in (1, 2)]
    second = TorchArchive(path, 6 + lengths[0], lengths[1]).load()
    np.testing.assert_array_equal(second.numpy(), 2)
    part = io.BytesIO(path.read_bytes()[6 : 6 + lengths[0]])
    assert zipfile.ZipFile(part).testzip() is None


def test_arrays_of_any_layout_are_written_contiguous(tmp_path):
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    made = {
        "t": base.T,
        "s": base[:, ::2, 1::2],
        "b": np.broadcast_to(base[0, 0], (2, 4)),
        "z": np.float32(3.0),
    }
    save(tmp_path / "a.pt", made)
    found = TorchArchive(tmp_path / "a.pt").load()
    for name in "tsb":
        np.testing.assert_array_equal(found[name].numpy(), made[name], strict=True)
    assert found["z"] == 3.0


def test_one_array_that_stands_twice_is_stored_once(tmp_path):
    array = np.zeros(10_000)
    save(tmp_path / "a.pt", {"a": array, "b": array})
    found = TorchArchive(tmp_path / "a.pt").load()
    assert found["a"].storage is found["b"].storage
    assert (tmp_path / "a.pt").stat().st_size < 90_000


def test_records_namespaces_and_enums_are_written_as_their_classes_pickle():
    enum = Record(Global("megatron.core.enums", "AttnBackend"), (5,), called=True)
    args = Record(Global("argparse", "Namespace"), state={"backend": enum, "again": enum})
    found = unpickle(dump(args), "a.pt")
    assert found.fields["backend"] is found.fields["again"]
    assert (found.fields["backend"].args, found.fields["backend"].called) == ((5,), True)


def test_pythons_own_unpickler_reads_plain_values_alike():
    made = {
        "a": [1, -5, 2**31, 2**40, -(2**200), 1.5, True, None], "b": ("x", "ü" * 300, b"\x00\xff", bytearray(b"q")),
        "c": {1, 2}, "d": frozenset({3}), "e": 1 + 2j, "f": OrderedDict(z=1, a=2), (1, "k"): io.BytesIO(b"xyz"),
    }  # fmt: skip
    found = pickle.loads(dump(made))
    buffers = [d.pop((1, "k")).getvalue() for d in (found, made)]
    assert found == made
    assert buffers == [b"xyz", b"xyz"]
    assert list(found["f"]) == ["z", "a"]


@pytest.mark.parametrize("value", [object(), lambda: 0, np.array(["text"]), range(3)])
def test_what_cannot_be_written_is_named_and_leaves_nothing(value, tmp_path):
    with pytest.raises(CheckpointFormatError, match=r"cannot be written|no dtype"):
        save(tmp_path / "a.pt", {"bad": value})
    assert list(tmp_path.iterdir()) == []


def test_a_lazy_tensor_that_is_not_as_declared_leaves_nothing(tmp_path):
    wrong = LazyTensor((4,), DTYPES["bfloat16"], lambda: np.zeros(5, DTYPES["bfloat16"]))
    with pytest.raises(CheckpointFormatError, match=r"declared as \(4,\) bfloat16 is \(5,\)"):
        save(tmp_path / "a.pt", wrong)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_or_folder_is_not_replaced(tmp_path):
    (tmp_path / "a.pt").write_text("mine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileExistsError, match="Move it away"):
        save(tmp_path / "a.pt", 1)
    with pytest.raises(FileExistsError, match="Move it away"), new_folder(tmp_path / "folder"):
        pass
    assert (tmp_path / "a.pt").read_text() == "mine"


def test_names_appear_when_the_block_ends(tmp_path):
    with new_file(tmp_path / "f") as file, new_folder(tmp_path / "d") as folder:
        file.write(b"x")
        (folder / "inside").write_text("y")
        assert not (tmp_path / "f").exists()
        assert not (tmp_path / "d").exists()
    assert (tmp_path / "f").read_bytes() == b"x"
    assert (tmp_path / "d/inside").read_text() == "y"
    assert len(list(tmp_path.iterdir())) == 2
