"""The quickstart, cut short: the same files and command line, but fewer, shorter and smaller steps.

At its full length, which takes minutes, it is for people and not run here.
"""

import dataclasses
import json
import re
from pathlib import Path

import jax
import pytest

from mxjax import train
from mxjax.config import load_config
from mxjax.sharding import mesh
from mxjax.training.flops import parameter_counts

CONFIGS = Path(__file__).parents[1] / "configs"

SHORT = (
    "model.num_layers=2",
    "moe.capacity_buckets=[]",
    "training.scan_layers=true",
    "training.num_steps=6",
    "training.seq_length=32",
    "optimizer.warmup_steps=2",
    "checkpoint.save_interval=4",
    "log.sample_tokens=4",
)


@pytest.mark.parametrize(
    ("name", "devices", "evaluation"),
    [
        ("quickstart", 1, ("training.eval_interval=6", "training.eval_batches=1")),
        ("quickstart_8devices", 8, ("training.eval_interval=0",)),
    ],
)
def test_the_quickstart_learns_samples_and_says_how_to_go_on(
    name, devices, evaluation, tmp_path, monkeypatch, capsys
):
    build_mesh = mesh.build_mesh
    monkeypatch.setattr(train, "start_jax", lambda parallel, arguments: devices)
    monkeypatch.setattr(
        mesh, "build_mesh", lambda sizes: build_mesh(sizes, jax.devices()[:devices])
    )
    command = ["--config", str(CONFIGS / f"{name}.yaml"), f"run_dir={tmp_path}", *SHORT]
    assert train.main([*command, *evaluation]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^data: [3-9]\d\d documents", out, re.MULTILINE), "the standard library"
    assert re.search("^sample: def ", out, re.MULTILINE)
    assert f"ended after step 6; everything is in {tmp_path}" in out
    assert "to go on: run the same command again" in out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] > 5.4
    assert lines[-1]["loss"] < 4.5
    assert lines[-1].get("eval_loss", 0) < 4.8
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "6"]


def test_the_quickstart_is_a_small_mixture_of_experts_and_the_same_on_eight_devices():
    one = load_config(CONFIGS / "quickstart.yaml")
    assert 5e6 <= parameter_counts(one.model, one.moe).total <= 10e6
    assert (one.moe.num_experts, one.moe.router_topk) == (8, 2)
    assert one.moe.shared_expert_intermediate_size
    eight = load_config(CONFIGS / "quickstart_8devices.yaml")
    sizes = eight.parallel
    assert (sizes.cpu_devices, sizes.dp, sizes.ep, sizes.tp) == (8, 2, 2, 2)
    assert dataclasses.replace(eight, run_dir=one.run_dir, parallel=one.parallel) == one
