"""What a run shows of itself: one line a step, `metrics.jsonl`, TensorBoard, a progress bar."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tqdm import tqdm

from mxjax.config.schema import LogConfig, ModelConfig, MoEConfig, TrainingConfig
from mxjax.training.flops import model_flops_per_token, peak_flops
from mxjax.training.run_dir import clear_write_errors

_TENSORBOARD_FLUSH_SECONDS = 10  # tensorboardX's flush waits for the disk: too slow for each step


@dataclass(frozen=True)
class Speed:
    """The speed of one step. Field names are those of `StepRecord`."""

    tokens_per_second: float
    tgs: float
    tflops: float
    mfu: float | None


@dataclass(frozen=True)
class Throughput:
    """Turns the seconds of a step into the usual figures."""

    tokens_per_step: int
    flops_per_token: int
    num_devices: int
    peak_flops: float | None

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        moe: MoEConfig,
        training: TrainingConfig,
        devices: Sequence[jax.Device],
    ) -> Throughput:
        """`devices` are all devices of the mesh, which are taken to be of one kind."""
        return cls(
            tokens_per_step=training.global_batch_size * training.seq_length,
            flops_per_token=model_flops_per_token(model, moe, training.seq_length),
            num_devices=len(devices),
            peak_flops=peak_flops(devices[0].device_kind, training.compute_dtype),
        )

    def speed(self, step_seconds: float) -> Speed:
        """All positions of the batch count as tokens, targets or not: all are computed."""
        tokens_per_second = self.tokens_per_step / step_seconds
        tgs = tokens_per_second / self.num_devices
        flops = tgs * self.flops_per_token
        return Speed(
            tokens_per_second=tokens_per_second,
            tgs=tgs,
            tflops=flops / 1e12,
            mfu=None if self.peak_flops is None else flops / self.peak_flops,
        )


def peak_memory_bytes() -> int | None:
    """Most bytes that any device of this process has held since the process began.

    None where the backend does not count them (CPU).
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    return max((s["peak_bytes_in_use"] for s in stats if s), default=None)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The figures of one optimizer step, as plain Python numbers.

    Each field is a key of `metrics.jsonl`. Fields with a default of None are written only when the
    run has them; the others always, as null where there is no value or no finite one.
    """

    step: int
    """Steps done, this one included: the first is 1."""
    loss: float
    """Cross entropy in nats, averaged over the real targets of the global batch."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    learning_rate: float
    num_tokens: int
    """Real targets of the step: padding and the ends of documents do not count."""
    step_seconds: float
    tokens_per_second: float
    """Positions computed per second on all devices."""
    tgs: float
    """Tokens per second per GPU."""
    tflops: float
    """Model TFLOP/s per device (`flops.model_flops_per_token`)."""
    mfu: float | None
    """Share of the device's peak, 0 to 1; None if the peak is unknown."""
    peak_memory_bytes: int | None
    """See the function of this name."""
    skipped_steps: int = 0
    """Updates that this run has skipped so far because of NaN or infinity."""
    expert_load: float | None = None
    """Largest / mean number of tokens per expert in the worst layer; 1 is perfect balance."""
    bucket: float | None = None
    """Capacity bucket that the step ran with, in multiples of perfect balance. The last resort,
    which holds any routing, is infinite and so null in the file."""
    router_loss: float | None = None
    """What the router's losses added to the objective, coefficients included."""
    z_loss: float | None = None
    """What the head's z-loss added to the objective, coefficient included."""
    mtp_loss: float | None = None
    """Cross entropy of multi-token prediction in nats, mean over its modules, without
    `model.mtp_loss_scaling_factor`."""
    eval_loss: float | None = None
    """Cross entropy on held-out data; on evaluation steps only."""

    def as_json(self) -> dict[str, float | int | None]:
        """The object of `metrics.jsonl`. JSON has no NaN and no infinity: they become null."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            field.name: value if value is None or math.isfinite(value) else None
            for field, value in values.items()
            if value is not None or field.default is not None
        }


def format_line(record: StepRecord, num_steps: int, device_name: str) -> str:
    """One line for people, in columns that keep their place over a run. `device_name`: "GPU"."""
    mfu = " n/a" if record.mfu is None else f"{100 * record.mfu:4.1f} %"
    memory = record.peak_memory_bytes
    columns = [
        f"step {record.step:>{len(str(num_steps))}}/{num_steps}",
        f"loss {_fixed_or_power(record.loss, decimals=4):>7}",
        f"grad {_fixed_or_power(record.grad_norm, decimals=3):>7}",
        f"lr {record.learning_rate:.2e}",
        f"{_with_prefix(record.tokens_per_second):>5} tok/s",
        f"{_with_prefix(record.tgs):>5} tok/s/{device_name}",
        f"{_three_digits(record.tflops):>4} TFLOP/s",
        f"MFU {mfu}",
        "mem   n/a" if memory is None else f"mem {memory / 2**30:5.1f} GiB",
    ]
    if record.expert_load is not None:
        columns.append(f"load {record.expert_load:5.2f}")
    if record.skipped_steps:
        columns.append(f"skipped {record.skipped_steps}")
    if record.eval_loss is not None:
        columns.append(f"eval loss {_fixed_or_power(record.eval_loss, decimals=4)}")
    return " | ".join(columns)


class MetricsLogger:
    """Prints and records the steps of a run; only process 0 does anything."""

    def __init__(
        self, run_dir: str | Path, log_config: LogConfig, num_steps: int, start_step: int = 0
    ):
        """Opens the files of `run_dir`, which is created if missing.

        `start_step` is the number of steps that the restored checkpoint has behind it. What an
        earlier run recorded after it goes, since those steps run again.

        Raises:
            RunDirError: a file cannot be written.
        """
        self._active = jax.process_index() == 0
        if not self._active:
            return
        self._num_steps = num_steps
        self._interval = log_config.interval
        self._device_name = jax.default_backend().upper()
        self._jsonl = _JsonLines(Path(run_dir) / "metrics.jsonl", start_step)
        self._tensorboard = (
            _TensorBoard(Path(run_dir) / "tensorboard", start_step)
            if log_config.tensorboard
            else None
        )
        self._bar = tqdm(
            total=num_steps,
            initial=start_step,
            unit="step",
            dynamic_ncols=True,
            leave=False,
            disable=None if log_config.progress_bar else True,  # None: only on a terminal
        )

    def log(self, record: StepRecord) -> None:
        """Records one step, and prints it if it is due, has an evaluation or is the last.

        Raises:
            RunDirError: a file cannot be written, as on a full disk.
        """
        if not self._active:
            return
        values = record.as_json()
        self._jsonl.write(values)
        if self._tensorboard:
            self._tensorboard.write(values)
        is_last = record.step == self._num_steps
        if record.step % self._interval == 0 or is_last or record.eval_loss is not None:
            line = format_line(record, self._num_steps, self._device_name)
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
        self._bar.update(record.step - self._bar.n)

    def close(self) -> None:
        """Writes what is buffered and removes the progress bar."""
        if not self._active:
            return
        self._bar.close()
        self._jsonl.close()
        if self._tensorboard:
            self._tensorboard.close()


class _JsonLines:
    """`metrics.jsonl`: each line is in the operating system's hands before training goes on."""

    def __init__(self, path: Path, start_step: int):
        self._path = path
        with clear_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size and start_step == 0:
                _set_aside(path)
            elif path.exists():
                _keep_steps(path, start_step)
            self._file = path.open("ab", buffering=0)

    def write(self, values: dict) -> None:
        data = json.dumps(values, allow_nan=False).encode() + b"\n"
        with clear_write_errors(self._path):
            # An unbuffered write may take only a part; the next try then says why.
            while data:
                data = data[self._file.write(data) :]

    def close(self) -> None:
        self._file.close()


def _set_aside(path: Path) -> None:
    """Keeps what another run has recorded here: a fresh one does not continue it."""
    number = 1
    while (aside := path.with_name(f"metrics.{number}.jsonl")).exists():
        number += 1
    path.rename(aside)
    print(f"{path} was of an earlier run: moved to {aside.name}")


def _keep_steps(path: Path, last_step: int) -> None:
    """Drops lines of steps after `last_step` and lines torn by a crash; all or nothing."""
    replacement = path.with_name(path.name + ".tmp")
    num_dropped = 0
    with path.open("rb") as old, replacement.open("wb") as new:
        for line in old:
            step = _step_of(line)
            if step is not None and step <= last_step:
                new.write(line.rstrip(b"\n") + b"\n")
            else:
                num_dropped += 1
        new.flush()
        os.fsync(new.fileno())
    replacement.replace(path)
    if num_dropped:
        print(f"{path}: removed {num_dropped} lines after step {last_step}, which run again")


def _step_of(line: bytes) -> int | None:
    """The step of a line of `metrics.jsonl`; None if the line is torn."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None


class _TensorBoard:
    """A TensorBoard event file.

    tensorboardX's `SummaryWriter` writes from a thread whose death, on a full disk, leaves the
    caller waiting forever; its `EventsWriter` writes in place.
    """

    def __init__(self, folder: Path, start_step: int):
        self._path = folder
        with clear_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # tensorboardX's own file name is that of the second; two starts may fall into one.
            self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        # TensorBoard hides what earlier files hold from this step on.
        restart = SessionLog(status=SessionLog.START)
        self._write_event(Event(step=start_step + 1, session_log=restart))
        self._flush()

    def write(self, values: dict) -> None:
        scalars = [
            Summary.Value(tag=_TENSORBOARD_TAGS.get(key, f"train/{key}"), simple_value=value)
            for key, value in values.items()
            if key != "step" and value is not None
        ]
        self._write_event(Event(step=values["step"], summary=Summary(value=scalars)))
        if time.monotonic() - self._flushed > _TENSORBOARD_FLUSH_SECONDS:
            self._flush()

    def close(self) -> None:
        with clear_write_errors(self._path):
            self._writer.close()

    def _write_event(self, event: Event) -> None:
        event.wall_time = time.time()
        with clear_write_errors(self._path):
            self._writer.write_event(event)

    def _flush(self) -> None:
        with clear_write_errors(self._path):
            self._writer.flush()
        self._flushed = time.monotonic()


_TENSORBOARD_TAGS = {"eval_loss": "eval/loss"}


def _fixed_or_power(x: float, decimals: int) -> str:
    """At most 7 characters: `decimals` decimals, or a power of ten where they do not fit."""
    fixed = f"{x:.{decimals}f}"
    readable = x == 0 or abs(x) >= 10.0 ** (1 - decimals)
    return fixed if readable and len(fixed) <= 7 else f"{x:.1e}"


def _three_digits(x: float) -> str:
    return f"{x:.{2 if x < 9.995 else 1 if x < 99.95 else 0}f}"


def _with_prefix(x: float) -> str:
    for prefix in ("", "k", "M"):
        if x < 999.5:
            return _three_digits(x) + prefix
        x /= 1000
    return _three_digits(x) + "G"
