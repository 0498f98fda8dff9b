"""A save under way, and how the store learns at once that it has failed.

Orbax reports a failed write when all processes are done with the save. With several processes the
others wait for the failed one at a barrier, for ten minutes and more, and only then does it say so.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import orbax.checkpoint as ocp


@dataclass
class PendingSave:
    """The save of one step, from the moment at which its state is copied."""

    step: int
    settled: threading.Event = field(default_factory=threading.Event)
    """Set when the save is over on all processes, or has failed on this one."""
    failure: Exception | None = None
    """What went wrong when this process wrote its part."""

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.settled.set()


class WatchedStateHandler(ocp.StandardCheckpointHandler):
    """Writes the state like its base class and tells `pending` when that fails."""

    pending: PendingSave

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> list[Any]:
        futures = await super().async_save(directory, *args, **kwargs)
        return [_WatchedFuture(future, self.pending) for future in futures]

    def finalize(self, directory: Any) -> None:
        try:
            super().finalize(directory)
        except Exception as error:
            self.pending.fail(error)
            raise


@dataclass
class _WatchedFuture:
    future: Any
    pending: PendingSave

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self.future.result(timeout=timeout)
        except Exception as error:
            self.pending.fail(error)
            raise

    def cancel(self) -> bool | None:
        return self.future.cancel()
