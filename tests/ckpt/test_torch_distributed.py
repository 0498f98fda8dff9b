"""Folders of torch.distributed.checkpoint, read and written; real ones are the judge of reading."""

import pickle
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.torch_format.archive import TorchArchive
from mxjax.ckpt.torch_format.distributed import DistCheckpoint
from mxjax.ckpt.torch_format.distributed_writer import DistWriter
from mxjax.ckpt.torch_format.pickle_writer import dump
from mxjax.ckpt.torch_format.unpickle import unpickle
from mxjax.ckpt.torch_format.values import DTYPES, Global, LazyTensor, Record

FILES = Path(__file__).parent.parent / "data" / "torch_files"
MEGATRON = FILES / "megatron/dense_tp2_pp2_vpp2"
DIST = MEGATRON / "torch_dist/iter_0000010"


def test_every_dtype_has_the_bytes_that_torch_says():
    checkpoint = DistCheckpoint(FILES / "dcp")
    assert checkpoint.version == "1.0.0"
    assert checkpoint.missing() == []
    with np.load(FILES / "expected.npz") as expected:
        for name, dtype in DTYPES.items():
            tensor = checkpoint.tensors[name]
            assert (tensor.shape, tensor.dtype) == ((3, 4), dtype)
            assert tensor.numpy().tobytes() == expected[f"dtypes/{name}"].tobytes()
    assert checkpoint.tensors["scalar"].numpy() == 2.5
    assert checkpoint.byte_entries["entry"].load() == ["plain", {"step": 3}]


def test_megatron_torch_dist_holds_the_weights_of_its_legacy_twin():
    """The same model in both formats, written by megatron-core on tp2 x pp2 x vpp2."""
    tensors = DistCheckpoint(DIST).tensors
    stacked = tensors["decoder.layers.mlp.linear_fc2.weight"]
    assert stacked.shape == (8, 32, 64)
    legacy = MEGATRON / "torch/iter_0000010"
    for layer in range(8):
        # Stage j = chunk * pp + rank has layers 2j and 2j + 1.
        chunk, rank, local = layer // 4, layer // 2 % 2, layer % 2
        halves = [
            TorchArchive(legacy / f"mp_rank_{tp:02d}_{rank:03d}" / "model_optim_rng.pt")
            .load()[f"model{chunk}"][f"decoder.layers.{local}.mlp.linear_fc2.weight"]
            .numpy()
            for tp in range(2)
        ]
        np.testing.assert_array_equal(stacked.numpy()[layer], np.concatenate(halves, axis=1))
        np.testing.assert_array_equal(
            stacked.read((layer, 3, 20), (1, 5, 30))[0], stacked.numpy()[layer, 3:8, 20:50]
        )


def test_megatron_plain_values_are_byte_entries():
    checkpoint = DistCheckpoint(DIST)
    (common,) = checkpoint.byte_entries["common_state/shard_0_1"].load()
    assert common["args"].get("num_layers") == 8
    assert common["iteration"] == 10


def test_a_block_reads_only_the_chunks_it_overlaps(tmp_path):
    folder = tmp_path / "c"
    whole = np.arange(12 * 10, dtype=np.int32).reshape(12, 10)
    with DistWriter(folder, file_bytes=1) as writer:
        for row in range(0, 12, 4):
            for column in (0, 7):
                block = whole[row : row + 4, column : 7 if column == 0 else 10]
                writer.add_chunk("w", whole.shape, (row, column), block)
    tensor = DistCheckpoint(folder).tensors["w"]
    np.testing.assert_array_equal(tensor.numpy(), whole)
    for path in ("__0_0.distcp", "__0_1.distcp", "__0_3.distcp", "__0_5.distcp"):
        (folder / path).unlink()
    np.testing.assert_array_equal(tensor.read((5, 1), (7, 6)), whole[5:12, 1:7])
    with pytest.raises(CheckpointFormatError, match=r"__0_0\.distcp cannot be read"):
        tensor.numpy()


def test_what_was_written_is_read_back(tmp_path):
    folder = tmp_path / "iter_0000003"
    with DistWriter(folder) as writer:
        writer.add("a", np.arange(6.0).reshape(2, 3).T)
        writer.add("empty", np.empty((0, 4), DTYPES["bfloat16"]))
        writer.add("scalar", np.array(3, np.int64))
        writer.add_object(
            "state", [{"args": Record(Global("argparse", "Namespace"), state={"x": 1})}]
        )
        (writer.folder / "metadata.json").write_text("{}")
    assert sorted(p.name for p in folder.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "metadata.json",
    ]
    checkpoint = DistCheckpoint(folder)
    np.testing.assert_array_equal(checkpoint.tensors["a"].numpy(), [[0, 3], [1, 4], [2, 5]])
    assert checkpoint.tensors["empty"].numpy().shape == (0, 4)
    assert checkpoint.tensors["scalar"].numpy() == 3
    (state,) = checkpoint.byte_entries["state"].load()
    assert state["args"].fields == {"x": 1}


def test_a_failed_block_leaves_nothing(tmp_path):
    def fail():
        raise RuntimeError("out of luck")

    def write():
        with DistWriter(tmp_path / "c") as writer:
            writer.add("a", np.zeros(3))
            writer.add("b", LazyTensor((3,), np.dtype(np.float32), fail))

    with pytest.raises(RuntimeError, match="out of luck"):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([((0,), 4), ((4,), 2)], "chunks of 6 elements in all instead of 8"),
        ([((0,), 4), ((0,), 4)], r"overlap, at \(0,\) and \(0,\)"),
        ([((0,), 5), ((4,), 3)], r"overlap, at \(0,\) and \(4,\)"),
        ([((0,), 4), ((5,), 4)], "chunk outside of it"),
    ],
)
def test_chunks_that_do_not_cover_the_tensor_once_are_refused(blocks, message, tmp_path):
    def write():
        with DistWriter(tmp_path / "c") as writer:
            for offsets, size in blocks:
                writer.add_chunk("w", (8,), offsets, np.zeros(size, np.float32))

    with pytest.raises(CheckpointFormatError, match=message):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_written_once_with_one_shape_and_dtype(tmp_path):
    with DistWriter(tmp_path / "c") as writer:
        writer.add_chunk("w", (8,), (0,), np.zeros(4, np.float32))
        with pytest.raises(CheckpointFormatError, match="another entry named w"):
            writer.add_chunk("w", (8,), (4,), np.zeros(4, np.float64))
        with pytest.raises(CheckpointFormatError, match="another entry named w"):
            writer.add_object("w", 1)
        writer.add_chunk("w", (8,), (4,), np.zeros(4, np.float32))


def test_an_existing_checkpoint_is_not_touched(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c/mine").write_text("x")
    with pytest.raises(FileExistsError, match="Move it away"), DistWriter(tmp_path / "c"):
        pass
    assert (tmp_path / "c/mine").read_text() == "x"


KILLED = """
import os, sys
import numpy as np
from mxjax.ckpt.torch_format.distributed_writer import DistWriter
with DistWriter(sys.argv[1]) as writer:
    writer.add("a", np.zeros(1000))
    if len(sys.argv) > 2:
        os.kill(os.getpid(), 9)
"""


def test_a_killed_writer_leaves_nothing_that_looks_complete_and_the_next_one_clears_it(tmp_path):
    folder = tmp_path / "iter_0000001"
    killed = subprocess.run([sys.executable, "-c", KILLED, folder, "kill"], check=False)
    assert killed.returncode == -9
    assert [p.name for p in tmp_path.iterdir()] == [".iter_0000001.incomplete"]
    assert not any(tmp_path.rglob(".metadata"))
    subprocess.run([sys.executable, "-c", KILLED, folder], check=True)
    assert [p.name for p in tmp_path.iterdir()] == ["iter_0000001"]


def test_writing_holds_one_tensor_at_a_time(tmp_path):
    size = 1 << 22

    def tensor(value):
        return LazyTensor((size,), np.dtype(np.uint8), lambda: np.full(size, value, np.uint8))

    tracemalloc.start()
    with DistWriter(tmp_path / "c") as writer:
        for index in range(6):
            writer.add(f"w{index}", tensor(index))
    found = DistCheckpoint(tmp_path / "c")
    assert [int(t.numpy().max()) for t in found.tensors.values()] == list(range(6))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * size


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(FILES / "dcp", tmp_path / "dcp"))


def test_a_missing_or_short_file_is_named(copy):
    file = copy / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:5000])
    checkpoint = DistCheckpoint(copy)
    assert checkpoint.missing() == [f"__0_0.distcp is truncated: 5000 of {len(data)} bytes"]
    with pytest.raises(CheckpointFormatError, match=r"__0_0\.distcp is truncated"):
        checkpoint.tensors["complex128"].numpy()
    file.unlink()
    assert checkpoint.missing() == ["__0_0.distcp cannot be read: No such file or directory"]


def test_metadata_truncated_anywhere_is_refused(copy):
    data = (copy / ".metadata").read_bytes()
    for length in range(0, len(data), 97):
        (copy / ".metadata").write_bytes(data[:length])
        with pytest.raises(CheckpointFormatError, match=r"\.metadata"):
            DistCheckpoint(copy)
    (copy / ".metadata").unlink()
    with pytest.raises(CheckpointFormatError, match="was not completed"):
        DistCheckpoint(copy)


def test_swapped_entries_are_noticed(copy):
    tensors = DistCheckpoint(copy).tensors
    blob = tensors["float16"].chunks[0].blob
    moved = type(tensors["float32"].chunks[0])((0, 0), (3, 4), blob)
    wrong = type(tensors["float32"])("float32", (3, 4), DTYPES["float32"], (moved,))
    with pytest.raises(
        CheckpointFormatError, match=r"should be a part of float32 of shape \(3, 4\)"
    ):
        wrong.numpy()


def metadata_with(**changes):
    """`.metadata` of torch, with fields of the place of `entry` changed."""
    record = unpickle((FILES / "dcp/.metadata").read_bytes(), ".metadata")
    for index, place in record.fields["storage_data"].items():
        if index.get("fqn") == "entry":
            place.state |= changes
    return record


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_path": "../secret"}, "names a file outside of it"),
        ({"relative_path": "/etc/passwd"}, "names a file outside of it"),
        ({"relative_path": ".."}, "names a file outside of it"),
        ({"offset": -4}, "entry at -4"),
        ({"length": "9"}, "of '9' bytes"),
        ({"transform_descriptors": ["zstd"]}, "extensions"),
    ],
)
def test_metadata_that_points_elsewhere_is_refused(changes, message, copy):
    (copy / ".metadata").write_bytes(dump(metadata_with(**changes)))
    with pytest.raises(CheckpointFormatError, match=message):
        DistCheckpoint(copy).byte_entries["entry"].load()


def test_metadata_in_classes_of_megatron_is_read(copy):
    """As megatron-core 0.15 writes it: a subclass of torch's Metadata, with plans of its own."""
    record = metadata_with()
    record.cls = Global("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")
    plan = Record(Global("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"))
    record.state["all_local_plans"] = [plan]
    (copy / ".metadata").write_bytes(dump(record))
    assert DistCheckpoint(copy).byte_entries["entry"].load() == ["plain", {"step": 3}]


def test_hostile_metadata_is_refused(copy, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    (copy / ".metadata").write_bytes(pickle.dumps({"storage_data": Evil()}))
    with pytest.raises(CheckpointFormatError, match=r"names _?io\.open"):
        DistCheckpoint(copy)
    assert not (tmp_path / "made").exists()
