"""Two processes of two CPU devices each, started as a user starts them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from mxjax import train

CONFIG = """
model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 4
  vocab_size: 264
moe:
  num_experts: 4
  moe_ffn_hidden_size: 16
  aux_loss_coeff: 0.01
  capacity_buckets: []
parallel: {dp: 2, tp: 2}
training: {num_steps: 10000, seq_length: 32, global_batch_size: 8, compute_dtype: float32}
optimizer: {lr: 0.001, schedule: constant}
checkpoint: {save_interval: 5000}
log: {tensorboard: false, progress_bar: false}
"""


@pytest.fixture
def start(tmp_path):
    """Overrides -> two processes that train together in `tmp_path / "two"`."""
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"}
    started = []

    def run(*overrides):
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            address = f"localhost:{probe.getsockname()[1]}"
        command = [sys.executable, "-m", "mxjax.train", "--config", str(path)]
        command += ["--coordinator-address", address, "--num-processes", "2"]
        overrides = (f"run_dir={tmp_path / 'two'}", "parallel.cpu_devices=2", *overrides)
        processes = [
            subprocess.Popen(
                [*command, "--process-id", str(index), *overrides],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(2)
        ]
        started.extend(processes)
        return processes

    yield run
    for process in started:
        process.kill()


def losses(run_dir, key="loss"):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [line[key] for line in map(json.loads, lines) if key in line]


def test_two_processes_train_stop_and_resume_as_one_process_does(tmp_path, start, capsys):
    run_dir = tmp_path / "two"
    processes = start()
    deadline = time.monotonic() + 300
    while not (run_dir / "metrics.jsonl").exists() or len(losses(run_dir)) < 3:
        assert all(process.poll() is None for process in processes), processes[0].communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # One process gets the signal; both stop after the same step.
    processes[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    (step,) = map(int, re.findall(r"ended early: SIGTERM after step (\d+);", outputs[0]))
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [str(step)]

    last = f"training.num_steps={step + 3}"
    more = ("training.eval_interval=10000", "log.sample_tokens=3", "log.sample_prompt=x")
    more += ("remat.mode=save_memory", "remat.memory_budget=80GiB")
    processes = start(last, *more)
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert f"resuming after step {step} of {step + 3}" in outputs[0]
    assert "step" not in re.sub(r"^.*Gloo.*$", "", outputs[1], flags=re.MULTILINE)

    alone = tmp_path / "one"
    config = ["--config", str(tmp_path / "small.yaml"), f"run_dir={alone}", "parallel.dp=4"]
    assert train.main([*config, last, *more]) == 0
    for key in ("loss", "grad_norm", "eval_loss"):
        assert losses(run_dir, key) == pytest.approx(losses(alone, key), rel=2e-5), key
    sample = re.compile("^sample: x.*?(?=^ended)", re.MULTILINE | re.DOTALL)
    assert sample.findall(outputs[0]) == sample.findall(capsys.readouterr().out)
