"""Stopping and going on: what follows is what the uninterrupted run does, bit for bit."""

import os
import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from mxjax.moe import buckets


def losses(metrics):
    return {line["step"]: line["loss"] for line in metrics}


@pytest.fixture(scope="module")
def impatient():
    """Buckets go down within a run of 20 steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "PATIENCE", 3)
        patch.setattr(buckets, "MARGIN", 1.0)
        yield


def test_three_resumes_in_a_row_change_no_bit(
    tmp_path, train, moe, sums, metrics_of, bits_of, impatient
):
    settings = (*moe, *sums, "moe.capacity_buckets=[3.6]", "checkpoint.save_interval=4")
    whole = train(tmp_path / "whole", *settings)
    expected = metrics_of(tmp_path / "whole")
    sizes = [line["bucket"] for line in expected]
    assert sizes[0] == sizes[-1] == 3.6, "the load of this test is to go up and down again"
    assert None in sizes
    run_dir = tmp_path / "parts"
    for stop in (2, 8, 13):  # within a save interval, at its end, and right before 3.6 fits again
        train(run_dir, *settings, sigterm_at=stop)
    last = train(run_dir, *settings)
    got = metrics_of(run_dir)
    for name in ("loss", "grad_norm", "bucket"):
        assert [line[name] for line in got] == [line[name] for line in expected]
    jax.tree.map(np.testing.assert_array_equal, bits_of(last.state), bits_of(whole.state))


@pytest.fixture(scope="module")
def long_run(sums):
    """Overrides of a run, with dropout, that takes long enough to be killed in the middle."""
    return (
        *sums,
        "model.hidden_dropout=0.1",
        "training.num_steps=40",
        "optimizer.schedule=constant",
        "checkpoint.save_interval=8",
    )


@pytest.fixture(scope="module")
def start(config_file, long_run):
    """run_dir -> a process that trains on one CPU device, started as from a shell."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"}

    def run(run_dir):
        command = [sys.executable, "-m", "mxjax.train", "--config", str(config_file)]
        overrides = [f"run_dir={run_dir}", "parallel.cpu_devices=1", *long_run]
        return subprocess.Popen(command + overrides, env=env, stdout=subprocess.PIPE, text=True)

    return run


def wait_for(condition, process):
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, "the process ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.001)


def output(process):
    """What a process has printed when it ends."""
    out, _ = process.communicate(timeout=300)
    return out


def newest_checkpoint(run_dir):
    names = [path.name for path in (run_dir / "checkpoints").iterdir()]
    return max(int(name) for name in names if name.isdigit())


def test_a_process_killed_in_a_save_is_continued_bit_for_bit(
    tmp_path, start, long_run, make_trainer, metrics_of, bits_of
):
    """Processes that are told to stop: `tests/test_multiprocess.py`."""
    run_dir, whole_dir = tmp_path / "parts", tmp_path / "whole"
    with start(whole_dir) as whole:
        output(whole)
    with start(run_dir) as killed:
        wait_for(lambda: any((run_dir / "checkpoints").glob("16.orbax-checkpoint-tmp*")), killed)
        killed.kill()
    newest = newest_checkpoint(run_dir)
    assert newest in (8, 16)  # 16 if the save was quicker than the kill
    with start(run_dir) as last:
        out = output(last)
    assert last.returncode == 0
    assert f"resuming after step {newest} of 40" in out

    assert losses(metrics_of(run_dir)) == losses(metrics_of(whole_dir))
    states = [make_trainer(folder, *long_run).state for folder in (run_dir, whole_dir)]
    assert states[0].step == 40
    jax.tree.map(np.testing.assert_array_equal, *map(bits_of, states))


def test_another_mesh_goes_on_with_the_same_state_and_the_next_samples(
    tmp_path, make_trainer, train, moe, sums, metrics_of, bits_of
):
    settings = (*moe, *sums, "checkpoint.save_interval=4")
    train(tmp_path / "whole", *settings)
    run_dir = tmp_path / "parts"
    train(run_dir, *settings, sigterm_at=4)
    dp2_ep2_tp2 = ("parallel.ep=2", "parallel.tp=2", "parallel.zero_stage=3")
    cp2_sp2_tp2 = ("parallel.cp=2", "parallel.sp=2", "parallel.tp=2", "parallel.zero_stage=2")
    moves = (((), 4, 4, 8), (cp2_sp2_tp2, 8, 8, 12), (dp2_ep2_tp2, 8, 12, None))
    for layout, devices, start, stop in moves:
        saved = make_trainer(run_dir, *settings)
        saved.loader.close()
        saved.lock.close()

        def watch(trainer, step, batch, saved=saved, start=start):
            if step == start + 1:
                pair = map(bits_of, (trainer.state, saved.state))
                jax.tree.map(np.testing.assert_array_equal, *pair)
            assert trainer.loader.next_sample_index == 8 * step
            for row in range(8):
                sample = saved.data.train[8 * (step - 1) + row]
                for name, array in sample.items():
                    ordered = array[trainer.programs.sequence_order]
                    np.testing.assert_array_equal(batch[name][0, row], ordered)

        train(run_dir, *settings, *layout, devices=devices, sigterm_at=stop, watch=watch)
    got, expected = losses(metrics_of(run_dir)), losses(metrics_of(tmp_path / "whole"))
    assert got == pytest.approx(expected, rel=2e-5)
