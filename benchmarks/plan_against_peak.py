"""What a plan says a step takes, beside what a GPU had allocated at most.

    python benchmarks/plan_against_peak.py results.json [--shapes-only]

`results.json` is what `train_step.py --json` wrote on an H200; plans are made here, without a GPU,
from shapes and by compiling each variant for an H200 (minutes each; needs `jax-cuda13-pjrt`). The
peak is `peak_bytes_in_use`; a plan is compared without its reserve, which is for what is not in it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from variants import BENCHMARKS, overrides_of

GIB = 2**30


def plan(model: str, variant: str, bucket: float | None, *options: str) -> dict:
    """The plan of the step that was measured.

    Raises:
      SystemExit: there is none; with the reason.
    """
    overrides = [*overrides_of(model, variant), "parallel.dp=1"]
    if bucket is not None:
        overrides.append(f"moe.capacity_buckets=[{bucket}]")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps(BENCHMARKS[model].config))
        command = [sys.executable, "-m", "mxjax.train", "--config", str(config), *overrides]
        command += ["--plan", "--json", "--target", "h200", "--devices", "1", *options]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{model} {variant}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--shapes-only", action="store_true", help="compile nothing")
    arguments = parser.parse_args()
    print(f"{'GiB':44}{'peak':>8}{'shapes':>8}{'off':>8}{'compiled':>10}{'off':>8}")
    for model, variants in json.loads(arguments.results.read_text()).items():
        for variant, figures in variants.items():
            peak = figures.get("peak_memory_bytes")
            if peak is None:
                continue
            options = ["--no-compile"] if arguments.shapes_only else []
            found = plan(model, variant, figures["bucket"], *options)
            stage = max(found["stages"], key=lambda stage: stage["total"])
            totals = [stage["total"] - stage["reserve"]]
            totals += [] if arguments.shapes_only else [found["memory"]["total"]]
            columns = "".join(
                f"{total / GIB:{width}.2f}{total / peak - 1:+8.1%}"
                for total, width in zip(totals, (8, 10), strict=False)
            )
            print(f"{model + ' ' + variant:44}{peak / GIB:8.2f}{columns}", flush=True)


if __name__ == "__main__":
    main()
