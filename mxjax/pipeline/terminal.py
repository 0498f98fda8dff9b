"""The timeline of a schedule, and its figures, as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from string import ascii_lowercase

from mxjax.pipeline.picture import is_light, shade
from mxjax.pipeline.schedule import Cell, Op
from mxjax.pipeline.simulate import Simulation

_MOST_COLUMNS = 4000
"""Where costs differ by so much that short cells would need more, those lose their text."""


def report(simulation: Simulation) -> str:
    """Bubble, activations and transfers of a simulated schedule."""
    schedule, costs = simulation.schedule, simulation.costs
    chunks = schedule.num_chunks
    stages = f"{schedule.num_ranks} ranks" + (f" x {chunks} chunks" if chunks > 1 else "")
    span = max(simulation.spans)
    lines = [
        f"{schedule.name}: {stages}, {schedule.num_microbatches} microbatches; "
        f"F {costs.F:g}, B {costs.B:g}, W {costs.W:g}, transfer {costs.transfer:g}",
        f"makespan           {simulation.makespan:.6g}",
        f"ideal              {simulation.ideal:.6g}",
        f"makespan / ideal   {simulation.slowdown:.4f}",
        f"bubble             {_bubble(simulation.makespan, simulation.ideal)}",
        f"bubble of a rank   {_bubble(span, simulation.ideal)}, from its own start to its own end",
        f"transfers          {simulation.num_transfers}",
    ]
    if schedule.forward_only:
        return "\n".join(lines)
    lines.append("activations held   in microbatches of all layers of a rank, until B / until W")
    for rank, (until_b, until_w) in enumerate(
        zip(simulation.activations_until_B, simulation.activations_until_W, strict=True)
    ):
        lines.append(f"  rank {rank:<11} {until_b / chunks:g} / {until_w / chunks:g}")
    return "\n".join(lines)


def _bubble(time: float, ideal: float) -> str:
    return f"{time - ideal:.4g} ({(time - ideal) / time:.1%})"


def grid(simulation: Simulation, color: bool, columns: int | None) -> str:
    """A row for each rank, time to the right.

    Args:
        simulation: what to draw.
        color: microbatch numbers on coloured ground; otherwise `F7a` for forward, microbatch 7,
            chunk a, and dots where a rank waits.
        columns: width to break rows at; None: do not break them.
    """
    schedule = simulation.schedule
    scale = _columns_per_time(simulation, color)
    label = len(f"rank {schedule.num_ranks - 1} ")
    length = _column(simulation.makespan, scale)
    band = max(columns - label - 1, 1) if columns else max(length, 1)
    rows = [list(_row(simulation, rank, scale, color)) for rank in range(schedule.num_ranks)]
    bands = []
    for start in range(0, length, band):
        lines = [
            f"rank {rank}".ljust(label) + _paint(row[start : start + band])
            for rank, row in enumerate(rows)
        ]
        bands.append("\n".join(lines))
    return "\n\n".join(bands)


Character = tuple[str, str]
"""A character and the escape code of its colours, empty for none."""


def _row(simulation: Simulation, rank: int, scale: float, color: bool) -> Iterator[Character]:
    """The characters of one rank from time 0 to the makespan."""
    idle = " " if color else "."
    at = 0
    for cell, (start, end) in zip(
        simulation.schedule.cells[rank], simulation.times[rank], strict=True
    ):
        first, last = _column(start, scale), _column(end, scale)
        yield from [(idle, "")] * (first - at)
        yield from _cell(simulation, cell, last - first, color)
        at = last
    yield from [(idle, "")] * (_column(simulation.makespan, scale) - at)


def _cell(simulation: Simulation, cell: Cell, width: int, color: bool) -> Iterator[Character]:
    """The text of a cell; in colour, a pair is two halves side by side."""
    texts = _texts(simulation, cell, color)
    ends = [width * (i + 1) // len(texts) for i in range(len(texts))]
    for op, text, start, end in zip(cell, texts, [0, *ends], ends, strict=False):
        room = end - start
        # Part of a number would be another number.
        shown = text if len(text) <= room else ""
        style = _style(simulation, op) if color else ""
        yield from [(character, style) for character in shown.ljust(room)]


def _texts(simulation: Simulation, cell: Cell, color: bool) -> list[str]:
    if color:
        return [str(op.microbatch) for op in cell]
    schedule = simulation.schedule
    letters = ascii_lowercase if schedule.num_chunks > 1 else ""
    names = [
        f"{op.kind.value}{op.microbatch}{letters[c : c + 1]}"
        for op in cell
        for c in [schedule.chunk_of(op.stage)]
    ]
    return ["|".join(names)]


def _style(simulation: Simulation, op: Op) -> str:
    """The escape code of an op's colours, out of the 256 that all terminals know."""
    schedule = simulation.schedule
    fill = shade(op.kind, schedule.chunk_of(op.stage), schedule.num_chunks)
    red, green, blue = (round(part / 255 * 5) for part in fill)
    ink = 16 if is_light(fill) else 231
    return f"\033[38;5;{ink};48;5;{16 + 36 * red + 6 * green + blue}m"


def _paint(row: list[Character]) -> str:
    """Characters with an escape code only where the colour changes."""
    pieces, now = [], ""
    for character, style in row:
        if style != now:
            pieces.append("\033[0m" + style)
            now = style
        pieces.append(character)
    return "".join([*pieces, "\033[0m" if now else ""])


def _columns_per_time(simulation: Simulation, color: bool) -> float:
    """So that each cell has room for its text and a space."""
    needed = 0.0
    for cells, times in zip(simulation.schedule.cells, simulation.times, strict=True):
        for cell, (start, end) in zip(cells, times, strict=True):
            if end > start:
                texts = _texts(simulation, cell, color)
                room = (max(map(len, texts)) + 1) * len(texts)
                needed = max(needed, room / (end - start))
    return min(needed, _MOST_COLUMNS / simulation.makespan)


def _column(time: float, scale: float) -> int:
    # Not round(), which rounds 0.5 and 1.5 differently, so that equal cells would differ.
    return math.floor(time * scale + 0.5)
