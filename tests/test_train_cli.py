"""The command line: exit codes, messages, and nothing written where nothing should be."""

import jax
import pytest

from mxjax import train
from mxjax.ckpt.store import CheckpointStore
from mxjax.config import ConfigError, load_config
from mxjax.config.schema import CheckpointConfig, Config, ParallelConfig, PipelineConfig
from mxjax.sharding import mesh


@pytest.mark.parametrize(
    ("text", "overrides", "line"),
    [
        ("model: {num_layers: 0}", [], "model.num_layers: 0 -- must be at least 1"),
        ("optimizer: {seq_length: 8}", [], "did you mean training.seq_length?"),
        ("{}", ["moe.num_experts=8", "moe.router_topk=9"], "moe.router_topk: 9 -- must be at most"),
        ("{}", ["parallel.ep=2", "parallel.dp=1"], "parallel.ep: 2 -- "),
        ("model: [", [], "is not valid YAML"),
        ("", [], "an empty file is written {}"),
    ],
)
def test_bad_config_exits_2(tmp_path, capsys, text, overrides, line):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as exit_info:
        raise SystemExit(train.main(["--config", str(path), *overrides]))
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert line in message
    assert "Traceback" not in message


CONFIG = """
model: {num_layers: 1, hidden_size: 16, ffn_hidden_size: 16, num_attention_heads: 2, vocab_size: 257}
training: {num_steps: 4, seq_length: 16, global_batch_size: 2, compute_dtype: float32}
data: {source: text, paths: [text.txt]}
log: {tensorboard: false, progress_bar: false}
run_dir: out
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command line in this process on one device, in a folder with a config and a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 20)
    build_mesh = mesh.build_mesh
    monkeypatch.setattr(train, "start_jax", lambda parallel, arguments: 1)
    monkeypatch.setattr(mesh, "build_mesh", lambda sizes: build_mesh(sizes, jax.devices()[:1]))
    return lambda *arguments: train.main(["--config", "small.yaml", *arguments])


def committed():
    return CheckpointStore("out", CheckpointConfig()).steps()


def test_a_gpu_setting_without_a_gpu_exits_2(command, tmp_path, capsys):
    cudnn = "model.attention_implementation=cudnn", "training.compute_dtype=bfloat16"
    assert command(*cudnn) == 2
    line = 'model.attention_implementation: "cudnn" -- needs an NVIDIA GPU, and JAX sees only cpu'
    assert line in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_kernel_that_cannot_run_exits_2(command, capsys):
    """Which can be told only when the model is traced."""
    assert command("kernels.overrides.rms_norm=mosaic") == 2
    assert "rms_norm: the implementation 'mosaic' cannot run here" in capsys.readouterr().err


def test_print_config_prints_what_a_run_would_use_and_does_nothing(command, tmp_path, capsys):
    assert command("optimizer.lr=0.5", "--print-config", "parallel.tp=1") == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    printed = load_config("printed.yaml")
    assert printed == load_config("small.yaml", ["optimizer.lr=0.5"], lambda _: 1)
    assert printed.parallel.dp == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.paths=[missing.txt]", "data.paths: "),
        ("data.paths=[empty]", "data.paths: "),
        ("data.validation_paths=[text.txt]", "data.validation_paths: takes every file"),
    ],
)
def test_bad_data_exits_2_before_anything_is_written(command, tmp_path, capsys, override, line):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "empty.txt").touch()
    assert command(override, "checkpoint.save_interval=2") == 2
    out, err = capsys.readouterr()
    assert line in err
    assert "Traceback" not in out + err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--num-processes", "2"], "--coordinator-address, --num-processes and --process-id"),
        (["--process-id", "0", "--coordinator-address", "localhost:1"], "belong together"),
    ],
)
def test_half_named_processes_exit_2(command, capsys, arguments, line):
    assert command(*arguments) == 2
    assert line in capsys.readouterr().err


def test_a_launchers_task_that_is_not_told_so_exits_2(command, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert command() == 2
    assert "add --distributed" in capsys.readouterr().err


def test_a_run_that_ends_exits_0_and_cannot_go_on_with_other_data(command, tmp_path, capsys):
    assert command("checkpoint.save_interval=3") == 0
    assert "ended after step 4; everything is in out" in capsys.readouterr().out
    assert committed() == [3, 4]
    (tmp_path / "text.txt").write_text("Something else altogether.\n" * 20)
    assert command("checkpoint.save_interval=3", "training.num_steps=6") == 1
    assert "Checkpoint 4 in " in capsys.readouterr().err


def test_a_checkpoint_that_does_not_exist_exits_1(command, capsys):
    assert command("checkpoint.restore_step=2") == 1
    out, err = capsys.readouterr()
    assert "There is no checkpoint 2" in err
    assert "Traceback" not in out + err


def test_a_run_that_breaks_exits_1_names_step_and_place_and_leaves_its_last_good_state(
    command, capsys
):
    # The first update makes the weights huge; the next gradient is not finite.
    assert command("optimizer.lr=1e30", "checkpoint.save_interval=1") == 1
    out, err = capsys.readouterr()
    assert err.startswith("step 2: loss ")
    assert "First value that is not finite: gradient of dense_layers." in err
    assert "of layer 0. The state before this step is good" in err
    assert "Traceback" not in out + err
    assert committed() == [1]


def test_the_stagewise_executor_is_refused_for_several_processes(monkeypatch):
    config = Config(
        parallel=ParallelConfig(pp=2, dp=1), pipeline=PipelineConfig(executor="stagewise")
    )
    train.check_backend(config)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"pipeline\.executor.*one process that drives all devices"
    ):
        train.check_backend(config)
