"""Speed and memory of one training step on the GPUs of this machine, beside other trainers.

    python benchmarks/train_step.py --models llama8L,dslite8L [--variants unrolled,scan-full]
        [--steps 10] [--json out.json] [--compile-ahead N] [section.key=value ...]

A variant is words joined by `-`, see `overrides_of_word`. Each runs in a process of its own, so
that peak memory is its own; a step is timed from the host with the device drained before and after,
and the median of `--steps` steps is reported. Each step gets new random tokens.

Nothing is timed that does not compute what it should: the first loss must be what random weights
give on random tokens, and no step may have been rejected. With a router of its own choice the
smallest bucket is taken that holds what the steps need; no token is dropped.

`docs/benchmarks.md` has the models, the FLOP formula and figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from variants import BENCHMARKS, WORDS, overrides_of

SPARE = 1.03
"""The bucket must hold this much more than the first step needs, as others need more or less."""

WARM_UP_STEPS = 3


# One variant, in a process of its own


class Stepper:
    """Takes steps of one configuration, each with new random tokens."""

    def __init__(self, config, mesh, before_state: Callable[[], object]):
        from mxjax.moe.buckets import BucketChooser
        from mxjax.training.programs import Programs

        self.config = config
        self.programs = Programs(config, mesh)
        self.buckets = BucketChooser(config.moe.capacity_buckets)
        self.compile_seconds = 0.0
        self.seed = 0
        self._compile()
        before_state()
        self.state = self.programs.create_state()

    def _compile(self) -> None:
        started = time.perf_counter()
        self.function = self.programs.step(self.buckets.current)
        self.compile_seconds = time.perf_counter() - started

    def batch(self) -> dict:
        """A global batch of random tokens: with a document mask documents of 1000 tokens on
        average, without one each sequence is one document."""
        import jax
        import numpy as np

        from mxjax.kernels.bench.attention import document_lengths, segment_ids

        self.seed += 1
        generator = np.random.default_rng(self.seed)

        batch = self.programs.abstract_batch()
        *leading, length = batch["segment_ids"].shape
        rows = math.prod(leading)
        lengths = [length] * rows
        if self.config.data.document_mask:
            lengths = document_lengths(rows, length, mean=1000)

        def array(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            if name == "positions":
                values = np.concatenate([np.arange(n) for n in lengths]).reshape(leaf.shape)
            elif name == "segment_ids":
                values = segment_ids(rows, length, lengths).reshape(leaf.shape)
            else:
                values = generator.integers(0, self.config.model.vocab_size, leaf.shape)
            return jax.device_put(values.astype(np.int32), leaf.sharding)

        return {name: array(name, leaf) for name, leaf in batch.items()}

    def step(self):
        """(seconds, result) of a step that was applied.

        Raises:
          Overflow: a larger bucket was compiled; what was measured before does not count.
          RuntimeError: loss or gradient are not finite.
        """
        import jax

        batch = jax.block_until_ready(self.batch())
        started = time.perf_counter()
        self.state, result = self.function(self.state, batch)
        jax.block_until_ready((self.state, result))
        seconds = time.perf_counter() - started
        if bool(result.overflow):
            self.enlarge(float(result.needed_capacity))
            raise Overflow
        if not bool(result.finite) or bool(self.state.halted):
            raise RuntimeError(f"the step was not applied: {result}")
        return seconds, result

    def enlarge(self, needed: float) -> None:
        """Go on with the smallest bucket that holds `needed` and a little more."""
        import jax
        import numpy as np

        self.buckets.overflowed(needed * SPARE)
        self._compile()
        running = jax.device_put(np.zeros((), bool), self.programs.replicated)
        self.state = dataclasses.replace(self.state, halted=running)


class Overflow(Exception):
    """A step needed larger expert buffers."""


READY = "ready"


def wait_for_turn() -> None:
    """Tell the parent that the step is compiled, and wait until the GPU is free."""
    print(READY, flush=True)
    sys.stdin.readline()


def configured(config_file: str, overrides: list[str]):
    """The configuration, with what `remat.mode` chooses, and its mesh."""
    import jax

    from mxjax.config import load_config
    from mxjax.sharding.mesh import build_mesh
    from mxjax.training.plan import fitted

    config = load_config(config_file, overrides, lambda _: jax.device_count())
    mesh = build_mesh(config.parallel)
    return fitted(config, mesh).config, mesh


def compile_only(config_file: str, overrides: list[str]) -> None:
    """Fill JAX's compilation cache with the step that `measure` takes first."""
    from mxjax.moe.buckets import BucketChooser
    from mxjax.training.programs import Programs

    config, mesh = configured(config_file, overrides)
    Programs(config, mesh).step(BucketChooser(config.moe.capacity_buckets).current)


def profile_steps(stepper: Stepper, folder: str, steps: int = 3) -> None:
    """Write a table of the kernels of a step, and the compiled program."""
    import jax
    from kernel_times import profile, table

    program = stepper.programs.step_program(stepper.buckets.current).as_text()

    def run() -> None:
        for _ in range(steps):
            stepper.step()
        jax.block_until_ready(stepper.state)

    rows = profile(run, steps, program)
    Path(folder, "kernels.txt").write_text(table(rows))
    with gzip.open(Path(folder, "program.txt.gz"), "wt") as file:
        file.write(program)


def measure(config_file: str, overrides: list[str], steps: int, profile_in: str | None) -> dict:
    """Figures of one variant, in this process."""
    import jax

    from mxjax.training.metrics import Throughput, peak_memory_bytes

    config, mesh = configured(config_file, overrides)
    stepper = Stepper(config, mesh, before_state=wait_for_turn)
    first_loss = None
    while True:  # again after an overflow; there are finitely many buckets
        try:
            taken = []
            for _ in range(WARM_UP_STEPS + steps):
                taken.append(stepper.step())
                if first_loss is None:
                    first_loss = float(taken[0][1].loss)
                    check_first_loss(first_loss, config)
            break
        except Overflow:
            continue
    if profile_in:
        profile_steps(stepper, profile_in)
    seconds = [seconds for seconds, _ in taken[WARM_UP_STEPS:]]
    results = [result for _, result in taken[WARM_UP_STEPS:]]
    speed = Throughput.of(config.model, config.moe, config.training, jax.devices()).speed(
        statistics.median(seconds)
    )
    bucket = stepper.buckets.current if config.moe.num_experts else None
    return {
        "tokens_per_second_per_device": speed.tgs,
        "tflops": speed.tflops,
        "median_seconds": statistics.median(seconds),
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
        "peak_memory_bytes": peak_memory_bytes(),
        "compile_seconds": stepper.compile_seconds,
        "first_loss": first_loss,
        "bucket": None if bucket is None or math.isinf(bucket) else bucket,
        "expert_load": max(float(result.expert_load) for result in results) if bucket else None,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def check_first_loss(loss: float, config) -> None:
    """Random weights on random tokens: logits are normal, with the variance that a normalised
    hidden state and the head's initial weights give, and targets are independent of them. So the
    loss is the logarithm of the vocabulary and half of that variance, whatever the layers do.

    Raises:
      RuntimeError: it is not.
    """
    variance = config.model.init_method_std**2 * config.model.hidden_size
    expected = math.log(config.model.vocab_size) + variance / 2
    tokens = config.training.global_batch_size * config.training.seq_length
    tolerance = 0.02 + 5 * math.sqrt(variance / tokens)
    if not abs(loss - expected) < tolerance:
        raise RuntimeError(f"wrong: first loss {loss:.4f}, expected {expected:.4f}")


# All of them


class Process:
    """This script on one variant, in a process of its own."""

    def __init__(self, model: str, overrides: list[str], *arguments: str, **environment: str):
        self.folder = tempfile.TemporaryDirectory()
        config_file = Path(self.folder.name) / "config.yaml"
        config_file.write_text(json.dumps(BENCHMARKS[model].config))
        command = [sys.executable, __file__, *arguments, "--config", str(config_file), *overrides]
        self.stderr = Path(self.folder.name) / "stderr"
        self.process = subprocess.Popen(
            command,
            env={**environment, **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr.open("w"),
            text=True,
        )

    def result(self) -> str | None:
        """Its last line, once it has compiled and had its turn; None: it failed."""
        while (line := self.process.stdout.readline()) and line.strip() != READY:
            pass
        stdout, _ = self.process.communicate("go\n" if line else None)
        return None if self.process.returncode else stdout.strip().split("\n")[-1]

    def error(self) -> str:
        """What it said, in a line."""
        lines = self.stderr.read_text().strip().splitlines() or ["no message"]
        told = [i for i, line in enumerate(lines) if re.search("Error|RESOURCE_EXHAUSTED", line)]
        last = told[-1] if told else len(lines) - 1
        if "ConfigError" in lines[last]:  # the problems follow
            return " ".join(line.strip() for line in lines[last + 1 :])
        return lines[last][:300]


def compile_ahead(model: str, variants: list[str], overrides: list[str], at_once: int) -> None:
    """Compile all variants, several at once, into the cache that `JAX_COMPILATION_CACHE_DIR` names.

    They try out kernels on the same GPU meanwhile, so that a choice may be worse than that of a
    variant compiled alone.
    """

    def compile_variant(variant: str) -> None:
        Process(
            model,
            overrides_of(model, variant) + overrides,
            "--compile-only",
            XLA_PYTHON_CLIENT_PREALLOCATE="false",
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        ).result()

    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(compile_variant, variants))


def start(model: str, variant: str, arguments: argparse.Namespace) -> Process:
    """Its process, which will compile and then wait for its turn."""
    more, ahead = [], {}
    if arguments.profile:
        folder = Path(arguments.profile, f"{model}-{variant}")
        folder.mkdir(parents=True, exist_ok=True)
        more = ["--profile", str(folder)]
    if arguments.overlap:  # others are on the GPU at the same time
        ahead = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return Process(
        model,
        overrides_of(model, variant) + arguments.overrides,
        *("--steps", str(arguments.steps), "--measure", *more),
        **{"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **ahead},
    )


def measured(model: str, variants: list[str], arguments: argparse.Namespace):
    """(variant, its figures or its error) of each."""
    waiting: deque[tuple[str, Process]] = deque()
    rest = iter(variants)
    while True:
        for variant in itertools.islice(rest, 1 + arguments.overlap - len(waiting)):
            waiting.append((variant, start(model, variant, arguments)))
        if not waiting:
            return
        variant, process = waiting.popleft()
        line = process.result()
        yield variant, json.loads(line) if line else {"error": process.error()}


COLUMNS = ("tokens/s", "TFLOP/s", "peak GiB", "ms/step", "compile s", "1st loss", "load", "bucket")


def print_row(name: str, figures: list[str]) -> None:
    """One line of the table."""
    print(f"{name:<46}" + "".join(f" {figure:>9}" for figure in figures), flush=True)


def shown(value: float | None, form: str) -> str:
    """`-` for what is not known."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def print_variant(name: str, figures: dict) -> None:
    """Its line, or what went wrong."""
    if "error" in figures:
        print(f"{name:<46} failed: {figures['error']}", flush=True)
        return
    memory = figures["peak_memory_bytes"]
    bucket = "any" if figures["expert_load"] and not figures["bucket"] else figures["bucket"]
    print_row(
        name,
        [
            shown(figures["tokens_per_second_per_device"], ",.0f"),
            shown(figures["tflops"], ".1f"),
            shown(None if memory is None else memory / 2**30, ".1f"),
            shown(1e3 * figures["median_seconds"], ".1f"),
            shown(figures["compile_seconds"], ".1f"),
            shown(figures["first_loss"], ".3f"),
            shown(figures["expert_load"], ".2f"),
            bucket if isinstance(bucket, str) else shown(bucket, "g"),
        ],
    )


def run_model(
    model: str, variants: list[str], arguments: argparse.Namespace, results: dict[str, dict]
) -> None:
    """Measure, print the table of one model, put its figures into `results`."""
    benchmark = BENCHMARKS[model]
    changes = f", {' '.join(arguments.overrides)}" if arguments.overrides else ""
    print(f"{model}, median of {arguments.steps} steps{changes}")
    print_row("", list(COLUMNS))
    for variant, found in measured(model, variants, arguments):
        print_variant(variant, found)
        results.setdefault(model, {})[variant] = found
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")
    for peer in benchmark.peers:
        values = (peer.tokens_per_second, ",.0f"), (peer.tflops, ".0f"), (peer.peak_gib, ".0f")
        print_row(f"  {peer.trainer}, {peer.settings}", [shown(*value) for value in values])
    if benchmark.peers:
        print("  (peers: one H200, 2026-11-29, not in this run)")
    print()


def main() -> int:
    """Returns the exit code: 1 if a variant failed, 2 for arguments that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama8L", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--variants", help=f"words of {', '.join(WORDS)}, joined by -")
    parser.add_argument("--steps", type=int, default=20, help="0: compile ahead, no more")
    parser.add_argument("--json", metavar="FILE", help="write all figures here")
    parser.add_argument(
        "--compile-ahead",
        type=int,
        default=0,
        metavar="N",
        help="first compile all variants of a model, N at once; set JAX_COMPILATION_CACHE_DIR",
    )
    parser.add_argument(
        "--overlap",
        type=int,
        default=0,
        metavar="N",
        help="while one variant is measured the next N load their programs, if they are compiled",
    )
    parser.add_argument(
        "--profile",
        metavar="FOLDER",
        help="also write the kernels of a step and the compiled program of each variant",
    )
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="section.key=value for every variant")
    arguments = parser.parse_intermixed_args()
    if arguments.measure:
        print(
            json.dumps(
                measure(arguments.config, arguments.overrides, arguments.steps, arguments.profile)
            )
        )
        return 0
    if arguments.compile_only:
        compile_only(arguments.config, arguments.overrides)
        return 0
    if arguments.compile_ahead and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        parser.error("--compile-ahead needs JAX_COMPILATION_CACHE_DIR, a folder for the programs")
    for name in ("steps", "overlap", "compile_ahead"):
        if getattr(arguments, name) < 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}: is negative")
    if not arguments.steps and not arguments.compile_ahead:
        parser.error("--steps 0 only compiles, which takes --compile-ahead")
    if arguments.json and not Path(arguments.json).absolute().parent.is_dir():
        parser.error(f"--json {arguments.json}: there is no such folder")
    models = arguments.models.split(",")
    if unknown := [model for model in models if model not in BENCHMARKS]:
        parser.error(f"--models: {unknown[0]!r} is none of {', '.join(BENCHMARKS)}")
    results = {}
    for model in models:
        variants = (arguments.variants or BENCHMARKS[model].variants).split(",")
        try:
            for variant in variants:
                overrides_of(model, variant)
        except ValueError as error:
            parser.error(str(error))
        if arguments.compile_ahead:
            compile_ahead(model, variants, arguments.overrides, arguments.compile_ahead)
        if arguments.steps:
            run_model(model, variants, arguments, results)
    failed = any("error" in figures for model in results.values() for figures in model.values())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
