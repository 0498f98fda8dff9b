"""What a run prints and records, read back with other code than wrote it."""

import io
import json
import os
import resource
import struct
import sys

import jax
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from mxjax.config.schema import LogConfig, ModelConfig, MoEConfig, TrainingConfig
from mxjax.training.metrics import (
    MetricsLogger,
    Speed,
    StepRecord,
    Throughput,
    format_line,
    peak_memory_bytes,
)

FILES_ONLY = LogConfig(tensorboard=False, progress_bar=False)


def make_record(step, **changes):
    values = {
        "step": step, "loss": 2.3456, "grad_norm": 0.82, "learning_rate": 3e-4, "num_tokens": 65_000, "step_seconds": 0.16, "tokens_per_second": 412_000.0,
        "tgs": 51_500.0, "tflops": 310.0, "mfu": 0.313, "peak_memory_bytes": 61_300_000_000,
    }  # fmt: skip
    return StepRecord(**values | changes)


def record_steps(run_dir, steps, start_step=0, log_config=FILES_ONLY, **changes):
    logger = MetricsLogger(run_dir, log_config, num_steps=1000, start_step=start_step)
    for step in steps:
        logger.log(make_record(step, **changes))
    logger.close()


def read_lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_events(run_dir):
    """All TensorBoard events, files by name: each event is length, checksum, bytes, checksum."""
    events = []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def test_throughput_follows_from_seconds_and_config():
    """Two devices of 100 TFLOP/s; 8 sequences of 1000 tokens in 2 seconds."""
    model, moe = (
        ModelConfig(
            num_layers=1, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128, vocab_size=100
        ),
        MoEConfig(),
    )
    training = TrainingConfig(global_batch_size=8, seq_length=1000)
    found = Throughput.of(model, moe, training, jax.devices("cpu")[:1] * 2)
    matrices = 4 * 64 * 64 + 3 * 64 * 128 + 64 * 100
    assert found == Throughput(
        tokens_per_step=8000,
        flops_per_token=6 * matrices + 6 * 64 * 1000,
        num_devices=2,
        peak_flops=None,
    )
    throughput = Throughput(
        tokens_per_step=8000, flops_per_token=10**10, num_devices=2, peak_flops=100e12
    )
    assert throughput.speed(2.0) == Speed(tokens_per_second=4000, tgs=2000, tflops=20, mfu=0.2)
    assert found.speed(2.0).mfu is None


def test_speed_fills_the_record():
    speed = Throughput(
        tokens_per_step=8000, flops_per_token=10**10, num_devices=2, peak_flops=100e12
    ).speed(2.0)
    record = make_record(1, **vars(speed))
    assert (record.tokens_per_second, record.tgs, record.tflops, record.mfu) == (
        4000,
        2000,
        20,
        0.2,
    )


def test_peak_memory_is_the_largest_of_the_local_devices(monkeypatch):
    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    monkeypatch.setattr(
        jax,
        "local_devices",
        lambda: [Device({"peak_bytes_in_use": 5}), Device({"peak_bytes_in_use": 7}), Device(None)],
    )
    assert peak_memory_bytes() == 7


def test_peak_memory_is_unknown_on_a_cpu():
    assert peak_memory_bytes() is None


def test_every_step_becomes_one_json_object_with_the_agreed_keys(tmp_path):
    record_steps(tmp_path, [1, 2, 3], mfu=None, peak_memory_bytes=None)
    lines = read_lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    agreed = {
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens_per_second",
        "tgs",
        "tflops",
        "mfu",
        "peak_memory_bytes",
    }
    assert agreed <= lines[0].keys()
    assert lines[0]["mfu"] is None
    assert lines[0]["peak_memory_bytes"] is None
    assert lines[0]["loss"] == 2.3456


def test_optional_keys_appear_only_where_the_run_has_them(tmp_path):
    record_steps(tmp_path, [1])
    record_steps(
        tmp_path, [2], start_step=1, eval_loss=2.2, expert_load=1.4, bucket=1.25, router_loss=0.01
    )
    plain, full = read_lines(tmp_path)
    optional = {"eval_loss", "expert_load", "bucket", "router_loss", "z_loss"}
    assert not optional & plain.keys()
    assert optional & full.keys() == {"eval_loss", "expert_load", "bucket", "router_loss"}


def test_nan_and_infinity_become_null(tmp_path):
    record_steps(tmp_path, [1], loss=float("nan"), grad_norm=float("inf"), eval_loss=float("nan"))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    (line,) = read_lines(tmp_path)
    assert line["loss"] is line["grad_norm"] is line["eval_loss"] is None


def test_a_line_is_readable_as_soon_as_it_is_logged(tmp_path):
    logger = MetricsLogger(tmp_path, FILES_ONLY, num_steps=10)
    logger.log(make_record(1))
    assert len(read_lines(tmp_path)) == 1
    logger.close()


def test_resuming_removes_the_steps_that_run_again(tmp_path, capsys):
    record_steps(tmp_path, range(1, 8), loss=1.0)
    record_steps(tmp_path, [5, 6], start_step=4, loss=2.0)
    assert [(line["step"], line["loss"]) for line in read_lines(tmp_path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 1.0),
        (5, 2.0),
        (6, 2.0),
    ]
    assert "removed 3 lines after step 4" in capsys.readouterr().out


def test_starting_afresh_sets_the_old_file_aside(tmp_path):
    record_steps(tmp_path, [1, 2])
    record_steps(tmp_path, [1], loss=9.0)
    assert [line["loss"] for line in read_lines(tmp_path)] == [9.0]


@pytest.mark.parametrize("torn", [b'{"step": 4, "lo', b"\0\0\0\0", b'{"st', b"12"])
def test_a_torn_last_line_is_removed(tmp_path, torn):
    record_steps(tmp_path, [1, 2, 3])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    record_steps(tmp_path, [4], start_step=3)
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3, 4]


def test_a_whole_last_line_that_lacks_its_newline_is_kept(tmp_path):
    record_steps(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    record_steps(tmp_path, [3], start_step=2)
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3]


def test_a_crash_while_the_file_is_cut_loses_nothing(tmp_path, monkeypatch):
    record_steps(tmp_path, [1, 2, 3])
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def crash(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        MetricsLogger(tmp_path, FILES_ONLY, num_steps=10, start_step=1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_full_disk_gives_an_error_that_names_the_file_and_leaves_a_resumable_one(tmp_path):
    """A limit on file sizes stands in for the full disk: it cuts the third line in two."""
    logger = MetricsLogger(
        tmp_path, LogConfig(tensorboard=False, progress_bar=False, interval=1000), num_steps=1000
    )
    logger.log(make_record(1))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size + size // 2, hard))
    try:
        logger.log(make_record(2))
        with pytest.raises(
            RuntimeError, match=r"cannot write .*metrics\.jsonl: File too large.*run_dir"
        ):
            logger.log(make_record(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    logger.close()
    record_steps(tmp_path, [3], start_step=2)
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3]


def test_a_run_dir_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"cannot write .*file"):
        MetricsLogger(tmp_path / "file" / "run", FILES_ONLY, num_steps=10)


def test_other_processes_write_and_print_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    record_steps(tmp_path, [1, 2], log_config=LogConfig())
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_tensorboard_holds_every_finite_figure(tmp_path):
    record_steps(
        tmp_path,
        [1],
        log_config=LogConfig(progress_bar=False),
        loss=1.5,
        mfu=None,
        eval_loss=2.5,
        grad_norm=float("nan"),
    )
    (event,) = [event for event in read_events(tmp_path) if event.HasField("summary")]
    values = {value.tag: value.simple_value for value in event.summary.value}
    assert event.step == 1
    assert values["train/loss"] == 1.5
    assert values["eval/loss"] == 2.5
    assert not {"train/mfu", "train/grad_norm", "train/step"} & values.keys()


def test_tensorboard_hides_the_steps_that_run_again(tmp_path):
    """An event with SessionLog.START makes TensorBoard drop what it holds from its step on."""
    log_config = LogConfig(progress_bar=False)
    record_steps(tmp_path, [1, 2, 3], log_config=log_config)
    record_steps(tmp_path, [2], start_step=1, log_config=log_config)
    starts = [
        event.step
        for event in read_events(tmp_path)
        if event.session_log.status == SessionLog.START
    ]
    assert starts == [1, 2]


def test_tensorboard_can_be_switched_off(tmp_path):
    record_steps(tmp_path, [1])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_line_names_each_figure_with_its_unit():
    line = format_line(
        make_record(120, expert_load=1.42, eval_loss=2.2), num_steps=1000, device_name="GPU"
    )
    assert " ".join(line.split()) == (
        "step 120/1000 | loss 2.3456 | grad 0.820 | lr 3.00e-04 | 412k tok/s | 51.5k tok/s/GPU | 310 TFLOP/s | MFU 31.3 % | mem 57.1 GiB | load 1.42 | eval loss 2.2000"
    )


def test_line_shows_unknown_figures_as_not_available():
    line = format_line(
        make_record(1, mfu=None, peak_memory_bytes=None), num_steps=10, device_name="CPU"
    )
    assert "MFU  n/a" in line
    assert "mem   n/a" in line
    assert "load" not in line


@pytest.mark.parametrize(
    "changes",
    [
        {
            "loss": 10.9,
            "grad_norm": 1234.5,
            "tokens_per_second": 999.4,
            "tgs": 3.25,
            "tflops": 0.01,
        },
        {
            "loss": float("nan"),
            "grad_norm": float("inf"),
            "tokens_per_second": 1.234e7,
            "tgs": 999_600.0,
            "tflops": 1234.0,
        },
        {
            "loss": 12345.6,
            "grad_norm": 2e-5,
            "tokens_per_second": 99_960.0,
            "tgs": 9.996,
            "mfu": 0.05,
            "peak_memory_bytes": 10**6,
        },
        {
            "loss": 2e-7,
            "grad_norm": 0.0,
            "learning_rate": 0.0,
            "expert_load": 13.7,
            "peak_memory_bytes": 150 * 2**30,
        },
    ],
)
def test_columns_keep_their_place_and_fit_a_wide_terminal(changes):
    usual = format_line(make_record(1, expert_load=1.0), num_steps=1000, device_name="GPU")
    other = format_line(
        make_record(1000, **{"expert_load": 1.42} | changes), num_steps=1000, device_name="GPU"
    )
    assert [i for i, c in enumerate(other) if c == "|"] == [
        i for i, c in enumerate(usual) if c == "|"
    ]
    assert len(other) == len(usual) <= 150


def test_lines_come_at_the_interval_at_evaluations_and_at_the_end(tmp_path, capsys):
    logger = MetricsLogger(tmp_path, LogConfig(interval=4, tensorboard=False), num_steps=10)
    for step in range(1, 11):
        logger.log(make_record(step, eval_loss=2.0 if step == 6 else None))
    logger.close()
    printed = [
        int(line.split()[1].split("/")[0])
        for line in capsys.readouterr().out.replace("step ", "step  ").splitlines()
    ]
    assert printed == [4, 6, 8, 10]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stderr", "progress_bar", "shown"),
    [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)],
)
def test_progress_bar_is_shown_on_a_terminal_only(
    tmp_path, monkeypatch, stderr, progress_bar, shown
):
    monkeypatch.setattr(sys, "stderr", stderr())
    logger = MetricsLogger(
        tmp_path,
        LogConfig(tensorboard=False, progress_bar=progress_bar),
        num_steps=10,
        start_step=3,
    )
    logger.log(make_record(4))
    text = sys.stderr.getvalue()
    logger.close()
    assert ("3/10" in text) == shown
