"""Where the time of a pipeline step goes on each GPU: by program, from JAX's profiler.

`pipeline.py --profile FOLDER` writes one table for each schedule, and keeps the profile itself for
a viewer. With the stagewise executor, which names each program after its cell, a table says what
each kind of cell takes, to be held against the costs measured alone.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kernel_times import events_of, gpu_planes


@dataclass
class Spent:
    """Time of all runs of a program on a GPU, microseconds."""

    calls: collections.Counter = field(default_factory=collections.Counter)
    """Of each of its kernels."""
    busy: float = 0.0
    """In kernels."""
    inside: float = 0.0
    """Between its kernels."""
    before: float = 0.0
    """From the end of what ran before it: waiting, and the gap between programs."""

    @property
    def runs(self) -> int:
        """Kernels that run once in it are called as often as it is."""
        return min(self.calls.values(), default=0)


def profile(run: Callable[[], None], folder: Path) -> str:
    """Runs one step, which must end before `run` does, keeps its profile, and returns the tables.

    Raises:
      RuntimeError: the profile has no device in it, as on a CPU.
    """
    planes = gpu_planes(run, folder)
    return "\n".join(f"{plane.name}\n{table(plane)}" for plane in planes)


def table(plane) -> str:
    """Programs of a GPU by time, then what is no part of one: copies between GPUs, mostly."""
    events = [
        (event.start_ns, event.end_ns, event.name, stats) for event, stats in events_of(plane)
    ]
    programs: dict[str, Spent] = collections.defaultdict(Spent)
    others: dict[str, list[float]] = collections.defaultdict(list)
    end, last, first = None, "", {}
    for start, stop, name, stats in sorted(events, key=lambda event: event[:2]):
        module = stats.get("hlo_module", "").removeprefix("jit_")
        if not module:
            others[name].append((stop - start) / 1e3)
            continue
        spent, op = programs[module], stats.get("hlo_op", name)
        begins = op == first.setdefault(module, op) or module != last
        gap = 0.0 if end is None else max(0.0, start - end) / 1e3
        if begins:
            spent.before += gap
        else:
            spent.inside += gap
        spent.busy += (stop - (start if end is None else max(start, min(end, stop)))) / 1e3
        spent.calls[op] += 1
        end, last = max(stop, end or stop), module
    lines = [
        f"{'program':24}{'runs':>5}{'kernels':>9}{'busy us':>11}{'gaps us':>9}{'before us':>11}"
        "   (of one run)"
    ]
    for name, spent in sorted(programs.items(), key=lambda item: -item[1].busy):
        figures = (spent.busy / spent.runs, spent.inside / spent.runs, spent.before / spent.runs)
        kernels = sum(spent.calls.values()) / spent.runs
        lines.append(
            f"{name:24}{spent.runs:>5}{kernels:>9.1f}{figures[0]:>11.1f}{figures[1]:>9.1f}"
            f"{figures[2]:>11.1f}"
        )
    total = [
        sum(getattr(s, name) for s in programs.values()) for name in ("busy", "inside", "before")
    ]
    lines.append(
        f"{'all, ms':38}{total[0] / 1e3:>11.1f}{total[1] / 1e3:>9.1f}{total[2] / 1e3:>11.1f}"
    )
    for name, times in sorted(others.items(), key=lambda item: -sum(item[1]))[:12]:
        lines.append(
            f"  {name[:60]:60} {len(times):>5} x {sum(times) / len(times):8.1f} us, "
            f"longest {max(times):.1f}"
        )
    return "\n".join(lines) + "\n"
