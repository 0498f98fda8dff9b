"""Recording of a range of steps."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from mxjax.training.profiler import StepProfiler


def train(profiler, steps):
    """A loop of tiny steps, each under its own name in the trace."""
    for step in steps:
        profiler.before_step(step)
        with jax.profiler.TraceAnnotation(f"step_{step}"):
            jnp.ones(8).sum().block_until_ready()
        profiler.after_step(step)


def traced_steps(run_dir):
    (path,) = (run_dir / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sorted({event["name"] for event in events if event.get("name", "").startswith("step_")})


def test_trace_holds_the_asked_steps_and_its_place_is_printed(tmp_path, capsys):
    profiler = StepProfiler(tmp_path, (2, 3))
    train(profiler, range(1, 6))
    profiler.close()
    assert traced_steps(tmp_path) == ["step_2", "step_3"]
    out = capsys.readouterr().out
    assert out.count("profile written to") == 1
    assert str(tmp_path / "profile") in out


def test_a_run_that_ends_or_resumes_inside_the_range_records_what_it_can(tmp_path):
    profiler = StepProfiler(tmp_path, (2, 9))
    train(profiler, [4, 5])
    profiler.close()
    assert traced_steps(tmp_path) == ["step_4", "step_5"]


@pytest.mark.parametrize("steps", [None, (7, 8)])
def test_nothing_is_recorded_outside_the_range(tmp_path, steps):
    profiler = StepProfiler(tmp_path, steps)
    train(profiler, [1, 2])
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_process_records(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    profiler = StepProfiler(tmp_path, (1, 2))
    train(profiler, [1, 2])
    profiler.close()
    assert list(tmp_path.iterdir()) == []
