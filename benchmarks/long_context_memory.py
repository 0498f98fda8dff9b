"""Memory of one training step per device with a long sequence, from the compiled program.

    python benchmarks/long_context_memory.py [--seq-length 131072] [section.key=value ...]

Compiles the step for virtual CPU devices and reads the compiler's memory plan; nothing is run, so
any machine will do. The model is small, but a sequence of it fills a GPU. What the figures are good
for is how they fall with the number of ranks: a GPU's compiler plans differently, and its attention
(cuDNN) needs no memory for scores, of which the one for CPUs holds 512 rows at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

# Before JAX is imported. The scheduler that is left out spends memory on running in parallel.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_enable_concurrency_optimized_scheduler=false"
)

import jax

from mxjax.config import load_config
from mxjax.sharding.mesh import build_mesh
from mxjax.training.programs import Programs

MODEL = {
    "model": {
        "num_layers": 2,
        "hidden_size": 1024,
        "ffn_hidden_size": 3584,
        "num_attention_heads": 8,
        "vocab_size": 512,
    },
    "training": {"global_batch_size": 1, "compute_dtype": "float32"},
    "remat": {"policy": "full"},
}

LAYOUTS = [
    {},
    {"cp": 2},
    {"cp": 4},
    {"cp": 8},
    {"cp": 8, "cp_method": "allgather"},
    {"sp": 2},
    {"sp": 4},
    {"sp": 8},
    {"tp": 8},
    {"cp": 4, "sp": 2},
    {"cp": 4, "tp": 2},
    {"cp": 2, "sp": 2, "tp": 2},
]


def temporary_bytes(config_file: Path, layout: dict, overrides: list[str]) -> int:
    """What the step of this layout needs on one device besides its inputs and outputs."""
    settings = [*(f"parallel.{key}={value}" for key, value in layout.items()), *overrides]
    config = load_config(config_file, ["parallel.dp=1", *settings])
    num_devices = config.parallel.cp * config.parallel.sp * config.parallel.tp
    programs = Programs(config, build_mesh(config.parallel, jax.devices()[:num_devices]))
    step = programs.step_program(float("inf"))
    programs.close()
    return step.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Print one row per layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-length", type=int, default=131072)
    parser.add_argument("overrides", nargs="*", help="section.key=value for every layout")
    arguments = parser.parse_intermixed_args()
    length = arguments.seq_length
    MODEL["training"]["seq_length"] = MODEL["model"]["max_position_embeddings"] = length
    print(f"jax {jax.__version__}, sequence {length}, overrides {arguments.overrides}")
    print(f"{'layout':<32} {'GiB/device':>12} {'of one':>8}")
    with tempfile.TemporaryDirectory() as folder:
        config_file = Path(folder) / "config.yaml"
        config_file.write_text(json.dumps(MODEL))
        alone = None
        for layout in LAYOUTS:
            size = temporary_bytes(config_file, layout, arguments.overrides)
            alone = alone or size
            name = " ".join(f"{key} {value}" for key, value in layout.items()) or "one device"
            print(f"{name:<32} {size / 2**30:>12.2f} {size / alone:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
