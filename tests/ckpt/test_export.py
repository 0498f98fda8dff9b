"""`python -m mxjax.ckpt export` to Megatron's formats: there and back, and what is refused.

That Megatron itself loads what is written shows `interop/test_megatron.py`.
"""

import errno
import json

import numpy as np
import pytest
import yaml

from mxjax.ckpt.__main__ import main
from mxjax.ckpt.errors import ExportError
from mxjax.ckpt.exporting import MegatronTarget, export_megatron
from mxjax.ckpt.importing import import_megatron
from mxjax.ckpt.inspection import inspect
from mxjax.ckpt.leaves import run_leaves
from mxjax.ckpt.locate import locate
from mxjax.ckpt.megatron import exported
from mxjax.ckpt.megatron.grid import Grid
from mxjax.ckpt.torch_format.archive import TorchArchive
from mxjax.ckpt.torch_format.distributed import DistCheckpoint

VOCABULARY = ("model.vocab_size=100",)
"""Cuts off the padding."""


def state(run):
    """All arrays of a run's newest checkpoint."""
    leaves = run_leaves(locate(run).folder)
    return {n: leaf.numpy() for n, leaf in leaves.items() if not n.startswith("metadata.")}


def assert_same_state(run, other, only=""):
    ours, theirs = state(run), state(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        if name.startswith(only):
            np.testing.assert_array_equal(array, theirs[name], err_msg=name, strict=True)


def settings(run):
    found = yaml.safe_load((run / "config.yaml").read_text())
    parts = ("model", "moe", "optimizer", "training", "checkpoint")
    return {part: found.get(part) for part in parts}


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "deepseek"])
def test_torch_dist_and_back_is_the_same_run_bit_for_bit(random_run, tmp_path, family):
    run = random_run(family)
    target = MegatronTarget(grid=Grid(ep=2 if family == "mixtral" else 1))
    export_megatron(run, tmp_path / "megatron", target, progress=False)
    assert inspect(tmp_path / "megatron", checksums=True).missing == []
    import_megatron(tmp_path / "megatron", tmp_path / "back", VOCABULARY, progress=False)
    assert_same_state(run, tmp_path / "back")
    assert settings(run) == settings(tmp_path / "back")
    metadata = json.loads((locate(tmp_path / "back").folder / "metadata/metadata").read_text())
    assert metadata["next_sample_index"] == 480
    assert metadata["imported"]["not_mapped"] == {}


GRIDS = {
    "tied": (Grid(tp=2, pp=2), "transformer_engine"),
    "gpt2": (Grid(tp=4, pp=2), "local"),
    "mixtral": (Grid(tp=2, ep=4, etp=1, pp=2), "transformer_engine"),
    "lite": (Grid(tp=2, ep=2, etp=2), "transformer_engine"),
}
"""Beside those in `test_import_optimizer.py`."""


@pytest.mark.parametrize("family", GRIDS)
def test_torch_of_a_grid_and_back_is_the_same_run_bit_for_bit(random_run, tmp_path, family):
    run, out = random_run(family), tmp_path / "out"
    grid, impl = GRIDS[family]
    target = MegatronTarget("torch", grid, transformer_impl=impl)
    export_megatron(run, out, target, progress=False)
    assert inspect(out).missing == []
    import_megatron(out, tmp_path / "back", VOCABULARY, progress=False)
    assert_same_state(run, tmp_path / "back")


def test_torch_keeps_adams_state_by_parameter(random_run, tmp_path):
    grid = Grid(pp=2, ep=2)
    export_megatron(
        random_run("mixtral"),
        tmp_path / "torch",
        MegatronTarget("torch", grid, transformer_impl="local", params_dtype="bfloat16"),
        progress=False,
    )
    content = TorchArchive(
        tmp_path / "torch/iter_0000030/mp_rank_00_001_001/model_optim_rng.pt"
    ).load()
    dense, experts = content["optimizer"]
    arrays = state(random_run("mixtral"))
    # Of two layers: proj and qkv, two norms, router; the last norm and the head.
    assert [len(g["params"]) for g in dense["optimizer"]["param_groups"]] == [7, 5]
    assert [len(g["params"]) for g in experts["optimizer"]["param_groups"]] == [8]
    head = dense["optimizer"]["state"][6]
    np.testing.assert_array_equal(
        head["exp_avg"].numpy()[:100], arrays["opt_state.0.0.mu.head.weight"].T
    )
    assert head["step"].numpy() == 28
    # Third of the first group: up of the second local expert of this rank, number 3 of layer 2.
    up = arrays["params.moe_layers.mlp.experts.up"][2, 3]
    np.testing.assert_array_equal(
        experts["fp32_from_fp16_params"][0][2].numpy(), up.transpose(1, 2, 0).reshape(-1, len(up))
    )
    assert content["model"]["output_layer.weight"].dtype == "bfloat16"
    assert content["opt_param_scheduler"]["num_steps"] == 31 * 16  # see AdamState.scheduler


def test_bf16_weights_come_with_fp32_ones(random_run, tmp_path):
    run = random_run("tied")
    export_megatron(run, tmp_path / "out", MegatronTarget(params_dtype="bfloat16"), progress=False)
    stored = DistCheckpoint(locate(tmp_path / "out").folder).tensors
    name = "embedding.word_embeddings.weight"
    weight = state(run)["params.embedding.weight"]
    assert stored[name].dtype == "bfloat16"
    for prefix in ("param", "fp32_param"):
        array = stored[f"optimizer.state.{prefix}.{name}"].numpy()
        np.testing.assert_array_equal(array[:100], weight, strict=True)
        assert not array[100:].any()  # padding
    import_megatron(tmp_path / "out", tmp_path / "back", VOCABULARY, progress=False)
    assert_same_state(run, tmp_path / "back")


def test_without_optimizer_there_are_weights_only(random_run, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["export", "--from", str(random_run("tied")), "--to", str(out), "--no-optimizer"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["optimizer"]) == (30, "not exported")
    names = DistCheckpoint(locate(out).folder).tensors
    assert not [name for name in names if name.startswith("optimizer")]


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("llama", ["--tp", "3"], "--tp 3 does not divide model.num_query_groups 2: choose one of"),
        ("llama", ["--pp", "3"], "--pp 3 does not divide model.num_layers 4"),
        ("llama", ["--pp", "2", "--vpp", "4"], "--pp times --vpp 8 does not divide"),
        ("llama", ["--vpp", "2"], "--vpp 2 needs --pp 2 or more"),
        ("llama", ["--ep", "2"], "moe.num_experts is 0: leave --ep out"),
        (
            "mixtral",
            ["--ep", "3"],
            "--ep 3 does not divide moe.num_experts 4: choose one of 1, 2, 4",
        ),
        ("mixtral", ["--etp", "2"], "--etp 2 does not divide --tp 1"),
        ("llama", ["--tp", "0"], "--tp 0 is not a size"),
        ("llama", ["--step", "7"], "has 30. Choose one of these"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(
    random_run, tmp_path, capsys, family, options, said
):
    command = ["export", "--from", str(random_run(family)), "--to", str(tmp_path / "out")]
    assert main([*command, "--format", "torch", *options]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_megatron_cannot_compute_is_refused(random_run, tmp_path):
    run = random_run("mixtral", "moe.score_function=sigmoid", "moe.norm_topk_prob=false")
    with pytest.raises(ExportError, match="norm_topk_prob: False with score_function sigmoid"):
        export_megatron(run, tmp_path / "out", MegatronTarget(), progress=False)
    assert list(tmp_path.iterdir()) == []


def test_something_else_than_a_run_is_refused(tmp_path, random_run):
    export_megatron(random_run("tied"), tmp_path / "out", MegatronTarget(), progress=False)
    with pytest.raises(ExportError, match="only runs are exported"):
        export_megatron(tmp_path / "out", tmp_path / "again", MegatronTarget(), progress=False)
    with pytest.raises(FileExistsError, match="out exists"):
        export_megatron(random_run("tied"), tmp_path / "out", MegatronTarget(), progress=False)


@pytest.mark.parametrize("kind", ["torch", "torch_dist"])
def test_a_failed_export_leaves_nothing(random_run, tmp_path, monkeypatch, kind):
    def full(self, moment):
        raise OSError(errno.ENOSPC, "No space left on device", "out")

    monkeypatch.setattr(exported.Exported, "_read", full)
    with pytest.raises(OSError, match="No space left"):
        export_megatron(random_run("tied"), tmp_path / "out", MegatronTarget(kind), progress=False)
    assert list(tmp_path.iterdir()) == []
