"""Fill the tuning table of the device kind at hand by measuring."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from mxjax.kernels.bench.cases import Case
from mxjax.kernels.bench.measure import BOTH, FORWARD, timing_of
from mxjax.kernels.bench.timing import Effort, at_once


def tune(cases: Iterable[Case], effort: Effort, path: Path, report=print) -> None:
    """Write into the table what is fastest for each case, forward and backward together.

    Where several cases are of one op and shape class, the first one decides. Entries of other ops
    stay. The file is written after each case, so that a run that stops has not been for nothing.
    """
    table = json.loads(path.read_text()) if path.exists() else {}
    decided = set()
    for case in cases:
        if (case.op, case.shape_class) in decided:
            continue
        decided.add((case.op, case.shape_class))
        entry = best_of(case, effort, report)
        table.setdefault(case.op, {})[case.shape_class] = entry
        path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def best_of(case: Case, effort: Effort, report) -> dict:
    """The table's entry for a case."""
    work = BOTH if case.both else FORWARD
    tried = [{"implementation": "xla"}] + [
        {"implementation": "mosaic", "blocks": blocks} for blocks in case.blocks
    ]
    seconds: dict[str, float] = {}
    entry: dict = {"case": case.name}
    timings = at_once([partial(timing_of, case, work, effort, **options) for options in tried])
    for options, timing in zip(tried, timings, strict=True):
        name, blocks = options["implementation"], options.get("blocks")
        try:
            # Too much shared memory shows only in the compiler.
            if isinstance(timing, Exception):
                raise timing
            found = timing.seconds()
        except Exception as error:
            report(f"{case.name:40} {name} {blocks or ''}: {str(error).splitlines()[0][:100]}")
            continue
        report(f"{case.name:40} {name:6} {found * 1e6:8.1f} us {blocks or ''}")
        if found < seconds.get(name, float("inf")):
            seconds[name] = found
            if blocks is not None:
                entry["blocks"] = dataclasses.asdict(blocks)
    entry["implementation"] = min(seconds, key=seconds.__getitem__)
    entry["microseconds"] = {name: round(time * 1e6, 1) for name, time in seconds.items()}
    return entry
