"""The memory of pipeline ranks as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from mxjax.training.memory_plan import Advice, StagePlan

_CLASSES = (
    "parameters",
    "optimizer",
    "weights_for_compute",
    "gradients",
    "activations",
    "exchange",
    "pipeline_buffers",
    "temporary",
    "reserve",
    "total",
    "device",
    "headroom",
    "host",
)
_SHOWN_NAMES = 12
_SHOWN_ADVICE = 5
_COLUMNS = 8


def as_lines(stages: Sequence[StagePlan], advice: Sequence[Advice]) -> list[str]:
    """Classes by rank, the names of the fullest rank, and what to compute again next."""
    fullest = max(range(len(stages)), key=lambda rank: stages[rank].total)
    unit = 3 if stages[fullest].total - stages[fullest].reserve >= 1 << 30 else 2

    def shown(size: int | None) -> str:
        return "unknown" if size is None else f"{size / 1024**unit:,.2f}"

    lines = [f"memory by pipeline rank, from shapes, {'?KMG'[unit]}iB of one device"]
    for first in range(0, len(stages), _COLUMNS):
        some = stages[first : first + _COLUMNS]
        lines.append(" " * 24 + "".join(f" {f'rank {first + i}':>10}" for i in range(len(some))))
        for field in _CLASSES:
            values = "".join(f" {shown(getattr(stage, field)):>10}" for stage in some)
            lines.append(f"  {field.replace('_', ' '):<22}{values}")
    lines += ["", f"largest tensors of rank {fullest}, the fullest ({stages[fullest].stages})"]
    for row in stages[fullest].names[:_SHOWN_NAMES]:
        fate = f"{row.fate}, until W" if row.until_weights else row.fate
        lines.append(f"  {row.group:<14} {row.name:<20} {fate:<16} {shown(row.bytes):>10}")
    if advice:
        lines += ["", "to compute again next on that rank, the most bytes for the least time first"]
        for entry in advice[:_SHOWN_ADVICE]:
            lines.append(
                f"  {entry.group:<14} {entry.name:<20} frees {shown(entry.bytes):>10} for"
                f" {1e3 * entry.seconds:.1f} ms of a step"
            )
    return lines
