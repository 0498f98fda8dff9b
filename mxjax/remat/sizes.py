"""Sizes of memory as people write them, and the host's."""

from __future__ import annotations

import re
from pathlib import Path

_UNITS = {"B": 1}
_UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("kMGT", 1)}
_UNITS |= {f"{prefix}iB": 1024**i for i, prefix in enumerate("KMGT", 1)}


_SHOWN = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


class SizeError(ValueError):
    """A text that names no size."""


def parse_size(text: str) -> int:
    """`80GiB` -> bytes.

    Raises:
      SizeError: the text is not a number and a unit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text.strip())
    if found is None or found[2] not in _UNITS:
        raise SizeError(f"{text!r} is not a size; write a number and a unit, such as 80GiB or 80GB")
    return int(float(found[1]) * _UNITS[found[2]])


def gib(size: float) -> str:
    """`1.25 GiB`; what would be nearly none in smaller units."""
    unit, name = next(
        (unit, name) for unit, name in _SHOWN if size >= unit / 10 or unit == _SHOWN[-1][0]
    )
    return f"{size / unit:,.2f} {name}"


def host_memory() -> int | None:
    """Bytes that programs of this host could still take; None where Linux does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    available = fields.get("MemAvailable")
    return None if available is None else 1024 * int(available.split()[0])
