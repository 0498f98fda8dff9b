"""How long does a schedule take, and what does it hold: from costs, without devices.

A cell starts as soon as its rank is free and all that it needs has arrived; ranks do not wait for
each other otherwise. What an executor loses on top of that (ticks in lock step, copies) is not in
these figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mxjax.pipeline.schedule import Cell, Kind, Op, Schedule, ScheduleError
from mxjax.pipeline.validate import execution_order

_LONGEST = 1e30
"""Sums of which are finite."""


@dataclass(frozen=True)
class Costs:
    """Times in any one unit. F, B and W are those of all layers of one rank for one microbatch,
    also where a rank has several chunks (each of V chunks then costs 1 / V of it)."""

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    BW: float | None = None
    """Both gradients in one op, where that was measured to be cheaper; None: B + W."""
    transfer: float = 0.0
    """From the end of a cell until its result is on the next rank; computing goes on meanwhile."""
    overlap: float = 1.0
    """Time of a pair F|BW over the sum of its two ops."""
    first: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """F, B and W that the first global stage needs beside its layers: the embedding."""
    last: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The same for the last global stage: the head and the loss."""

    @property
    def both(self) -> float:
        """Time of a BW."""
        return self.B + self.W if self.BW is None else self.BW

    def __post_init__(self) -> None:
        times = (self.F, self.B, self.W, self.BW or 0.0, self.transfer, self.overlap)
        for time in (*times, *self.first, *self.last):
            if not 0 <= time <= _LONGEST:
                raise ScheduleError(f"{time} is not a time; all are 0 to {_LONGEST:g}", key="costs")
        for name in ("F", "BW"):
            if getattr(self, name) == 0:
                raise ScheduleError(f"{name} is 0; give it a time above 0", key="costs")


@dataclass(frozen=True)
class Simulation:
    """What `simulate` found. Times are in the unit of the costs."""

    schedule: Schedule
    costs: Costs
    times: tuple[tuple[tuple[float, float], ...], ...]
    """For each rank, start and end of each cell."""
    ideal: float
    """F and BW of all stages and microbatches, divided evenly over the ranks without any gap."""
    activations_until_B: tuple[int, ...]
    """For each rank, the most chunks of activations held at once, if B lets go of them."""
    activations_until_W: tuple[int, ...]
    """The same if W does, which reads a part of them."""
    num_transfers: int
    """Activations and gradients that go from one rank to another, in the whole step."""

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((end for rank in self.times for _, end in rank), default=0.0)

    @property
    def spans(self) -> tuple[float, ...]:
        """For each rank, from its own first start to its own last end: what counts where steps
        follow each other without a barrier, and what zero-bubble papers call the bubble's cost."""
        return tuple(rank[-1][1] - rank[0][0] if rank else 0.0 for rank in self.times)

    @property
    def bubble(self) -> float:
        """Makespan minus ideal; below 0 if overlap gains more than the gaps cost."""
        return self.makespan - self.ideal

    @property
    def slowdown(self) -> float:
        """Makespan over ideal."""
        return self.makespan / self.ideal


def simulate(
    schedule: Schedule, costs: Costs | None = None, stage_sizes: Sequence[float] | None = None
) -> Simulation:
    """Run a schedule on paper.

    Args:
        schedule: a valid schedule.
        costs: None means F = B = W = 1 and free transfers.
        stage_sizes: layers of each global stage, where they differ; a stage's cost is its share of
            them. None: all equal.

    Raises:
        ScheduleError: ranks wait for each other forever, or `stage_sizes` has another length.
    """
    costs = costs or Costs()
    shares = _shares(schedule, stage_sizes)
    times: list[list[tuple[float, float]]] = [[] for _ in schedule.cells]
    finished: dict[Op, float] = {}
    for rank, number in execution_order(schedule):
        cell = schedule.cells[rank][number]
        start = times[rank][-1][1] if times[rank] else 0.0
        for op in cell:
            for need in op.dependencies(schedule.num_stages):
                remote = schedule.stage_to_rank[need.stage] != rank
                start = max(start, finished[need] + (costs.transfer if remote else 0.0))
        durations = [op_time(op, costs, shares) for op in cell]
        end = start + sum(durations) * (costs.overlap if len(cell) > 1 else 1.0)
        finished.update({part: end for op in cell for part in op.parts})
        times[rank].append((start, end))
    return Simulation(
        schedule=schedule,
        costs=costs,
        times=tuple(tuple(rank) for rank in times),
        ideal=_ideal(schedule, costs, shares),
        activations_until_B=_peaks(schedule, Kind.B),
        activations_until_W=_peaks(schedule, Kind.W),
        num_transfers=_num_transfers(schedule),
    )


def _shares(schedule: Schedule, stage_sizes: Sequence[float] | None) -> list[float]:
    """Each stage's layers over those of an average rank."""
    if stage_sizes is None:
        stage_sizes = [1] * schedule.num_stages
    if len(stage_sizes) != schedule.num_stages:
        raise ScheduleError(
            f"stage_sizes: {len(stage_sizes)} sizes for {schedule.num_stages} stages"
        )
    return [size * schedule.num_ranks / sum(stage_sizes) for size in stage_sizes]


def op_time(op: Op, costs: Costs, shares: Sequence[float]) -> float:
    """Time of one op; `shares` are the layers of each stage over those of an average rank."""
    index = (Kind.F, Kind.B, Kind.W, Kind.BW).index(op.kind)
    total = (costs.F, costs.B, costs.W, costs.both)[index] * shares[op.stage]
    for stage, extra in ((0, costs.first), (len(shares) - 1, costs.last)):
        if op.stage == stage:
            total += (*extra, extra[1] + extra[2])[index]
    return total


def _ideal(schedule: Schedule, costs: Costs, shares: list[float]) -> float:
    kinds = (Kind.F,) if schedule.forward_only else (Kind.F, Kind.BW)
    one = sum(
        op_time(Op(kind, stage, 0), costs, shares)
        for stage in range(schedule.num_stages)
        for kind in kinds
    )
    return one * schedule.num_microbatches / schedule.num_ranks


def _peaks(schedule: Schedule, until: Kind) -> tuple[int, ...]:
    """Chunks in flight do not depend on time, only on the order on each rank. In a pair, the new
    activations are there before the old ones go."""

    def peak(cells: Sequence[Cell]) -> int:
        held = most = 0
        for cell in cells:
            for op in cell:
                kinds = [part.kind for part in op.parts]
                held += kinds.count(Kind.F) - kinds.count(until)
                most = max(most, held)
        return most

    # An evaluation holds nothing; counting its forwards would say that it holds all.
    if schedule.forward_only:
        return (0,) * schedule.num_ranks
    return tuple(peak(cells) for cells in schedule.cells)


def _num_transfers(schedule: Schedule) -> int:
    borders = zip(schedule.stage_to_rank, schedule.stage_to_rank[1:], strict=False)
    crossings = sum(here != there for here, there in borders)
    directions = 1 if schedule.forward_only else 2
    return crossings * schedule.num_microbatches * directions
