"""Speed and memory of one training step on the GPUs of this machine.

    python benchmarks/train_step.py llama8L [--variants unrolled,scan] [--json out.json]
        [section.key=value ...]

Models and FLOP formula are those of `docs/benchmarks.md`. Each variant runs in a process of its
own, so that peak memory is its own; a step is timed from the host with the device drained before
and after, over `--steps` steps after a warm-up, and the median is reported. The data are random
tokens: what a step costs does not depend on them in a dense model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = {
    # Llama-3-8B with 8 layers, sequence 8192.
    "llama8L": {
        "model": {
            "num_layers": 8,
            "hidden_size": 4096,
            "ffn_hidden_size": 14336,
            "num_attention_heads": 32,
            "num_query_groups": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
        "training": {"seq_length": 8192, "global_batch_size": 2},
        "data": {"document_mask": False},
        "parallel": {"zero_stage": 0},
    },
    # A few seconds on a CPU: to try the script itself.
    "tiny": {
        "model": {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128},
        "training": {"seq_length": 128, "global_batch_size": 2},
    },
}

VARIANTS = {
    "unrolled": ["training.scan_layers=false"],
    "unrolled-dots": ["training.scan_layers=false", "remat.policy=dots"],
    "scan": ["training.scan_layers=true"],
    "scan-dots": ["training.scan_layers=true", "remat.policy=dots"],
    "scan-full": ["training.scan_layers=true", "remat.policy=full"],
}


def measure(config_file: str, overrides: list[str], steps: int) -> dict:
    """One variant, in this process."""
    import jax
    import numpy as np

    from mxjax.config import load_config
    from mxjax.moe.buckets import BucketChooser
    from mxjax.sharding.mesh import build_mesh
    from mxjax.training.metrics import Throughput, peak_memory_bytes
    from mxjax.training.programs import Programs

    config = load_config(config_file, overrides, lambda _: jax.device_count())
    mesh = build_mesh(config.parallel)
    programs = Programs(config, mesh)
    started = time.perf_counter()
    step = programs.step(BucketChooser(config.moe.capacity_buckets).current)
    compile_seconds = time.perf_counter() - started
    state = programs.create_state()
    generator = np.random.default_rng(0)

    def array(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = {
            "positions": np.broadcast_to(np.arange(leaf.shape[2]), leaf.shape),
            "segment_ids": np.ones(leaf.shape),
        }.get(name, generator.integers(0, config.model.vocab_size, leaf.shape))
        return jax.device_put(values.astype(np.int32), leaf.sharding)

    batch = {name: array(name, leaf) for name, leaf in programs.abstract_batch().items()}
    seconds = []
    for index in range(steps + 3):
        started = time.perf_counter()
        state, result = step(state, batch)
        jax.block_until_ready((state, result))
        if index >= 3:
            seconds.append(time.perf_counter() - started)
    if not bool(result.finite) or bool(state.halted):
        raise RuntimeError(f"the step was not applied: {result}")
    speed = Throughput.of(config.model, config.moe, config.training, jax.devices()).speed(
        statistics.median(seconds)
    )
    return {
        "tokens_per_second_per_device": speed.tgs,
        "tflops": speed.tflops,
        "median_seconds": statistics.median(seconds),
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
        "peak_memory_bytes": peak_memory_bytes(),
        "compile_seconds": compile_seconds,
        "loss": float(result.loss),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def run_variant(model: str, overrides: list[str], steps: int) -> dict:
    """One variant, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config_file = Path(folder) / "config.yaml"
        config_file.write_text(json.dumps(MODELS[model]))
        command = [sys.executable, __file__, model, "--steps", str(steps)]
        command += ["--measure", str(config_file), *overrides]
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        error = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": error[:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def print_row(name: str, figures: dict) -> None:
    """One line of the table."""
    if "error" in figures:
        print(f"{name:<24} failed: {figures['error']}", flush=True)
        return
    memory = figures["peak_memory_bytes"]
    print(
        f"{name:<24} {figures['tokens_per_second_per_device']:>10,.0f} {figures['tflops']:>9.1f}"
        f" {1e3 * figures['median_seconds']:>9.1f}"
        f" {'n/a' if memory is None else f'{memory / 2**30:.1f}':>9}"
        f" {figures['compile_seconds']:>9.1f}",
        flush=True,
    )


def main() -> None:
    """Measure the chosen variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--variants", default=",".join(name for name in VARIANTS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", metavar="FILE", help="write all figures here")
    parser.add_argument("--measure", metavar="CONFIG", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="section.key=value for every variant")
    arguments = parser.parse_intermixed_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.overrides, arguments.steps)))
        return
    print(f"{arguments.model}, {arguments.steps} steps, median; overrides {arguments.overrides}")
    columns = ("tokens/s", "TFLOP/s", "ms/step", "peak GiB", "compile")
    print(f"{'variant':<24} {columns[0]:>10}" + "".join(f" {name:>9}" for name in columns[1:]))
    results = {}
    for name in arguments.variants.split(","):
        overrides = VARIANTS[name.strip()] + arguments.overrides
        results[name] = run_variant(arguments.model, overrides, arguments.steps)
        print_row(name, results[name])
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
