"""Records a range of training steps with the JAX profiler."""

from __future__ import annotations

from pathlib import Path

import jax


class StepProfiler:
    """Traces the steps `log.profile_steps` of process 0 into `<run_dir>/profile`.

    One process is enough: all run the same program, and a trace of each would be large. A run that
    resumes inside the range records what is left of it.
    """

    def __init__(self, run_dir: str | Path, profile_steps: tuple[int, int] | None):
        """`profile_steps` is the first and the last step to record; None records nothing."""
        self._folder = Path(run_dir) / "profile"
        self._steps = profile_steps if jax.process_index() == 0 else None
        self._tracing = False

    def before_step(self, step: int) -> None:
        """Starts the trace if `step` is in the range. Call it before the step is dispatched."""
        if self._steps and not self._tracing and self._steps[0] <= step <= self._steps[1]:
            jax.profiler.start_trace(self._folder)
            self._tracing = True

    def after_step(self, step: int) -> None:
        """Ends the trace if `step` is the last of the range.

        Call it when the step's results are there: work still running on the device would be cut.
        """
        if self._steps and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Ends a trace that is still open and says where it is."""
        if not self._tracing:
            return
        self._tracing = False
        jax.profiler.stop_trace()
        print(
            f"profile written to {self._folder}: open the newest *.trace.json.gz in it at "
            f"https://ui.perfetto.dev, or run `pip install xprof && xprof {self._folder}`",
            flush=True,
        )
