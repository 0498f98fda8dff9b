"""Speed and memory of one training step on the GPUs of this machine, beside other trainers.

    python benchmarks/train_step.py --models llama8L,dslite8L [--variants unrolled,scan-full]
        [--steps 10] [--json out.json] [--compile-ahead N] [section.key=value ...]

A variant is a list of words of `WORDS` joined by `-`. Each runs in a process of its own, so that
peak memory is its own; a step is timed from the host with the device drained before and after, and
the median of `--steps` steps is reported. Each step gets new random tokens.

Nothing is timed that does not compute what it should: the first loss must be what random weights
give on random tokens, and no step may have been rejected. With a router of its own choice the
smallest bucket is taken that holds what the steps need; no token is dropped.

`docs/benchmarks.md` has the models, the FLOP formula and figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mxjax.models.presets import PRESETS


@dataclass(frozen=True)
class Peer:
    """Another trainer on the same model, as measured by us on one H200 (2026-11-29)."""

    trainer: str
    settings: str
    tokens_per_second: float
    tflops: float
    peak_gib: float


@dataclass(frozen=True)
class Benchmark:
    """One model: what the configuration sets, which variants are worth their time, the peers."""

    config: dict
    variants: str
    peers: tuple[Peer, ...] = ()


def shortened(preset: str, **model: object) -> dict:
    """Sections of a published model with changes such as fewer layers."""
    published = PRESETS[preset]
    return {
        "model": dataclasses.asdict(dataclasses.replace(published.model, **model)),
        "moe": dataclasses.asdict(published.moe),
        "data": {"document_mask": False},
        "parallel": {"zero_stage": 0},
    }


BENCHMARKS = {
    # Llama-3-8B with 8 layers, sequence 8192.
    "llama8L": Benchmark(
        shortened("llama3_8b", num_layers=8)
        | {"training": {"seq_length": 8192, "global_batch_size": 2}},
        "unrolled,unrolled-dots,scan,scan-dots",
        (
            Peer("MaxText 0.2.5", "B2, unscanned", 35348, 538, 53),
            Peer("MaxText 0.2.5", "B1, unscanned", 31508, 480, math.nan),
            Peer("torchtitan 0.2.2", "B2, no AC, FSDP1", 33958, 517, 57),
            Peer("torchtitan 0.2.2", "B4, selective AC", 33829, 515, 64),
            Peer("megatron-core 0.19.2", "B2, no TE, SDPA", 32809, 500, 85),
            Peer("plain JAX, 60 lines", "B2, scanned, dots saved", 33062, 504, math.nan),
        ),
    ),
    # DeepSeek-V2-Lite with 8 layers, sequence 4096. A small learning rate: routers stay as they
    # begin, and the load of their experts is that of an untrained model.
    "dslite8L": Benchmark(
        shortened("deepseek_v2_lite", num_layers=8)
        | {
            "training": {"seq_length": 4096, "global_batch_size": 4},
            "optimizer": {"lr": 1e-6},
        },
        "unrolled,unrolled-balanced,unrolled-dots,unrolled-dots-balanced,scan-full",
        (
            Peer("MaxText 0.2.5", "B4, full remat", 39575, 227, 90),
            Peer("torchtitan 0.2.2", "B4, selective AC", 40083, 230, 73),
            Peer("megatron-core 0.19.2", "B4, no TE, SDPA, torch grouped GEMM", 52046, 299, 109),
        ),
    ),
    # A few seconds on a CPU: to try the script itself.
    "tiny": Benchmark(
        {
            "model": {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128},
            "training": {"seq_length": 128, "global_batch_size": 2},
        },
        "unrolled,scan",
    ),
    "tiny-moe": Benchmark(
        {
            "model": {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128},
            "moe": {"num_experts": 8, "moe_ffn_hidden_size": 32},
            "training": {"seq_length": 128, "global_batch_size": 2},
        },
        "unrolled,unrolled-balanced",
    ),
}

WORDS = {
    "unrolled": ["training.scan_layers=false"],
    "scan": ["training.scan_layers=true"],
    "dots": ["remat.policy=dots"],
    "full": ["remat.policy=full"],
    "norm": ["remat.policy=norm"],
    "light": ["remat.tier=light"],
    "medium": ["remat.tier=medium"],
    "moe": ["remat.tier=full"],
    "grouped": ["moe.expert_gemm=grouped"],
    "xla": ["kernels.implementation=xla"],
    "balanced": ["moe.force_balanced=true", "moe.capacity_buckets=[1.0]"],
}
"""What a word in a variant's name changes. Without `balanced` the router chooses, see BUCKETS."""

BUCKETS = "moe.capacity_buckets=[1.05,1.1,1.2,1.3,1.5,1.75,2.0,2.5,3.0,4.0,6.0]"
SPARE = 1.03
"""The bucket must hold this much more than the first step needs, as others need more or less."""

WARM_UP_STEPS = 3


def overrides_of(model: str, variant: str) -> list[str]:
    """Settings of a variant such as `unrolled-dots`.

    Raises:
      ValueError: a word of it is not known.
    """
    words = variant.split("-")
    if unknown := [word for word in words if word not in WORDS]:
        raise ValueError(f"variant {variant!r}: {unknown[0]!r} is none of {', '.join(WORDS)}")
    num_experts = BENCHMARKS[model].config.get("moe", {}).get("num_experts", 0)
    buckets = [BUCKETS] if num_experts else []
    return buckets + [override for word in words for override in WORDS[word]]


# One variant, in a process of its own


class Stepper:
    """Takes steps of one configuration, each with new random tokens."""

    def __init__(self, config):
        from mxjax.moe.buckets import BucketChooser
        from mxjax.sharding.mesh import build_mesh
        from mxjax.training.programs import Programs

        self.config = config
        self.programs = Programs(config, build_mesh(config.parallel))
        self.buckets = BucketChooser(config.moe.capacity_buckets)
        self.compile_seconds = 0.0
        self.seed = 0
        self._compile()
        self.state = self.programs.create_state()

    def _compile(self) -> None:
        started = time.perf_counter()
        self.function = self.programs.step(self.buckets.current)
        self.compile_seconds = time.perf_counter() - started

    def batch(self) -> dict:
        """A global batch of random tokens, each sequence one document."""
        import jax
        import numpy as np

        self.seed += 1
        generator = np.random.default_rng(self.seed)

        def array(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            if name == "positions":
                values = np.broadcast_to(np.arange(leaf.shape[2]), leaf.shape)
            elif name == "segment_ids":
                values = np.ones(leaf.shape)
            else:
                values = generator.integers(0, self.config.model.vocab_size, leaf.shape)
            return jax.device_put(values.astype(np.int32), leaf.sharding)

        return {name: array(name, leaf) for name, leaf in self.programs.abstract_batch().items()}

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


def compile_only(config_file: str, overrides: list[str]) -> None:
    """Fill JAX's compilation cache with the step that `measure` takes first."""
    import jax

    from mxjax.config import load_config
    from mxjax.moe.buckets import BucketChooser
    from mxjax.sharding.mesh import build_mesh
    from mxjax.training.programs import Programs

    config = load_config(config_file, overrides, lambda _: jax.device_count())
    programs = Programs(config, build_mesh(config.parallel))
    programs.step(BucketChooser(config.moe.capacity_buckets).current)


def measure(config_file: str, overrides: list[str], steps: int) -> dict:
    """Figures of one variant, in this process."""
    import jax

    from mxjax.config import load_config
    from mxjax.training.metrics import Throughput, peak_memory_bytes

    config = load_config(config_file, overrides, lambda _: jax.device_count())
    stepper = Stepper(config)
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


def in_process(model: str, overrides: list[str], *arguments: str, **environment: str):
    """This script on one variant, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config_file = Path(folder) / "config.yaml"
        config_file.write_text(json.dumps(BENCHMARKS[model].config))
        command = [sys.executable, __file__, *arguments, "--config", str(config_file), *overrides]
        return subprocess.run(
            command, env={**environment, **os.environ}, capture_output=True, text=True
        )


def compile_ahead(model: str, variants: list[str], overrides: list[str], at_once: int) -> None:
    """Compile all variants, several at once, into the cache that `JAX_COMPILATION_CACHE_DIR` names.

    They try out kernels on the same GPU meanwhile, so that a choice may be worse than that of a
    variant compiled alone.
    """

    def compile_variant(variant: str) -> None:
        settings = overrides_of(model, variant) + overrides
        in_process(
            model,
            settings,
            "--compile-only",
            XLA_PYTHON_CLIENT_PREALLOCATE="false",
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )

    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(compile_variant, variants))


def run_variant(model: str, overrides: list[str], steps: int) -> dict:
    """Figures of one variant, or its error."""
    done = in_process(
        model,
        overrides,
        *("--steps", str(steps), "--measure"),
        XLA_PYTHON_CLIENT_MEM_FRACTION="0.92",
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        told = [line for line in lines if "Error" in line or "RESOURCE_EXHAUSTED" in line]
        return {"error": (told or lines)[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


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


def run_model(model: str, variants: list[str], steps: int, overrides: list[str]) -> dict:
    """Measure, print the table of one model, return the figures by variant."""
    benchmark = BENCHMARKS[model]
    print(f"{model}, median of {steps} steps" + (f", {' '.join(overrides)}" if overrides else ""))
    print_row("", list(COLUMNS))
    figures = {}
    for variant in variants:
        settings = overrides_of(model, variant) + overrides
        figures[variant] = run_variant(model, settings, steps)
        print_variant(variant, figures[variant])
    for peer in benchmark.peers:
        values = (peer.tokens_per_second, ",.0f"), (peer.tflops, ".0f"), (peer.peak_gib, ".0f")
        print_row(f"  {peer.trainer}, {peer.settings}", [shown(*value) for value in values])
    if benchmark.peers:
        print("  (peers: one H200, 2026-11-29, not in this run)")
    print()
    return figures


def main() -> int:
    """Returns the exit code: 1 if a variant failed, 2 for arguments that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama8L", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--variants", help=f"words of {', '.join(WORDS)}, joined by -")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", metavar="FILE", help="write all figures here")
    parser.add_argument(
        "--compile-ahead",
        type=int,
        default=0,
        metavar="N",
        help="first compile all variants of a model, N at once; set JAX_COMPILATION_CACHE_DIR",
    )
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="section.key=value for every variant")
    arguments = parser.parse_intermixed_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.config, arguments.overrides, arguments.steps)))
        return 0
    if arguments.compile_only:
        compile_only(arguments.config, arguments.overrides)
        return 0
    if arguments.compile_ahead and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        parser.error("--compile-ahead needs JAX_COMPILATION_CACHE_DIR, a folder for the programs")
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
        results[model] = run_model(model, variants, arguments.steps, arguments.overrides)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")
    failed = any("error" in figures for model in results.values() for figures in model.values())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
