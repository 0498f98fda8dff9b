"""`python -m mxjax.ckpt inspect` and `verify`, on checkpoints of each kind."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mxjax.ckpt import inspection
from mxjax.ckpt.__main__ import main
from mxjax.ckpt.store import CheckpointStore
from mxjax.ckpt.torch_format.archive import TorchArchive
from mxjax.ckpt.torch_format.archive_writer import save
from mxjax.ckpt.torch_format.distributed import DistCheckpoint
from mxjax.ckpt.torch_format.values import Global, Record
from mxjax.config.schema import CheckpointConfig

FILES = Path(__file__).parent.parent / "data" / "torch_files"
MEGATRON = FILES / "megatron/dense_tp2_pp2_vpp2"


def inspected(path, capsys, *options):
    code = main(["inspect", str(path), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def verified(a, b, capsys):
    code = main(["verify", str(a), str(b), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def legacy(tmp_path):
    return Path(shutil.copytree(MEGATRON / "torch", tmp_path / "legacy"))


@pytest.fixture
def dist(tmp_path):
    return Path(shutil.copytree(MEGATRON / "torch_dist", tmp_path / "dist"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of mxjax with two steps, which differ in one element."""
    folder = tmp_path_factory.mktemp("run")
    store = CheckpointStore(folder, CheckpointConfig(save_interval=1, async_save=False))
    state = {"params": {"w": jnp.arange(6, dtype=jnp.bfloat16), "b": jnp.ones((2, 3))}}
    config = "model: {num_layers: 2, hidden_size: 8}\nmoe: {num_experts: 4}\n"
    for step in (1, 2):
        metadata = {"step": step, "mesh": {"tp": 1, "dp": 8}, "config": config, "version": "0.1.0"}
        store.save(step, state, metadata)
        state["params"]["b"] = state["params"]["b"].at[1, 2].add(0.25)
    store.close()
    return folder


def write_safetensors(path, arrays):
    names = {
        np.dtype(np.float32): "F32",
        np.dtype(ml_dtypes.bfloat16): "BF16",
        np.dtype(np.int64): "I64",
    }
    header, data = {}, b""
    for name, array in arrays.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


@pytest.fixture
def hugging_face(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    a = {"model.embed_tokens.weight": np.arange(8, dtype=ml_dtypes.bfloat16).reshape(4, 2)}
    b = {"model.norm.weight": np.ones(2, np.float32)}
    write_safetensors(folder / "model-00001-of-00002.safetensors", a)
    write_safetensors(folder / "model-00002-of-00002.safetensors", b)
    index = dict.fromkeys(a, "model-00001-of-00002.safetensors") | dict.fromkeys(
        b, "model-00002-of-00002.safetensors"
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    return folder


def test_megatron_torch_is_described(legacy, capsys):
    code, found = inspected(legacy, capsys)
    assert (code, found["missing"], found["kind"], found["step"]) == (0, [], "megatron torch", 10)
    assert found["grid"] == {"tp": 2, "pp": 2, "vpp": 2, "cp": 1, "dp": 1, "ep": 1, "etp": 2}
    assert (found["model"]["num_layers"], found["model"]["params_dtype"]) == (8, "torch.float32")
    assert found["model"]["attention_backend"] == "AttnBackend(5)"
    assert found["format"] == {"checkpoint_version": 3.0}
    assert found["file_bytes"] == sum(
        f.stat().st_size for f in (legacy / "iter_0000010").rglob("*.pt")
    )
    weights = [
        tensor
        for file in legacy.rglob("*.pt")
        for key, chunk in TorchArchive(file).load().items()
        if key.startswith("model")
        for tensor in chunk.values()
        if tensor is not None  # extra states
    ]
    assert found["dtypes"]["float32"]["tensors"] == len(weights)


def test_megatron_torch_dist_is_described(dist, capsys):
    code, found = inspected(dist, capsys)
    assert (code, found["missing"], found["kind"], found["step"]) == (
        0,
        [],
        "megatron torch_dist",
        10,
    )
    assert found["format"]["sharded_backend"] == "torch_dist"
    assert found["grid"]["tp"] == 2
    assert found["dtypes"] == {"float32": {"tensors": 9, "elements": 90656, "bytes": 362624}}
    assert inspected(dist / "iter_0000010", capsys)[1] == found
    assert inspected(dist, capsys, "--checksums")[0] == 0


def test_a_run_is_described(run, capsys):
    code, found = inspected(run, capsys)
    assert (code, found["kind"], found["step"], found["others"]) == (0, "mxjax", 2, ["1"])
    assert found["grid"] == {"tp": 1, "dp": 8}
    assert found["model"] == {"num_layers": 2, "hidden_size": 8, "moe": {"num_experts": 4}}
    assert found["dtypes"]["bfloat16"] == {"tensors": 1, "elements": 6, "bytes": 12}
    assert inspected(run / "checkpoints/1", capsys)[1]["step"] == 1


def test_a_hugging_face_folder_is_described(hugging_face, capsys):
    code, found = inspected(hugging_face, capsys)
    assert (code, found["kind"], found["missing"]) == (0, "safetensors", [])
    assert found["model"]["model_type"] == "llama"
    assert found["dtypes"]["bfloat16"] == {"tensors": 1, "elements": 8, "bytes": 16}
    (hugging_face / "model-00002-of-00002.safetensors").unlink()
    (hugging_face / "config.json").unlink()
    code, found = inspected(hugging_face, capsys)
    assert code == 1
    assert found["missing"] == [
        "config.json",
        "model-00002-of-00002.safetensors: 1 tensors, such as model.norm.weight",
    ]


def test_single_files_are_described(capsys):
    code, found = inspected(FILES / "dtypes.pt", capsys)
    assert (code, found["kind"], found["dtypes"]["float8_e4m3fn"]["bytes"]) == (0, "torch file", 12)


def test_plain_text_says_the_same(legacy, capsys):
    assert main(["inspect", str(legacy)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "kind         megatron torch",
        "tp=2 pp=2 vpp=2",
        "num_layers=8",
        "missing      nothing",
    ):
        assert part in shown


def test_missing_ranks_are_named(legacy, capsys):
    shutil.rmtree(legacy / "iter_0000010/mp_rank_01_001")
    (legacy / "iter_0000010/mp_rank_01_000/model_optim_rng.pt").unlink()
    code, found = inspected(legacy, capsys)
    assert code == 1
    assert found["missing"] == [
        "mp_rank_01_000/model_optim_rng.pt",
        "mp_rank_01_001/model_optim_rng.pt",
    ]


def test_a_damaged_rank_is_named_and_the_others_described(legacy, capsys):
    file = legacy / "iter_0000010/mp_rank_00_000/model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:9000])
    code, found = inspected(legacy, capsys)
    assert (code, found["grid"]["tp"]) == (1, 2)
    assert ["truncated" in line and "mp_rank_00_000" in line for line in found["missing"]] == [True]


def test_ranks_of_folded_experts_are_those_that_megatron_writes():
    """Grids and folders as real checkpoints have them (megatron-core 0.19.2)."""

    def ranks(**sizes):
        names = {axis: inspection.GRID[axis] for axis in sizes}
        return inspection.expected_ranks({names[axis]: size for axis, size in sizes.items()})

    assert ranks(tp=2, pp=1, cp=1, dp=1, ep=2, etp=1) == {"mp_rank_00_000", "mp_rank_01_001"}
    assert ranks(tp=2, pp=1, cp=1, dp=2, ep=2, etp=2) == {
        "mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001",
    }  # fmt: skip
    assert ranks(tp=1, pp=2, cp=1, dp=2, ep=2, etp=1) == {
        "mp_rank_00_000_000", "mp_rank_00_000_001", "mp_rank_00_001_000", "mp_rank_00_001_001",
    }  # fmt: skip
    assert ranks(tp=2, pp=1, cp=1, dp=2, ep=1, etp=2) == {"mp_rank_00", "mp_rank_01"}
    assert ranks(tp=10**9) == ranks(tp="two") == ranks(tp=2, cp=2.5) == set()


def test_a_missing_distcp_file_and_missing_plain_values_are_named(dist, capsys):
    (dist / "iter_0000010/__2_0.distcp").unlink()
    code, found = inspected(dist, capsys)
    assert (code, found["missing"]) == (
        1,
        ["__2_0.distcp cannot be read: No such file or directory"],
    )
    (dist / "iter_0000010/metadata.json").unlink()
    assert inspected(dist, capsys)[1]["kind"] == "torch.distributed.checkpoint"


def test_plain_values_of_megatron_up_to_0_18_are_found(tmp_path, capsys):
    folder = Path(shutil.copytree(FILES / "dcp", tmp_path / "iter_0000007"))
    (folder / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "common_backend": "torch"}'
    )
    code, found = inspected(folder, capsys)
    assert (code, found["missing"]) == (1, ["common.pt or the entry common_state/shard_0_1"])
    args = Record(
        Global("argparse", "Namespace"), state={"num_layers": 3, "tensor_model_parallel_size": 4}
    )
    save(folder / "common.pt", {"args": args, "iteration": 7, "checkpoint_version": 3.0})
    code, found = inspected(folder, capsys)
    assert (code, found["step"], found["grid"]) == (0, 7, {"tp": 4})


def test_a_tracker_that_names_nothing_is_refused(dist, capsys):
    (dist / "latest_checkpointed_iteration.txt").write_text("20\n")
    assert main(["inspect", str(dist)]) == 2
    assert "says '20', but" in capsys.readouterr().err
    (dist / "latest_checkpointed_iteration.txt").unlink()
    code, found = inspected(dist, capsys)
    assert (code, found["step"]) == (1, 10)


def test_a_release_folder_is_found(dist, capsys):
    (dist / "iter_0000010").rename(dist / "release")
    (dist / "latest_checkpointed_iteration.txt").write_text("release")
    code, found = inspected(dist, capsys)
    assert (code, Path(found["path"]).name) == (0, "release")


def test_checksums_find_a_flipped_bit(dist, capsys):
    tensor = DistCheckpoint(dist / "iter_0000010").tensors["decoder.final_layernorm.weight"]
    file, first = tensor.chunks[0].blob.path, tensor.numpy().tobytes()
    data = bytearray(file.read_bytes())
    data[data.index(first) + 1] ^= 1
    file.write_bytes(data)
    assert inspected(dist, capsys)[0] == 0
    code, found = inspected(dist, capsys, "--checksums")
    assert code == 1
    assert f"{file.name}: data/0 does not have the checksum" in found["missing"][0]


@pytest.mark.parametrize(
    ("name", "text"), [("config.json", "[1]"), ("model.safetensors.index.json", "[]")]
)
def test_damage_of_any_kind_is_named(hugging_face, name, text, capsys):
    (hugging_face / name).write_text(text)
    assert main(["inspect", str(hugging_face)]) == 2
    assert "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["absent", "."])
def test_what_is_no_checkpoint_is_refused(path, tmp_path, capsys):
    assert main(["inspect", str(tmp_path / path)]) == 2
    assert "does not exist" in (error := capsys.readouterr().err) or "holds no checkpoint" in error


@pytest.mark.parametrize("kind", ["legacy", "dist", "run", "hugging_face"])
def test_a_checkpoint_equals_itself(kind, request, capsys):
    path = request.getfixturevalue(kind)
    code, found = verified(path, path, capsys)
    assert (code, found["equal"]) == (0, True)
    assert all(leaf["bitwise"] for leaf in found["leaves"])


def test_one_changed_element_is_found_with_its_size(run, capsys):
    code, found = verified(run / "checkpoints/1", run / "checkpoints/2", capsys)
    differing = {leaf["name"]: leaf for leaf in found["leaves"] if not leaf["bitwise"]}
    assert code == 1
    assert differing.keys() == {"params.b", "metadata.step"}
    assert differing["params.b"]["max_abs"] == 0.25


def test_differences_of_every_kind_are_told_apart(tmp_path, capsys):
    nan = np.array([1.0, np.nan], np.float32)
    save(tmp_path / "a.pt", {
        "same": nan, "value": np.array([1.0, 2.0]), "sign": np.array([0.0]), "shape": np.zeros((2, 3)),
        "dtype": np.ones(2, np.float32), "only_a": np.zeros(1), "nan": nan, "step": 1, "nan_value": float("nan"),
    })  # fmt: skip
    save(tmp_path / "b.pt", {
        "same": nan, "value": np.array([1.0, 2.5]), "sign": np.array([-0.0]), "shape": np.zeros((3, 2)),
        "dtype": np.ones(2, np.float64), "only_b": np.zeros(1), "nan": nan[::-1], "step": 2, "nan_value": float("nan"),
    })  # fmt: skip
    code, found = verified(tmp_path / "a.pt", tmp_path / "b.pt", capsys)
    leaves = {leaf["name"]: (leaf["bitwise"], leaf["max_abs"]) for leaf in found["leaves"]}
    assert code == 1
    assert leaves == {
        "same": (True, 0.0), "value": (False, 0.5), "sign": (False, 0.0), "shape": (False, None),
        "dtype": (False, 0.0), "only_a": (False, None), "only_b": (False, None), "nan": (False, "inf"),
        "step": (False, None), "nan_value": (True, None),
    }  # fmt: skip
    assert main(["verify", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 1
    shown = capsys.readouterr().out
    for line in (
        "value: (2,) float64, largest difference 0.5",
        "shape: (2, 3) float64 in A, (3, 2) float64 in B",
        "dtype: (2,) float32 in A, (2,) float64 in B, largest difference 0",
        "only_a: only in A, (1,) float64",
        "step: 1 in A, 2 in B",
        "10 leaves, 8 differ",
    ):
        assert line in shown


def test_different_kinds_are_not_compared(legacy, dist, capsys):
    assert main(["verify", str(legacy), str(dist)]) == 2
    assert "of kind 'megatron torch' and" in capsys.readouterr().err


def test_a_damaged_tensor_stops_the_comparison(dist, tmp_path, capsys):
    other = Path(shutil.copytree(dist, tmp_path / "other"))
    (other / "iter_0000010/__1_0.distcp").write_bytes(b"short")
    assert main(["verify", str(dist), str(other)]) == 2
    assert "__1_0.distcp is truncated" in capsys.readouterr().err


def test_a_hostile_file_is_refused_and_nothing_runs(tmp_path, capsys):
    import pickle
    import zipfile

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        archive.writestr("evil/data.pkl", pickle.dumps({"model": Evil()}, 2))
        archive.writestr("evil/version", "3\n")
    for command in (
        ["inspect", str(tmp_path / "evil.pt")],
        ["verify", *2 * [str(tmp_path / "evil.pt")]],
    ):
        assert main(command) == 2
        assert "is refused: it names" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_the_command_line_works_without_torch_and_without_starting_jax(dist):
    script = (
        "import sys; from mxjax.ckpt.__main__ import main; code = main(['inspect', sys.argv[1]]);"
        "sys.exit(code or bool({'torch', 'jax'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, dist], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "megatron torch_dist" in done.stdout
