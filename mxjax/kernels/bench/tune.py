"""Fill the tuning table of the device kind at hand by measuring."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from mxjax.kernels.bench.cases import Case
from mxjax.kernels.bench.measure import BOTH, FORWARD, time_of
from mxjax.kernels.bench.timing import Effort


def tune(cases: Iterable[Case], effort: Effort, path: Path, report=print) -> None:
    """Write into the table what is fastest for each case, forward and backward together.

    Where several cases are of one op and shape class, the last one decides. Entries of other ops
    stay. The file is written after each case, so that a run that stops has not been for nothing.
    """
    table = json.loads(path.read_text()) if path.exists() else {}
    for case in cases:
        entry = best_of(case, effort, report)
        table.setdefault(case.op, {})[case.shape_class] = entry
        path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def best_of(case: Case, effort: Effort, report) -> dict:
    """The table's entry for a case."""
    work = BOTH if case.both else FORWARD
    xla = time_of(case, work, effort, implementation="xla")
    report(f"{case.name:40} xla {xla * 1e6:8.1f} us")
    best, blocks_of_best = float("inf"), None
    for blocks in case.blocks:
        try:
            seconds = time_of(case, work, effort, implementation="mosaic", blocks=blocks)
        except Exception as error:  # Too much shared memory shows only in the compiler.
            report(f"{'':40} {blocks}: {str(error).splitlines()[0][:100]}")
            continue
        report(f"{'':40} mosaic {seconds * 1e6:8.1f} us {blocks}")
        if seconds < best:
            best, blocks_of_best = seconds, blocks
    entry: dict = {"implementation": "mosaic" if best < xla else "xla", "case": case.name}
    entry["microseconds"] = {"xla": round(xla * 1e6, 1)}
    if blocks_of_best is not None:
        entry["microseconds"]["mosaic"] = round(best * 1e6, 1)
        entry["blocks"] = dataclasses.asdict(blocks_of_best)
    return entry
