"""Where the time of a step goes on a GPU: device time by kernel, from JAX's profiler.

`train_step.py --profile FOLDER` writes one table for each variant. The names of XLA's kernels are
those of instructions in the compiled program, which lies beside the table; its `op_name` says what
part of the model an instruction comes from.
"""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KernelTime:
    """Device time of all calls of one kernel in a step, microseconds."""

    name: str
    origin: str
    calls: float
    microseconds: float


def profile(run: Callable[[], None], steps: int, program: str) -> list[KernelTime]:
    """Kernels of `run`, which takes `steps` steps and waits for them; the longest first.

    Args:
      program: the compiled program as text, to say where its instructions come from.

    Raises:
      RuntimeError: the profile has no device in it, as on a CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        planes = gpu_planes(run, Path(folder))
    origins = dict(re.findall(r'%?([\w.\-]+) = [^\n]*op_name="([^"]*)"', program))
    spent: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for event, stats in events_of(planes[0]):
        instruction = stats.get("hlo_op", event.name)
        origin = origins.get(instruction) or origins.get(event.name.replace("_", "."), "")
        total = spent[
            instruction if instruction == event.name else f"{instruction} {event.name}", origin
        ]
        total[0] += 1
        total[1] += event.duration_ns / 1e3
    rows = [
        KernelTime(name, origin, calls / steps, microseconds / steps)
        for (name, origin), (calls, microseconds) in spent.items()
    ]
    return sorted(rows, key=lambda row: -row.microseconds)


def gpu_planes(run: Callable[[], None], folder: Path) -> list:
    """What each GPU did in `run`, which waits for it, by JAX's profiler, which writes to `folder`.

    Raises:
      RuntimeError: the profile has no device in it, as on a CPU.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # they would slow the host down
    with jax.profiler.trace(folder, profiler_options=options):
        run()
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    data = jax.profiler.ProfileData.from_file(str(files[-1]))
    planes = [plane for plane in data.planes if plane.name.startswith("/device:GPU")]
    if not planes:
        raise RuntimeError("--profile: the profile has no GPU in it; it needs one")
    return planes


def events_of(plane) -> Iterator[tuple]:
    """Kernels and copies of a GPU, each with what the profiler says of it."""
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                yield event, {str(key): str(value) for key, value in event.stats}


def table(rows: list[KernelTime]) -> str:
    """One line a kernel, after one with the sum."""
    total = sum(row.microseconds for row in rows)
    lines = [f"{total / 1e3:10.2f} ms a step in {sum(row.calls for row in rows):.0f} kernels"]
    lines += [
        f"{row.microseconds:10.1f} us {row.calls:6.1f} x {row.name[:100]:<100} {row.origin[-160:]}"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
