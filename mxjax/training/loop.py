"""The training loop, read top to bottom: resume, steps, evaluation, checkpoints, end."""

from __future__ import annotations

import dataclasses
import hashlib
import signal
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import mxjax
from mxjax.ckpt.init_from import initialize
from mxjax.ckpt.store import CheckpointError, CheckpointStore
from mxjax.config import Config, to_yaml
from mxjax.data import DataError, Samples, build_data
from mxjax.data.loader import BatchLoader
from mxjax.moe.buckets import BucketChooser
from mxjax.sharding.mesh import AXES
from mxjax.training.attention_note import attention_note
from mxjax.training.diagnose import NonFiniteError, where_nonfinite
from mxjax.training.flops import parameter_counts
from mxjax.training.metrics import MetricsLogger, StepRecord, Throughput, peak_memory_bytes
from mxjax.training.pipeline_plan import pipeline_note
from mxjax.training.profiler import StepProfiler
from mxjax.training.programs import Programs
from mxjax.training.run_dir import claim, write_config
from mxjax.training.sample import greedy_sample
from mxjax.training.state import TrainState
from mxjax.training.step import StepResult

RUN_AHEAD = 1
"""Steps sent off before the result of an earlier one is read: hides the host's work. Not under
`nonfinite: skip`, where the next step would change the state that a bad one is explained with."""


@dataclass(frozen=True)
class Dispatched:
    """A step that the devices are working on."""

    step: int
    batch: dict[str, jax.Array]
    bucket: float
    result: StepResult


class Trainer:
    """One run, from its configuration to its last checkpoint."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config = config
        self.run_dir = Path(config.run_dir)
        self.programs = Programs(config, mesh)
        cannot = config.training.nonfinite == "skip" or self.programs.waits
        self.run_ahead = 0 if cannot else RUN_AHEAD
        training = config.training
        self.data = build_data(
            config.data, training.seq_length, config.model.vocab_size, training.seed
        )
        _require_same_data(self.data.train.fingerprint)
        self.lock = claim(self.run_dir)
        self.buckets = BucketChooser(config.moe.capacity_buckets)
        self.store = CheckpointStore(self.run_dir, config.checkpoint)
        self.state, self.start_step, metadata = self._restore_or_create()
        self.loader = self._open(self.data.train, start=metadata.get("next_sample_index", 0))
        self.throughput = Throughput.of(config.model, config.moe, training, list(mesh.devices.flat))
        self.profiler = StepProfiler(self.run_dir, config.log.profile_steps)
        self.pending: deque[Dispatched] = deque()
        self.fits: deque[tuple[int, float]] = deque(metadata.get("fits", []))
        self.saved_step = self.start_step
        self.skipped_steps, self.skipped_in_a_row = metadata.get("skipped", (0, 0))
        self.last_step = self._last_step()
        self.stop_requested = False

    # -- the run ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the last step, the end of the data, or SIGTERM."""
        self._announce()
        last = self.start_step
        try:
            if self.start_step < self.last_step:
                last = self._train()
            else:
                say(f"nothing to do: step {last} is done")
            self._end(last)
            self.store.close()
        finally:
            self.loader.close()
            self.programs.close()
            if self.lock:
                self.lock.close()

    def _train(self) -> int:
        """Steps, with what must be open meanwhile; returns the last step done."""
        write_config(self.config, self.run_dir)
        alone = jax.process_count() == 1
        if alone:  # else JAX's preemption service has the signal, see `_should_stop`
            previous = signal.signal(signal.SIGTERM, self._on_sigterm)
        self.logger = MetricsLogger(self.run_dir, self.config.log, self.last_step, self.start_step)
        try:
            last = self._steps()
            self._save(last, final=True)
            self.store.wait()
        finally:
            if alone:
                signal.signal(signal.SIGTERM, previous)
            self.logger.close()
            self.profiler.close()
        return last

    def _steps(self) -> int:
        """Returns the last step done."""
        self.programs.step(self.buckets.current)
        self.programs.prepare(self._overflow_bucket())
        self.clock = time.perf_counter()
        for step in range(self.start_step + 1, self.last_step + 1):
            if self._should_stop(step):
                return step - 1
            self.profiler.before_step(step)
            self._dispatch(step, next(self.loader))
            while len(self.pending) > (0 if self._is_boundary(step) else self.run_ahead):
                self._settle()
            self.profiler.after_step(step)
            self.store.check()
            self._save(step)
        return self.last_step

    def _dispatch(self, step: int, batch: dict[str, jax.Array]) -> None:
        # The bucket follows from the steps that have settled under full run-ahead, even where later
        # ones have too (after a save, a resume, an evaluation): its size can change the last bits.
        while self.fits and self.fits[0][0] < step - self.run_ahead:
            self.buckets.fitted(self.fits.popleft()[1])
        bucket = self.buckets.current
        self.state, result = self.programs.step(bucket)(self.state, batch)
        self.pending.append(Dispatched(step, batch, bucket, result))

    def _settle(self) -> None:
        """Wait for the oldest step under way, deal with a rejected one, record it."""
        done = self.pending.popleft()
        result = jax.tree.map(float, jax.device_get(done.result))
        if result.overflow:
            self._repeat(done, result.needed_capacity)
            return
        if not result.finite:
            self._nonfinite(done, result)
        else:
            self.skipped_in_a_row = 0
            self.fits.append((done.step, result.needed_capacity))
        self._record(done, result)

    def _repeat(self, done: Dispatched, needed: float) -> None:
        """A buffer was too small: run the step, and those sent off after it, with a larger one."""
        self.buckets.overflowed(needed)
        self.fits.clear()
        say(
            f"step {done.step}: the busiest expert needs {needed:.2f} x balanced, more than the "
            f"bucket of {done.bucket:g}; repeating with {self.buckets.current:g}"
        )
        self.programs.prepare(self.buckets.current)
        self.programs.prepare(self._overflow_bucket())
        rejected = [done, *self.pending]
        self.pending.clear()
        self.state = dataclasses.replace(
            self.state, halted=jax.device_put(np.zeros((), bool), self.programs.replicated)
        )
        for item in rejected:
            self._dispatch(item.step, item.batch)
            self._settle()

    def _nonfinite(self, done: Dispatched, result: StepResult) -> None:
        training = self.config.training
        what = f"step {done.step}: loss {result.loss}, gradient norm {result.grad_norm}"
        if training.nonfinite == "skip":
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row <= training.max_skipped_steps:
                say(f"{what}: update skipped")
                return
            what += f", after {training.max_skipped_steps} skipped steps in a row"
        # The state is the one before this step: a skipping run has only moved on its step count.
        place = where_nonfinite(self.programs, done.bucket, self.state, done.batch)
        self.store.wait()
        raise NonFiniteError(
            f"{what}. First value that is not finite: {place}. The state before this step is "
            "good: resume from the last checkpoint with a lower optimizer.lr, or go on past such "
            "steps with training.nonfinite=skip"
        )

    def _record(self, done: Dispatched, result: StepResult) -> None:
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        has_experts = self.config.moe.num_experts > 0
        eval_loss = self._evaluate() if self._is_evaluation(done.step) else None
        record = StepRecord(
            step=done.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            num_tokens=int(result.num_targets),
            step_seconds=seconds,
            **vars(self.throughput.speed(seconds)),
            peak_memory_bytes=peak_memory_bytes(),
            skipped_steps=self.skipped_steps,
            expert_load=result.expert_load,
            bucket=done.bucket if has_experts else None,
            router_loss=result.router_loss if has_experts else None,
            z_loss=result.z_loss if self.config.training.z_loss_coeff else None,
            mtp_loss=result.mtp_loss,
            eval_loss=eval_loss,
        )
        self.logger.log(record)
        if eval_loss is not None:
            self.clock = time.perf_counter()

    # -- what a step may bring with it -----------------------------------------------------------

    def _evaluate(self) -> float | None:
        """Mean loss per target over the first `eval_batches` held-out batches; None if SIGTERM
        came meanwhile, which leaves no time for it."""
        loader = self._open(self.data.validation, pad_last_batch=True)
        total = targets = 0.0
        key = jax.random.key(0)
        for _, batch in zip(range(self.config.training.eval_batches), loader, strict=False):
            if self.stop_requested:
                break
            for bucket in self.buckets.current_and_larger:
                evaluate = self.programs.evaluation(bucket)
                stats, _ = evaluate(self.state.params, self.state.expert_bias, batch, key)
                if float(stats.needed_capacity) <= np.float32(bucket):
                    break
            total += float(stats.loss) * float(stats.num_targets)
            targets += float(stats.num_targets)
        loader.close()
        return None if self.stop_requested else total / targets

    def _save(self, step: int, final: bool = False) -> None:
        interval = self.config.checkpoint.save_interval
        due = interval and (final or step % interval == 0)
        if not due or step == self.saved_step:
            return
        self.saved_step = step
        metadata = {
            "step": step,
            "next_sample_index": self.loader.next_sample_index,
            "data": self.data.train.fingerprint,
            "buckets": self.buckets.as_dict(),
            "fits": list(self.fits),
            "skipped": [self.skipped_steps, self.skipped_in_a_row],
            "mesh": {axis: getattr(self.config.parallel, axis) for axis in AXES},
            "version": mxjax.__version__,
            "config": to_yaml(self.config),
        }
        self.store.save(step, self.programs.layer_order.to_model(self.state), metadata)

    def _restore_or_create(self) -> tuple[TrainState, int, dict[str, Any]]:
        """State, steps done, and the checkpoint's metadata (empty for a fresh start)."""
        step, init = self.store.resume_step(), self.config.init_from
        if step is None:
            self.programs.prepare(self.buckets.current)  # compiles while the state is created
            return self._initialize() if init.path else (self.programs.create_state(), 0, {})
        if init.path is not None:
            say(f"init_from.path: not read, as {self.store.directory} has checkpoint {step}")
        order = self.programs.layer_order
        state, metadata = self.store.restore(order.abstract_state, step)
        state = order.from_model(state)
        # None: imported from another program, whose data may be any.
        if metadata["data"] not in (None, self.data.train.fingerprint):
            raise CheckpointError(
                f"Checkpoint {step} in {self.store.directory} was made with other data, or another "
                "order of it (paths, contents, seq_length, seed, shuffle): going on would repeat "
                "and leave out samples. Restore the data settings, or start a new run_dir."
            )
        self.buckets.restore(metadata["buckets"])
        return state, step, metadata

    def _initialize(self) -> tuple[TrainState, int, dict[str, Any]]:
        """What `init_from` names, in the form of `_restore_or_create`."""
        start = initialize(self.config, self.programs)
        say(f"starting with {start.describe()}")
        for line in start.notes:
            say(f"note: {line}")
        metadata = start.metadata
        if metadata.get("data") not in (None, self.data.train.fingerprint):
            say("note: the data are others than before, and are read from their beginning")
            metadata = metadata | {"next_sample_index": 0}
        if "buckets" in metadata:
            self.buckets.restore(metadata["buckets"])
        return start.state, start.step, metadata

    def _open(self, samples: Samples, **options: Any) -> BatchLoader:
        """Batches of this run's shape and placement."""
        config = self.config
        return BatchLoader(
            samples,
            global_batch_size=config.training.global_batch_size,
            num_microbatches=config.training.num_microbatches,
            sharding=self.programs.batch_sharding,
            mtp_num_layers=config.model.mtp_num_layers,
            sequence_order=self.programs.sequence_order,
            num_threads=config.data.num_threads,
            prefetch=config.data.prefetch,
            **options,
        )

    # -- when ------------------------------------------------------------------------------------

    def _is_evaluation(self, step: int) -> bool:
        training = self.config.training
        if not training.eval_interval:
            return False
        return step % training.eval_interval == 0 or step == self.last_step

    def _is_boundary(self, step: int) -> bool:
        """Whether this step must have settled before the next one is sent off."""
        interval = self.config.checkpoint.save_interval
        profiled = self.config.log.profile_steps or ()
        return bool(
            step == self.last_step
            or self._is_evaluation(step)
            or (interval and step % interval == 0)
            or step in profiled
            or step + 1 in profiled
        )

    def _should_stop(self, step: int) -> bool:
        if jax.process_count() > 1:
            # All processes agree on the step; JAX's own service has caught the signal.
            self.stop_requested |= multihost_utils.reached_preemption_sync_point(step)
        if self.stop_requested:
            while self.pending:
                self._settle()
        return self.stop_requested

    def _last_step(self) -> int:
        """`training.num_steps`, or the last step for which there are data."""
        num_steps, samples = self.config.training.num_steps, self.data.train.num_samples
        if samples is None:
            return num_steps
        batch = self.config.training.global_batch_size
        left = (samples - self.loader.next_sample_index) // batch
        if self.start_step + left == 0:
            raise DataError(
                f"data.num_epochs: {samples} samples are less than one batch of "
                f"training.global_batch_size ({batch}); lower that or raise data.num_epochs"
            )
        return min(num_steps, self.start_step + left)

    def _on_sigterm(self, *_: Any) -> None:
        self.stop_requested = True

    def _overflow_bucket(self) -> float | None:
        return self.buckets.next_larger if self.config.moe.num_experts else None

    # -- words -----------------------------------------------------------------------------------

    def _announce(self) -> None:
        config, mesh = self.config, self.programs.mesh
        split = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
        count = parameter_counts(config.model, config.moe).total
        devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
        say(f"mxjax {mxjax.__version__}: {count:,} parameters on {', '.join([devices, *split])}")
        say(f"attention: {attention_note(config, mesh)}")
        say(f"data: {self.data.train.describe()}")
        if mesh.shape["pp"] > 1:
            stacks = self.programs.objective.stacks
            say(f"pipeline: {pipeline_note(config, stacks, self.programs.stagewise)}")
        if self.start_step:
            say(f"resuming after step {self.start_step} of {config.training.num_steps}")

    def _end(self, step: int) -> None:
        log = self.config.log
        if log.sample_tokens and not self.stop_requested:  # SIGTERM leaves no time for it
            tokenizer = self.data.tokenizer
            tokens = greedy_sample(
                self.programs.objective,
                self.state,
                tokenizer.encode(log.sample_prompt),
                log.sample_tokens,
                self.config.training.seq_length,
            )
            say(f"sample: {log.sample_prompt}{tokenizer.decode(tokens)}")
        early = step < self.config.training.num_steps
        cause = "SIGTERM" if self.stop_requested else "the data ended (data.num_epochs)"
        why = f" early: {cause}" if early else ""
        say(f"ended{why} after step {step}; everything is in {self.run_dir}")
        if not self.config.checkpoint.save_interval:
            if early:
                say("nothing was saved: checkpoint.save_interval is 0")
            return
        change = ""
        if not early:
            change = " with a larger training.num_steps"
        elif not self.stop_requested:
            change = " with a larger data.num_epochs"
        if self.config.checkpoint.restore_step is not None:
            change += ", without checkpoint.restore_step"
        say(f"to go on: run the same command again{change}")


def _require_same_data(fingerprint: str) -> None:
    """Hosts with different files (or Pythons, for their standard library) would mix corpora."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(fingerprint.encode()).digest(), np.uint8)
    if not np.all(multihost_utils.process_allgather(digest) == digest):
        raise DataError("data.paths: the processes do not read the same text; give all the same")


def say(line: str) -> None:
    """Print once, from the first process."""
    if jax.process_index() == 0:
        print(line, flush=True)
