"""Reading files that the real torch.save wrote (see torch_interop.py), and those that are not."""

import argparse
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.torch_format.archive import TorchArchive
from mxjax.ckpt.torch_format.archive_writer import save
from mxjax.ckpt.torch_format.values import DTYPES, Global, Record, Tensor, as_numpy

FILES = Path(__file__).parent.parent / "data" / "torch_files"
RANK = FILES / "megatron/dense_tp2/torch/iter_0000010/mp_rank_00"


@pytest.fixture(scope="module")
def expected():
    with np.load(FILES / "expected.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_has_the_bytes_that_torch_says(name, expected):
    tensor = TorchArchive(FILES / "dtypes.pt").load()[name]
    array = tensor.numpy()
    assert (tensor.shape, tensor.dtype, array.dtype) == ((3, 4), DTYPES[name], DTYPES[name])
    assert array.tobytes() == expected[f"dtypes/{name}"].tobytes()


def test_views_have_the_shape_and_bytes_that_torch_says(expected):
    views = TorchArchive(FILES / "views.pt").load()
    shapes = {name: tensor.shape for name, tensor in views.items()}
    assert shapes == {
        "base": (3, 4, 5), "slice": (4, 5), "column": (3, 5), "transposed": (5, 3, 4),
        "stepped": (2, 4, 2), "expanded": (2, 3), "scalar": (), "element": (), "empty": (0, 5),
        "empty_view": (3, 0, 5), "parameter": (4,), "fp8_tail": (7,), "channels_last": (1, 2, 3, 4),
    }  # fmt: skip
    for name, tensor in views.items():
        assert tensor.numpy().shape == tensor.shape
        assert tensor.numpy().tobytes() == expected[f"views/{name}"].tobytes(), name
    base, stepped = views["base"].numpy(), views["stepped"].numpy()
    np.testing.assert_array_equal(stepped, base[::2, :, 1::3])


def test_tensors_that_shared_a_storage_still_do_and_cannot_be_written():
    views = TorchArchive(FILES / "views.pt").load()
    assert views["base"].storage is views["transposed"].storage
    assert views["base"].storage is not views["scalar"].storage
    with pytest.raises(ValueError, match="read-only"):
        views["base"].numpy()[0] = 1


def test_plain_values_come_back_as_they_were():
    found = TorchArchive(FILES / "objects.pt").load()
    assert found["numbers"] == [
        0, 1, 255, 256, 65536, -1, 2**40, -(2**70), 1.5, float("inf"), True, None,
    ]  # fmt: skip
    assert found["text"] == ["", "straße", "x" * 300]
    assert found["bytes"] == [b"", b"\x00\xff", bytearray(b"ab")]
    assert found["sets"] == [{1, 2}, frozenset({3})]
    assert found["complex"] == 1 + 2j
    assert found["tuples"] == [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]
    assert found["dicts"] == [
        {"a": 1},
        {"a": [1]},
        {"a": 2, "b": 1},
        {(Global("torch", "bfloat16"), 1): 2},
    ]
    assert found["size"] == (2, 3)
    assert found["numpy_scalar"] == np.float32(1.5)
    assert found["buffer"].getvalue() == b"extra state"
    np.testing.assert_array_equal(found["state"]["weight"].numpy(), [[1.0, 2.0]])


def test_classes_of_other_programs_come_back_as_records():
    found = TorchArchive(FILES / "objects.pt").load()
    args = found["args"]
    assert not isinstance(args, argparse.Namespace)
    assert args.cls == Global("argparse", "Namespace")
    assert args.fields == {
        "num_layers": 4,
        "params_dtype": Global("torch", "bfloat16"),
        "nested": {"a": [1]},
    }
    np.testing.assert_array_equal(
        as_numpy(found["numpy"]), np.arange(6, dtype=np.int16).reshape(2, 3)
    )
    assert (found["device"].cls, found["device"].args) == (Global("torch", "device"), ("cpu",))


def test_tensors_with_python_attributes_are_read_and_one_object_stays_one():
    found = TorchArchive(FILES / "objects.pt").load()
    np.testing.assert_array_equal(found["attributed"].numpy(), [0, 1, 2])
    assert found["shared"][0] is found["shared"][1] is found["attributed"]


def test_a_file_of_megatron_is_read_without_megatron():
    found = TorchArchive(RANK / "model_optim_rng.pt").load()
    backend = found["args"].get("attention_backend")
    assert isinstance(backend, Record)
    assert (backend.cls.name, backend.args) == ("AttnBackend", (5,))
    assert found["iteration"] == 10
    weight = found["model"]["embedding.word_embeddings.weight"]
    assert (weight.shape, weight.dtype) == ((128, 32), DTYPES["bfloat16"])
    random = found["rng_state"][0]["np_rng_state"]
    assert as_numpy(random[1]).shape == (624,)
    moments = TorchArchive(RANK / "distrib_optim.pt").load()
    assert isinstance(
        moments[0][Global("torch", "bfloat16"), Global("torch", "float32")]["param"], Tensor
    )


def test_opening_a_large_file_reads_no_tensor(tmp_path):
    path = tmp_path / "large.pt"
    save(path, {"large": np.zeros(1 << 24, np.uint8), "small": np.ones(4, np.float32)})
    tracemalloc.start()
    found = TorchArchive(path).load()
    np.testing.assert_array_equal(found["small"].numpy(), 1)
    mapped = found["large"].numpy()
    assert mapped[-1] == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("name", ["objects.pt", "views.pt"])
def test_a_file_truncated_anywhere_is_refused_by_name(name, tmp_path):
    data = (FILES / name).read_bytes()
    path = tmp_path / name
    for length in [0, 1, 3, 4, 29, *range(30, len(data), 41), len(data) - 22, len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointFormatError, match=name):
            TorchArchive(path).load()


def test_a_file_with_any_byte_of_its_directory_or_pickle_changed_never_fails_otherwise(tmp_path):
    data = (FILES / "objects.pt").read_bytes()
    path = tmp_path / "flipped.pt"
    generator = np.random.default_rng(0)
    for position in generator.permutation(len(data))[:600]:
        flipped = bytearray(data)
        flipped[position] ^= int(generator.integers(1, 256))
        path.write_bytes(flipped)
        try:
            for value in TorchArchive(path).load().values():
                if isinstance(value, Tensor):
                    value.numpy()
        except CheckpointFormatError as error:
            assert "flipped.pt" in str(error)  # noqa: PT017


def test_a_file_that_shrank_after_it_was_opened_is_refused(tmp_path):
    path = tmp_path / "shrunk.pt"
    save(path, {"a": np.arange(100_000)})
    tensor = TorchArchive(path).load()["a"]
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointFormatError, match="truncated"):
        tensor.numpy()


def test_checksums_find_a_flipped_bit(tmp_path):
    data = bytearray((FILES / "views.pt").read_bytes())
    assert TorchArchive(FILES / "views.pt").damaged() == []
    archive = zipfile.ZipFile(FILES / "views.pt")
    header = archive.getinfo("views/data/0").header_offset
    data[data.index(np.float32(59).tobytes(), header)] ^= 1  # the last number of the first storage
    (tmp_path / "bad.pt").write_bytes(data)
    assert TorchArchive(tmp_path / "bad.pt").damaged() == ["data/0"]


def repacked(path, change):
    """views.pt, with each entry (name, bytes) as `change` makes it; None leaves it out."""
    with zipfile.ZipFile(FILES / "views.pt") as source, zipfile.ZipFile(path, "w") as target:
        for info in source.infolist():
            if (made := change(info.filename, source.read(info))) is not None:
                target.writestr(info.filename, made)
    return path


FOREIGN = {
    "legacy": (lambda p: p.write_bytes((FILES / "legacy.pt").read_bytes()), "before 1.6"),
    "tar": (lambda p: p.write_bytes(b"a".ljust(257, b"\0") + b"ustar" + bytes(600)), "tar archive"),
    "pickle": (lambda p: p.write_bytes(b"\x80\x04N."), "bare pickle"),
    "lfs": (lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS"),
    "hdf5": (lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n"), "HDF5"),
    "text": (lambda p: p.write_bytes(b"hello"), "not a file of torch.save"),
    "other zip": (lambda p: zipfile.ZipFile(p, "w").writestr("a/b.txt", "x"), "without data.pkl"),
    "torchscript": (
        lambda p: repacked(p, lambda n, d: d) and zipfile.ZipFile(p, "a").writestr("views/constants.pkl", b""),
        "TorchScript",
    ),
    "big endian": (lambda p: repacked(p, lambda n, d: b"big" if n.endswith("byteorder") else d), "byte order"),
    "version": (lambda p: repacked(p, lambda n, d: b"99\n" if n.endswith("/version") else d), "version 99"),
    "no version": (lambda p: repacked(p, lambda n, d: None if n.endswith("/version") else d), "version missing"),
    "storage gone": (lambda p: repacked(p, lambda n, d: None if n.endswith("data/1") else d), "storage 1"),
    "storage short": (lambda p: repacked(p, lambda n, d: d[:-4] if n.endswith("data/0") else d), "240 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_is_not_ours_to_read_is_refused_with_what_it_is(kind, tmp_path):
    make, message = FOREIGN[kind]
    path = tmp_path / "foreign.pt"
    make(path)
    with pytest.raises(CheckpointFormatError, match=message) as error:
        TorchArchive(path).load()
    assert "foreign.pt" in str(error.value)


def test_compressed_encrypted_and_doubled_entries_are_refused(tmp_path):
    compressed = tmp_path / "compressed.pt"
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02N." * 100)
    with pytest.raises(CheckpointFormatError, match=r"data\.pkl is compressed"):
        TorchArchive(compressed)
    data = bytearray((FILES / "views.pt").read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "encrypted.pt").write_bytes(data)
    with pytest.raises(CheckpointFormatError, match="encrypted"):
        TorchArchive(tmp_path / "encrypted.pt")
    doubled = tmp_path / "doubled.pt"
    with zipfile.ZipFile(doubled, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02N.")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a/data.pkl", b"\x80\x02K\x01.")
    with pytest.raises(CheckpointFormatError, match="two entries"):
        TorchArchive(doubled)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointFormatError, match=r"absent\.pt cannot be read: No such file"):
        TorchArchive(tmp_path / "absent.pt")
