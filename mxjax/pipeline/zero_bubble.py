"""Zero-bubble orders found by search, for given costs and a limit on activations.

ZB-H1 fixes after which backward each W comes. No order that holds as few activations was found to
be faster, whatever F, B and W cost; one that may hold more can shrink the bubble down to the
(P - 1) F by which ranks start one after the other. Each rank takes whatever has arrived, and a W
where nothing has, under the limit: the greedy idea of Qi et al. 2023 (arXiv 2401.10241, section 3),
tried with several rules, of which the best on paper stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from mxjax.pipeline.schedule import Cell, Kind, Op, Schedule, ScheduleError
from mxjax.pipeline.schedules import make_schedule
from mxjax.pipeline.simulate import Costs, op_time, simulate

_SHORTER_GAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
_SAME = 1e-9
"""Relative difference of makespans that is rounding."""


@cache
def search_zero_bubble(
    num_ranks: int, num_microbatches: int, costs: Costs, max_activations: int
) -> Schedule:
    """The order of F, B and W, one stage a rank, with the smallest makespan among those tried.

    It is never slower than ZB-H1, which is among them from P activations on.

    Args:
        num_ranks: pipeline ranks (P).
        num_microbatches: microbatches of the step.
        costs: what the order is made for.
        max_activations: microbatches that a rank may hold until W. ZB-H1 holds P, as does 1F1B on
            its first rank; 2 P are enough for the smallest bubble if F, B and W are about equal.

    Raises:
        ScheduleError: fewer than one rank, microbatch or activation.
    """
    fixed = make_schedule("zbh1", num_ranks, num_microbatches)
    if max_activations < 1:
        raise ScheduleError(f"{max_activations} is below 1", key="max_activations")
    name = f"zero bubble, {max_activations} activations"
    allowed = max_activations >= num_ranks
    best, best_time = fixed, simulate(fixed, costs).makespan if allowed else math.inf
    extras = sorted({0, max(max_activations - num_ranks, 0), max_activations})
    for shorter_gap, forward_first, extra in product(_SHORTER_GAPS, (False, True), extras):
        greedy = _Greedy(fixed, costs, _Rules(max_activations, shorter_gap, forward_first, extra))
        greedy.run()
        if greedy.makespan < best_time * (1 - _SAME):
            cells = tuple(map(tuple, greedy.cells))
            best, best_time = replace(fixed, name=name, cells=cells), greedy.makespan
    return best


@dataclass(frozen=True)
class _Rules:
    """How a rank chooses."""

    max_activations: int
    shorter_gap: float
    """Put a W into a gap that is known to be shorter than it if it fills this part of W's time."""
    forward_first: bool
    """Which goes first where both F and B have arrived."""
    extra_warmup: int
    """Forwards before the first B beyond those of 1F1B."""


class _Greedy:
    """Runs all ranks through time; each decides only by what it knows at that moment."""

    def __init__(self, sizes: Schedule, costs: Costs, rules: _Rules) -> None:
        self.num_ranks, self.num_microbatches = sizes.num_ranks, sizes.num_microbatches
        self.costs, self.rules = costs, rules
        self.cells: list[list[Cell]] = [[] for _ in range(self.num_ranks)]
        self.done = {kind: [0] * self.num_ranks for kind in (Kind.F, Kind.B, Kind.W)}
        self.end: dict[Op, float] = {}
        self.now = [0.0] * self.num_ranks

    @property
    def makespan(self) -> float:
        return max(self.now)

    def run(self) -> None:
        """Fill `cells`."""
        unfinished = set(range(self.num_ranks))
        waiting = [False] * self.num_ranks
        while unfinished:
            # In the order of time, so that what another rank has not begun by now cannot arrive by
            # now; a rank that waits looks again after all others of that moment.
            rank = min(unfinished, key=lambda r: (self.now[r], waiting[r], r))
            kind = self._choose(rank)
            if kind is not None:
                before = self.now[rank]
                self._do(Op(kind, rank, self.done[kind][rank]))
                if self.now[rank] == before:  # of this moment, too: others may have waited for it
                    waiting = [False] * self.num_ranks
                waiting[rank] = False
                if self.done[Kind.W][rank] == self.num_microbatches:
                    unfinished.remove(rank)
            elif not waiting[rank]:
                waiting[rank] = True
            else:
                # All wait or are busy: go to the next moment at which any of them may act.
                moments = [self.now[r] for r in unfinished]
                moments += [time for r in unfinished for time in self._arrivals(r).values()]
                self.now[rank] = min(time for time in moments if time > self.now[rank])
                waiting[rank] = False

    def _choose(self, rank: int) -> Kind | None:
        """What to do now; None: wait."""
        arrivals = self._arrivals(rank)
        order = (Kind.F, Kind.B) if self.rules.forward_first else (Kind.B, Kind.F)
        for kind in order:
            if arrivals.get(kind, math.inf) <= self.now[rank]:
                return kind
        if self.done[Kind.B][rank] == self.done[Kind.W][rank]:
            return None
        gap = min(arrivals.values(), default=math.inf) - self.now[rank]
        return Kind.W if gap >= self.rules.shorter_gap * self.costs.W else None

    def _arrivals(self, rank: int) -> dict[Kind, float]:
        """When the next F and B can start at the earliest, those that are allowed and known."""
        forwards, backwards = self.done[Kind.F][rank], self.done[Kind.B][rank]
        in_flight = self.num_ranks - rank + self.rules.extra_warmup
        wanted = []
        if (
            forwards < self.num_microbatches
            and forwards - self.done[Kind.W][rank] < self.rules.max_activations
            and forwards - backwards < in_flight
        ):
            wanted.append(Op(Kind.F, rank, forwards))
        if backwards < self.num_microbatches:
            wanted.append(Op(Kind.B, rank, backwards))
        arrivals = {}
        for op in wanted:
            needs = op.dependencies(self.num_ranks)
            if all(need in self.end for need in needs):
                times = [
                    self.end[need] + (self.costs.transfer if need.stage != rank else 0.0)
                    for need in needs
                ]
                arrivals[op.kind] = max(times, default=0.0)
        return arrivals

    def _do(self, op: Op) -> None:
        rank = op.stage
        self.now[rank] += op_time(op, self.costs, [1.0] * self.num_ranks)
        self.end[op] = self.now[rank]
        self.done[op.kind][rank] += 1
        self.cells[rank].append((op,))
