"""Measure the ops of mxjax/kernels on the device at hand, and choose by what was measured.

Exit codes: 0 done, 2 it cannot be done here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Peers that run in this process need memory too. JAX reads it when it first sees the device.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

import jax

from mxjax.kernels.bench.cases import Case, all_cases
from mxjax.kernels.bench.measure import CEILINGS, Result, measure
from mxjax.kernels.bench.picture import save_png
from mxjax.kernels.bench.timing import QUICK, Effort
from mxjax.kernels.bench.tune import tune
from mxjax.kernels.implementation import device_kind, mosaic_obstacle, tuning_path


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        cases = _chosen(all_cases(arguments.small), arguments.op, arguments.case)
        return arguments.command(cases, arguments)
    except ImportError:
        print("--png needs Pillow: pip install 'mxjax[pictures]'", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mxjax.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    bench = commands.add_parser("bench", help="time each op against what its bytes take")
    bench.set_defaults(command=_bench)
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    bench.add_argument("--png", type=Path, metavar="FILE", help="draw shares of the floor")
    bench.add_argument("--no-peers", action="store_true", help="leave torch out")
    tuning = commands.add_parser("tune", help="write the tuning table of this kind of device")
    tuning.set_defaults(command=_tune)
    tuning.add_argument("--out", type=Path, metavar="FILE", help="instead of the table in use")
    for command in (bench, tuning):
        command.add_argument("--op", action="append", metavar="OP", help="only this op; repeatable")
        command.add_argument("--case", metavar="TEXT", help="only cases with this in their name")
        command.add_argument("--small", action="store_true", help="tiny shapes, to try it out")
    return parser


def _chosen(cases: list[Case], ops: list[str] | None, text: str | None) -> list[Case]:
    known = sorted({case.op for case in cases})
    for op in ops or ():
        if op not in known:
            raise ValueError(f"--op {op}: there is no such op; known are {', '.join(known)}")
    cases = [case for case in cases if not ops or case.op in ops]
    chosen = [case for case in cases if text is None or text.lower() in case.name.lower()]
    if not chosen:
        names = ", ".join(case.name for case in cases)
        raise ValueError(f"--case {text}: it is in no name; there are {names}")
    return chosen


def _bench(cases: list[Case], arguments: argparse.Namespace) -> int:
    for name, path in (("--json", arguments.json), ("--png", arguments.png)):
        if path and not path.absolute().parent.is_dir():
            raise ValueError(f"{name} {path}: there is no such folder")
    if arguments.png and device_kind() not in CEILINGS:
        raise ValueError(
            f"--png {arguments.png}: it shows shares of the floor, and the ceilings of "
            f"'{device_kind()}' are not known; leave it out, or add them to CEILINGS"
        )
    effort = QUICK if arguments.small else Effort()
    title = f"{device_kind()}, JAX {jax.__version__}"
    print(f"{title}\n{'case':34}{'work':20}{'by':15}{'us':>10}{'TB/s':>8}{'of floor':>10}")
    results: list[Result] = []
    try:
        for result in measure(cases, effort, with_peers=not arguments.no_peers):
            results.append(result)
            print(_line(result), flush=True)
    finally:  # an interrupted run keeps what it has
        if arguments.json:
            rows = [dataclasses.asdict(result) for result in results]
            content = {"device": device_kind(), "jax": jax.__version__, "results": rows}
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    if arguments.png:
        save_png(results, f"{title}: share of the floor", arguments.png)
    return 0


def _line(result: Result) -> str:
    share = "-" if result.share_of_floor is None else f"{result.share_of_floor:.0%}"
    rate = result.bytes / result.seconds / 1e12
    return (
        f"{result.case:34}{result.work:20}{result.by:15}{result.seconds * 1e6:10.1f}{rate:8.2f}"
        f"{share:>10}"
    )


def _tune(cases: list[Case], arguments: argparse.Namespace) -> int:
    ops = sorted({case.op for case in cases})
    cases = [case for case in cases if case.blocks]
    if not cases:
        raise ValueError(
            f"nothing to tune: {', '.join(ops)} has no block sizes to choose between; attention is "
            "chosen by model.attention_implementation"
        )
    obstacle = mosaic_obstacle()
    if obstacle is not None:
        raise ValueError(f"nothing to tune: {obstacle}")
    effort = QUICK if arguments.small else Effort(repeats=7)
    path = arguments.out or tuning_path(device_kind())
    tune(cases, effort, path)
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
