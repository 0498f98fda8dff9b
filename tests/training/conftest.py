"""Small runs of the whole trainer, in this process."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from mxjax.config import load_config, to_yaml
from mxjax.config.schema import CheckpointConfig, DataConfig, LogConfig
from mxjax.sharding.mesh import build_mesh
from mxjax.training import loop
from mxjax.training.programs import Programs

CONFIG = """
model:
  num_layers: 2
  hidden_size: 32
  ffn_hidden_size: 48
  num_attention_heads: 4
  num_query_groups: 2
  vocab_size: 264
training: {num_steps: 20, seq_length: 32, global_batch_size: 8, compute_dtype: float32}
optimizer: {lr: 0.01, warmup_steps: 4}
log: {tensorboard: false, progress_bar: false}
"""


class SharedPrograms(Programs):
    """Programs that outlive the run they were built for: compiling is most of a test's time."""

    def close(self):
        pass


@functools.cache
def _build_programs(config, mesh):
    return SharedPrograms(config, mesh)


def programs_of(config, mesh):
    """As `Programs`, but the same for runs that differ only in what programs do not depend on."""
    no_matter = {"eval_interval": 0, "eval_batches": 8, "max_skipped_steps": 10}
    alike = dataclasses.replace(
        config,
        run_dir="",
        moe=dataclasses.replace(config.moe, capacity_buckets=()),
        training=dataclasses.replace(config.training, **no_matter),
        data=DataConfig(document_mask=config.data.document_mask),
        checkpoint=CheckpointConfig(),
        log=LogConfig(),
    )
    return _build_programs(alike, mesh)


@pytest.fixture(scope="session")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="session")
def sums(tmp_path_factory):
    """Overrides that train on 60 short texts of sums, which a small model can learn."""
    folder = tmp_path_factory.mktemp("sums")
    for i in range(60):
        lines = (f"{a} plus {i} is {a + i}." for a in range(8))
        (folder / f"{i:02}.txt").write_text("\n".join(lines))
    return ("data.source=text", f"data.paths=[{folder}]")


@pytest.fixture(scope="session")
def moe():
    """Overrides that give the small model experts, with buffers that hold any routing."""
    return (
        "moe.num_experts=8",
        "moe.moe_ffn_hidden_size=16",
        "moe.aux_loss_coeff=0.01",
        "moe.expert_bias_update_rate=0.001",
        "moe.capacity_buckets=[]",
    )


@pytest.fixture(scope="session")
def make_trainer(config_file):
    """(run_dir, overrides, devices) -> Trainer on the first so many devices."""

    def make(run_dir, *overrides, devices=1):
        config = load_config(config_file, [f"run_dir={run_dir}", *overrides], lambda _: devices)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "Programs", programs_of)
            return loop.Trainer(config, build_mesh(config.parallel, jax.devices()[:devices]))

    return make


@pytest.fixture(scope="session")
def train(make_trainer):
    """Run to the end, or, with `sigterm_at`, until that step has brought a SIGTERM. `watch` is
    called with (trainer, step, batch) before each step is sent off; the trainer that is returned
    has in `sent` what was."""

    def run(run_dir, *overrides, devices=1, sigterm_at=None, watch=None):
        trainer = make_trainer(run_dir, *overrides, devices=devices)
        record, dispatch = trainer._record, trainer._dispatch

        def record_and_signal(done, result):
            record(done, result)
            if done.step == sigterm_at:
                os.kill(os.getpid(), signal.SIGTERM)

        def watch_and_dispatch(step, batch):
            if watch:
                watch(trainer, step, batch)
            dispatch(step, batch)
            trainer.sent.append(trainer.pending[-1])

        trainer.sent = []
        trainer._record, trainer._dispatch = record_and_signal, watch_and_dispatch
        trainer.run()
        return trainer

    return run


@pytest.fixture(scope="session")
def metrics_of():
    """run_dir -> the objects of its `metrics.jsonl`."""

    def read(run_dir):
        lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return read


@pytest.fixture(scope="session")
def bits_of():
    """Pytree of arrays -> the same as unsigned integers: equal means equal bit for bit, NaN too."""

    def bits(tree):
        def view(leaf):
            array = np.asarray(leaf)
            return array.view(f"u{array.dtype.itemsize}") if array.dtype != bool else array

        return jax.tree.map(view, jax.device_get(tree))

    return bits


@pytest.fixture(scope="session")
def compiled_for_h200(cuda_compiler, tmp_path_factory):
    """Config -> text of its loss and gradients, compiled for H200 GPUs."""

    def compile_(config):
        folder = tmp_path_factory.mktemp("h200")
        (folder / "config.yaml").write_text(to_yaml(config))
        script = Path(__file__).with_name("compile_for_h200.py")
        arguments = [sys.executable, script, folder / "config.yaml", folder / "program.hlo"]
        environment = os.environ | {
            "PYTHONPATH": str(cuda_compiler),
            "JAX_PLATFORMS": "cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # it finds no CUDA libraries
        }
        subprocess.run(arguments, env=environment, check=True)
        return (folder / "program.hlo").read_text()

    return compile_
