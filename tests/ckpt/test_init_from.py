"""`init_from`: what a new run starts with, on whatever mesh."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.importing import import_megatron
from mxjax.ckpt.init_from import initialize
from mxjax.ckpt.locate import locate
from mxjax.ckpt.run_arrays import RunArrays
from mxjax.ckpt.tree import named_leaves
from mxjax.config import ConfigError, load_config, load_settings
from mxjax.sharding.mesh import build_mesh
from mxjax.train import main as train
from mxjax.training.programs import Programs

MEGATRON = Path(__file__).parent.parent / "data/megatron"
MESH = ("parallel.dp=2", "parallel.tp=2", "parallel.ep=2", "parallel.zero_stage=3")


def start(run, path, *overrides):
    """The state that a run with the settings of `run` starts with."""
    settings = (f"init_from.path={path}", *MESH, *overrides)
    config = load_config(run / "config.yaml", settings, lambda parallel: 8)
    return initialize(config, Programs(config, build_mesh(config.parallel, jax.devices()[:8])))


def assert_same(state, run, only=""):
    arrays = RunArrays(locate(run).folder)
    leaves = named_leaves(state)
    assert leaves.keys() == arrays.shapes.keys()
    for name, leaf in leaves.items():
        if name.startswith(only):
            np.testing.assert_array_equal(leaf, arrays.read(name), err_msg=name, strict=True)


def test_a_run_starts_with_the_whole_state_of_a_megatron_checkpoint(tmp_path):
    source, run = MEGATRON / "continued_mixtral/torch_dist", tmp_path / "run"
    import_megatron(source, run, progress=False)
    found = start(run, source, "init_from.training_state=true")
    assert_same(found.state, run)
    assert (found.step, found.metadata["next_sample_index"], found.notes) == (2, 8, [])
    expert = found.state.params["moe_layers"]["mlp"]["experts"]["up"]
    assert len({shard.index for shard in expert.addressable_shards}) == 8


def test_a_run_starts_with_the_weights_of_another_run(random_run):
    run = random_run("mixtral")
    found = start(run, run, "optimizer.name=sgd", "model.rope_theta=500", "moe.router_topk=3")
    arrays = RunArrays(locate(run).folder)
    for name, leaf in named_leaves(found.state.params).items():
        np.testing.assert_array_equal(leaf, arrays.read(f"params.{name}"), err_msg=name)
    assert (found.step, found.metadata) == (0, {})
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(found.state.opt_state))
    assert found.notes == [
        "model.rope_theta is 500.0 here and was 10000.0 there",
        "moe.router_topk is 3 here and was 2 there",
    ]


def test_a_run_branches_off_from_another_run(random_run):
    run = random_run("mixtral")
    found = start(run, run / "checkpoints/30", "init_from.training_state=true")
    assert_same(found.state, run)
    assert (found.step, found.metadata["next_sample_index"]) == (30, 480)


@pytest.mark.parametrize(
    ("path", "overrides", "said"),
    [
        ("{tmp}/nothing", (), "nothing does not exist"),
        ("{megatron}/dense_tp1", (), "did you mean"),
        (
            "{megatron}/dense_te_names/torch",
            (),
            "init_from.path: .*not in the checkpoint:.*router.weight",
        ),
        ("{megatron}/continued_mixtral/torch_dist", (), "embedding|of another shape"),
        (
            "{run}",
            ("model.ffn_hidden_size=64",),
            r"up is of shape .*, expected \(4, 4, 32, 2, 64\)",
        ),
        ("{run}", ("optimizer.name=sgd", "init_from.training_state=true"), "opt_state.*not there"),
    ],
)
def test_what_does_not_fit_is_refused(random_run, tmp_path, path, overrides, said):
    run = random_run("mixtral")
    path = path.format(tmp=tmp_path, megatron=MEGATRON, run=run)
    overrides = [o.replace("model.ffn", "moe.moe_ffn") for o in overrides]
    with pytest.raises(CheckpointFormatError, match=f"(?s){said}"):
        start(run, path, *overrides)


def test_state_that_is_not_there_is_refused(tmp_path):
    source, run = MEGATRON / "dense_te_names/torch", tmp_path / "run"
    import_megatron(source, run, progress=False)
    with pytest.raises(CheckpointFormatError, match=r"no optimizer state .*: it has none"):
        start(run, source, "parallel.dp=4", "parallel.ep=1", "init_from.training_state=true")


def test_training_state_needs_a_path():
    with pytest.raises(ConfigError, match=r"init_from.training_state: .*init_from.path is null"):
        load_settings({"init_from": {"training_state": True}}, "test")


def test_a_run_that_has_a_checkpoint_resumes_and_says_so(tmp_path, capsys):
    """`python -m mxjax.train`: first from Megatron, then from itself; a bad path writes nothing."""
    source, run = MEGATRON / "dense_tp1/torch_dist", tmp_path / "run"
    import_megatron(source, tmp_path / "imported", ("training.num_steps=11",), progress=False)
    command = ["--config", str(tmp_path / "imported/config.yaml"), f"run_dir={run}"]
    command += ["training.seq_length=16", "training.global_batch_size=8", "log.tensorboard=false"]
    command += ["checkpoint.save_interval=1", "init_from.training_state=true"]
    assert train([*command, f"init_from.path={tmp_path / 'nothing'}"]) == 2
    assert "nothing does not exist" in capsys.readouterr().err
    assert not (run / "config.yaml").exists()
    assert not any((run / "checkpoints").iterdir())
    assert train([*command, f"init_from.path={source}"]) == 0
    out = capsys.readouterr().out
    assert f"starting with the state after step 10 of {source}/iter_0000010 (megatron" in out
    assert train([*command, f"init_from.path={source}"]) == 0
    out = capsys.readouterr().out
    assert f"init_from.path: not read, as {run / 'checkpoints'} has checkpoint 11" in out
    (line,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert line["step"] == 11
    assert 4 < line["loss"] < 6  # random weights, log(128) = 4.85
