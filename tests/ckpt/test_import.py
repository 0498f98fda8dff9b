"""`python -m mxjax.ckpt import` and `logits`, on checkpoints that megatron-core 0.19.2 wrote.

`tests/data/megatron/` holds them with the logits that megatron-core computed (for the pipelined
one: a plain PyTorch program), fp32.
"""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mxjax.ckpt import streaming
from mxjax.ckpt.__main__ import main
from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.importing import import_megatron
from mxjax.ckpt.leaves import leaves_of, run_leaves
from mxjax.ckpt.locate import locate
from mxjax.ckpt.logits import run_logits
from mxjax.ckpt.torch_format.archive import TorchArchive
from mxjax.ckpt.torch_format.archive_writer import save
from mxjax.config import load_config

DATA = Path(__file__).parent.parent / "data"
MEGATRON = DATA / "megatron"
YARN = "model.rope_scaling.original_max_position_embeddings=64"
"""What the generator of the files used and did not record."""

CASES = {
    "dense_tp1/torch_dist": (),
    "dense_te_names/torch": (),
    "mixtral_tp2_ep2_etp1/torch": (),
    "deepseek_tp2_ep2/torch": (YARN,),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Imports by name, each made once."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def run(name):
        if name not in made:
            made[name] = folder / name.replace("/", "_")
            import_megatron(MEGATRON / name, made[name], CASES[name], progress=False)
        return made[name]

    return run


def reference(name):
    with np.load(MEGATRON / name.split("/")[0] / "reference.npz") as found:
        return found["tokens"], found["logits"]


def assert_logits(logits, expected):
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def params(folder):
    leaves = run_leaves(locate(folder).folder)
    return {name: leaf for name, leaf in leaves.items() if name.startswith(("params", "expert"))}


def assert_same_weights(a, b):
    first, second = params(a), params(b)
    assert first.keys() == second.keys()
    for name, leaf in first.items():
        np.testing.assert_array_equal(leaf.numpy(), second[name].numpy(), err_msg=name)


@pytest.fixture
def changed(tmp_path):
    """Copies a checkpoint of the format `torch` with a change made to the content of each file."""

    def change(name, edit):
        folder = tmp_path / "changed"
        shutil.copytree(MEGATRON / name, folder)
        for file in folder.glob("iter_*/mp_rank_*/model_optim_rng.pt"):
            content = TorchArchive(file).load()
            edit(content)
            content.pop("rng_state")
            copy = file.with_suffix(".new")
            save(copy, content)
            copy.replace(file)
        return folder

    return change


MESHES = (), ("tp",), ("pp",), ("ep",), ("tp", "ep", "cp")
NAMES_AND_MESHES = [
    (name, mesh) for name in CASES for mesh in MESHES if "ep" not in mesh or "dense" not in name
]


@pytest.mark.parametrize(("name", "mesh"), NAMES_AND_MESHES, ids=str)
def test_logits_are_those_of_megatron(runs, name, mesh):
    tokens, expected = reference(name)
    overrides = [f"parallel.{axis}=2" for axis in mesh]
    assert_logits(run_logits(runs(name), tokens, overrides, progress=False), expected)


def test_logits_do_not_depend_on_where_layers_lie(runs):
    """The order in which two chunks on each of two ranks hold them, which has the right shapes."""
    tokens, expected = reference("dense_tp1")
    overrides = ["parallel.pp=2", "pipeline.schedule=interleaved", "pipeline.vpp=2"]
    overrides += ["training.num_microbatches=2"]
    run = runs("dense_tp1/torch_dist")
    assert_logits(run_logits(run, tokens, overrides, progress=False), expected)


def test_both_formats_of_a_pipelined_model_give_the_same_weights_and_logits(tmp_path):
    source = DATA / "torch_files/megatron/dense_tp2_pp2_vpp2"
    for kind in ("torch", "torch_dist"):
        import_megatron(source / kind, tmp_path / kind, progress=False)
    assert_same_weights(tmp_path / "torch", tmp_path / "torch_dist")
    tokens, expected = reference("dense_tp2_pp2_vpp2")
    assert_logits(run_logits(tmp_path / "torch", tokens, progress=False), expected)


def test_all_spellings_of_experts_give_the_same_weights(runs, changed, tmp_path):
    """SequentialMLP, TEGroupedMLP and the GroupedMLP of before 0.17 hold the same experts."""

    def regroup(content, kind):
        model = content["model"]
        for layer in range(4):
            prefix = f"decoder.layers.{layer}.mlp.experts."
            for fc in (1, 2):
                one = [
                    model.pop(f"{prefix}local_experts.{e}.linear_fc{fc}.weight").numpy()
                    for e in range(2)
                ]
                if kind == "te":
                    for e, weight in enumerate(one):
                        model[f"{prefix}linear_fc{fc}.weight{e}"] = weight
                elif kind == "stacked":
                    model[f"{prefix}linear_fc{fc}.weight"] = np.stack(one)
                else:
                    memory = np.stack([weight.T for weight in one])  # [experts, in, out]
                    inputs = memory.shape[1] if fc == 1 else -1
                    outputs = -1 if fc == 1 else memory.shape[2]
                    model[f"{prefix}weight{fc}"] = memory.reshape(inputs, outputs)

    name = "mixtral_tp2_ep2_etp1/torch"
    for kind in ("te", "stacked", "old"):
        source = changed(name, lambda content, kind=kind: regroup(content, kind))
        import_megatron(source, tmp_path / kind, progress=False)
        assert_same_weights(tmp_path / kind, runs(name))
        shutil.rmtree(source)


def test_moments_and_their_count_are_those_of_megatron(runs):
    leaves = run_leaves(locate(runs("dense_tp1/torch_dist")).folder)
    theirs = leaves_of(locate(MEGATRON / "dense_tp1/torch_dist"))
    for ours, kind in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):

        def moment(name, kind=kind):
            return theirs[f"optimizer.state.{kind}.{name}"].numpy()

        def our(name, ours=ours):
            return leaves[f"opt_state.0.0.{ours}.{name}"].numpy()

        np.testing.assert_array_equal(our("head.weight"), moment("output_layer.weight").T)
        packed = moment("decoder.layers.self_attention.linear_qkv.weight")[2]
        kv = our("dense_layers.attention.kv")[2]
        np.testing.assert_array_equal(kv[:, 1, 1], packed[56:64].T)  # the last rows: value, group 1
        assert np.abs(kv).max() > 0
    assert leaves["opt_state.0.0.count"].numpy() == 2
    assert leaves["step"].numpy() == 10


def test_configuration_is_that_of_the_arguments(runs):
    config = load_config(runs("deepseek_tp2_ep2/torch") / "config.yaml")
    model, moe = config.model, config.moe
    assert (model.num_layers, model.vocab_size, model.mtp_num_layers) == (4, 256, 1)
    assert (model.mla.q_lora_rank, model.mla.qk_rope_head_dim) == (16, 4)
    assert (moe.first_k_dense, moe.num_experts, moe.num_groups, moe.group_topk) == (1, 4, 2, 1)
    assert (moe.score_function, moe.norm_topk_prob) == ("sigmoid", True)
    assert (moe.seq_aux_loss_coeff, moe.expert_bias_update_rate) == (1e-4, 1e-3)
    assert moe.routed_scaling_factor == 2.5
    assert model.rope_scaling.kind == "yarn"


def test_command_reports_what_it_took_and_left_out(changed, tmp_path, capsys):
    def edit(content):
        content["args"].fields["num_experts_of_tomorrow"] = 3

    source = changed("deepseek_tp2_ep2/torch", edit)
    run, copy = tmp_path / "run", tmp_path / "c.yaml"
    command = ["import", "--from", str(source), "--to", str(run), "--config", str(copy), "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["not_mapped"] == {"num_experts_of_tomorrow": 3}
    assert report["assumed"] == {"rope_type": "yarn", "original_max_position_embeddings": 4096}
    assert report["step"] == 10
    assert report["optimizer"].startswith("fresh")
    assert copy.read_text() == (run / "config.yaml").read_text()
    metadata = json.loads((run / "checkpoints/10/metadata/metadata").read_text())
    assert metadata["imported"] == report


def test_logits_command_writes_a_file(runs, tmp_path, capsys):
    tokens, expected = reference("dense_te_names")
    np.savez(tmp_path / "in.npz", tokens=tokens)
    run = str(runs("dense_te_names/torch"))
    command = ["logits", run, "--tokens", str(tmp_path / "in.npz"), "--out"]
    assert main([*command, str(tmp_path / "out.npz")]) == 0
    with np.load(tmp_path / "out.npz") as found:
        assert found["logits"].dtype == np.float32
        assert_logits(found["logits"], expected)
    np.savez(tmp_path / "in.npz", tokens=tokens + 500)
    assert main([*command, str(tmp_path / "no.npz"), "training.compute_dtype=float32"]) == 2
    assert "the model's from 0 to 127" in capsys.readouterr().err
    assert not (tmp_path / "no.npz").exists()
    for word in ("--typo=1", "typo"):
        with pytest.raises(SystemExit, match="2"):
            main([*command, str(tmp_path / "no.npz"), word])


def drop(name):
    return lambda content: content["model"].pop(name)


def add(name, shape):
    return lambda content: content["model"].update({name: np.zeros(shape, np.float32)})


def argument(name, value):
    return lambda content: content["args"].fields.update({name: value})


@pytest.mark.parametrize(
    ("edit", "overrides", "said"),
    [
        (
            drop("decoder.layers.2.mlp.linear_fc2.weight"),
            (),
            "not in the checkpoint:.*layers.2.mlp",
        ),
        (add("decoder.layers.0.gate.weight", (3,)), (), "unknown:.*decoder.layers.0.gate.weight"),
        (
            add("decoder.final_layernorm.weight", (31,)),
            (),
            r"decoder.final_layernorm.weight has shape \(31,\), expected \(32,\)",
        ),
        (lambda c: None, ("model.num_layers=6",), "layers.4.input_layernorm.weight.*, of shape"),
        (argument("num_layers", 3), (), "unknown:.*decoder.layers.3."),
        (argument("rotary_percent", 0.5), (), "rotary_percent: 0.5"),
        (argument("tensor_model_parallel_size", 2), (), "mp_rank_01 of 2 ranks are missing"),
        (lambda c: c.pop("args"), (), "no `args`"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(changed, tmp_path, edit, overrides, said):
    source = changed("dense_te_names/torch", edit)
    with pytest.raises(CheckpointFormatError, match=f"(?s){said}"):
        import_megatron(source, tmp_path / "run", overrides, progress=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["changed"]


def test_a_run_that_exists_is_kept(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    source = str(MEGATRON / "dense_te_names/torch")
    assert main(["import", "--from", source, "--to", str(tmp_path / "run")]) == 2
    assert "run exists" in capsys.readouterr().err


def test_a_failed_import_leaves_nothing(tmp_path, monkeypatch, capsys):
    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device", "run")

    monkeypatch.setattr(streaming.StreamedArray, "pieces", full)
    source = str(MEGATRON / "dense_te_names/torch")
    assert main(["import", "--from", source, "--to", str(tmp_path / "run")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_vocabulary_can_be_cut_to_the_true_one(tmp_path):
    source, run = MEGATRON / "dense_te_names/torch", tmp_path / "run"
    import_megatron(source, run, ("model.vocab_size=120",), progress=False)
    tokens, expected = reference("dense_te_names")
    assert_logits(run_logits(run, tokens, progress=False), expected[..., :120])


def test_norms_stored_around_zero_are_shifted(changed, runs, tmp_path):
    def edit(content):
        content["args"].fields["apply_layernorm_1p"] = True
        model = content["model"]
        for name in [n for n in model if "norm" in n]:
            model[name] = model[name].numpy() - np.float32(1)

    source = changed("dense_te_names/torch", edit)
    import_megatron(source, tmp_path / "run", progress=False)
    first, second = params(tmp_path / "run"), params(runs("dense_te_names/torch"))
    for name, leaf in first.items():
        np.testing.assert_allclose(leaf.numpy(), second[name].numpy(), atol=1e-7, err_msg=name)
