"""Which capacity bucket the next step uses.

XLA's buffers have fixed sizes, so a step is compiled for one *capacity factor*: its MoE buffers
hold that multiple of perfect balance. Going up happens the moment a step overflows (it is
repeated); going down waits until every one of the last `PATIENCE` steps would have fitted with
`MARGIN` to spare, so that a load near the border does not flip back and forth.

The choice depends on nothing but the needs of the steps before, which are equal on all processes,
and is part of the checkpoint: a resumed run chooses as the uninterrupted one does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

PATIENCE = 20
MARGIN = 1.1


class BucketChooser:
    """Current bucket of a run; see the module."""

    def __init__(self, capacity_buckets: Sequence[float]):
        """`capacity_buckets` ascending; a last one of infinite size is added."""
        self.buckets = (*capacity_buckets, math.inf)
        self._index = 0
        self._recent: deque[float] = deque(maxlen=PATIENCE)

    @property
    def current(self) -> float:
        """Capacity factor of the next step."""
        return self.buckets[self._index]

    @property
    def next_larger(self) -> float | None:
        """What an overflow would need first; None if nothing can overflow."""
        larger = self.current_and_larger[1:]
        return larger[0] if larger else None

    @property
    def current_and_larger(self) -> tuple[float, ...]:
        """What to try one after the other until nothing overflows."""
        return self.buckets[self._index :]

    def overflowed(self, needed: float) -> None:
        """The current bucket was too small: take the smallest that holds `needed`."""
        self._index = next(i for i, size in enumerate(self.buckets) if size >= needed)
        self._recent.clear()

    def fitted(self, needed: float) -> None:
        """A step fitted; perhaps a smaller bucket will do from now on."""
        self._recent.append(needed)
        if self._index == 0 or len(self._recent) < PATIENCE:
            return
        if max(self._recent) * MARGIN <= self.buckets[self._index - 1]:
            self._index -= 1
            self._recent.clear()

    def as_dict(self) -> dict:
        """State for the checkpoint's metadata (JSON)."""
        size = self.current
        return {"bucket": None if math.isinf(size) else size, "recent": list(self._recent)}

    def restore(self, saved: dict) -> None:
        """Continue from `as_dict`. Buckets that the configuration no longer has are left."""
        size = math.inf if saved["bucket"] is None else saved["bucket"]
        if size in self.buckets:
            self._index = self.buckets.index(size)
            self._recent.extend(saved["recent"])
