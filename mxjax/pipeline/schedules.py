"""Generators of the published pipeline schedules, and `make_schedule`, which finds them by name.

Each generator writes down the order of one rank in the words of its paper; P ranks, M microbatches,
V chunks a rank, r the rank. Bubbles and activations of each are in `docs/pipeline.md`.

Backward work comes in three forms, the `cells` of a schedule:

* ``full``: one cell ``BW``, as published.
* ``split``: two cells, ``B`` then ``W``; the gradient of the input leaves before W starts.
* ``joint``: more forwards before the first backward, after which a forward and a backward that do
  not depend on each other share a cell ``F|BW`` (Megatron's combined 1F1B).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from mxjax.pipeline.schedule import (
    Cell,
    Kind,
    Op,
    Schedule,
    ScheduleError,
    loop_placement,
    v_placement,
)

Cells = Literal["full", "split", "joint"]

_MOST_FORWARDS = 500_000
"""Of a schedule; to list and simulate them takes seconds."""


class _Rank:
    """Writes one rank's order; microbatches count up by themselves for each kind and stage."""

    def __init__(self, *stages: int) -> None:
        self.stages = stages
        self.cells: list[Cell] = []
        self._next: Counter[tuple[str, int]] = Counter()
        self._pending_weight_grads: deque[Op] = deque()

    def _take(self, kind: Kind, chunk: int) -> Op:
        stage = self.stages[chunk]
        counter = ("forward" if kind is Kind.F else "backward", stage)
        op = Op(kind, stage, self._next[counter])
        self._next[counter] += 1
        if kind is Kind.B:
            self._pending_weight_grads.append(Op(Kind.W, stage, op.microbatch))
        return op

    def forwards(self, chunk: int) -> int:
        """How many forwards of a chunk are already written."""
        return self._next["forward", self.stages[chunk]]

    def F(self, chunk: int = 0) -> None:
        self.cells.append((self._take(Kind.F, chunk),))

    def B(self, chunk: int = 0) -> None:
        self.cells.append((self._take(Kind.B, chunk),))

    def BW(self, chunk: int = 0) -> None:
        self.cells.append((self._take(Kind.BW, chunk),))

    def F_BW(self, forward_chunk: int = 0, backward_chunk: int = 0) -> None:
        forward = self._take(Kind.F, forward_chunk)
        self.cells.append((forward, self._take(Kind.BW, backward_chunk)))

    def W(self, chunk: int | None = None) -> None:
        """The oldest weight gradient that is due, of one chunk or of any."""
        due = self._pending_weight_grads
        op = next(op for op in due if chunk is None or op.stage == self.stages[chunk])
        due.remove(op)
        self.cells.append((op,))

    def rest_of_W(self, chunk: int | None = None) -> None:
        """All weight gradients that are due, of one chunk or of any, oldest first."""
        for op in list(self._pending_weight_grads):
            if chunk is None or op.stage == self.stages[chunk]:
                self.W(chunk)


def gpipe(num_ranks: int, num_microbatches: int, rank: int) -> list[Cell]:
    """All forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965)."""
    order = _Rank(rank)
    for _ in range(num_microbatches):
        order.F()
    for _ in range(num_microbatches):
        order.BW()
    return order.cells


def one_f_one_b(num_ranks: int, num_microbatches: int, rank: int, joint: bool) -> list[Cell]:
    """1F1B (Narayanan et al. 2020, PipeDream-Flush): at most P microbatches in flight.

    ``joint`` lets twice as many go ahead and one more: a pair hands on its F only when its BW is
    done too, so a microbatch takes two cells from rank to rank and back instead of one.
    """
    ahead = num_ranks - 1 - rank
    warmup = min(2 * ahead + 1 if joint else ahead, num_microbatches)
    order = _Rank(rank)
    for _ in range(warmup):
        order.F()
    for _ in range(num_microbatches - warmup):
        if joint:
            order.F_BW()
        else:
            order.F()
            order.BW()
    for _ in range(warmup):
        order.BW()
    return order.cells


def interleaved(
    num_ranks: int, num_microbatches: int, num_chunks: int, rank: int, joint: bool
) -> list[Cell]:
    """Interleaved 1F1B or VPP (Narayanan et al. 2021, arXiv 2104.04473): groups of P microbatches
    take turns over the chunks, which divides the bubble by V."""
    stages = [chunk * num_ranks + rank for chunk in range(num_chunks)]
    total = num_microbatches * num_chunks
    warmup = min(2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks + joint, total)
    order = _Rank(*stages)

    def forward_chunk(k: int) -> int:
        return k // num_ranks % num_chunks

    def backward_chunk(k: int) -> int:
        return num_chunks - 1 - forward_chunk(k)

    for k in range(warmup):
        order.F(forward_chunk(k))
    for k in range(total - warmup):
        if joint:
            order.F_BW(forward_chunk(warmup + k), backward_chunk(k))
        else:
            order.F(forward_chunk(warmup + k))
            order.BW(backward_chunk(k))
    for k in range(total - warmup, total):
        order.BW(backward_chunk(k))
    return order.cells


def zbh1(num_ranks: int, num_microbatches: int, rank: int) -> list[Cell]:
    """ZB-H1 (Qi et al. 2023, arXiv 2401.10241): 1F1B whose W comes r backwards late, so that it
    fills the bubble at the end. No more activations than rank 0 of 1F1B."""
    warmup = min(num_ranks - 1 - rank, num_microbatches)
    order = _Rank(rank)
    for _ in range(warmup):
        order.F()
    for i in range(num_microbatches):
        if warmup + i < num_microbatches:
            order.F()
        order.B()
        if i >= rank:
            order.W()
    order.rest_of_W()
    return order.cells


def zbv(num_ranks: int, num_microbatches: int, rank: int) -> list[Cell]:
    """ZB-V (Qi et al. 2024, arXiv 2405.15362): two chunks in a V; no bubble when F = B = W."""
    P, M, r = num_ranks, num_microbatches, rank
    order = _Rank(r, 2 * P - 1 - r)
    for _ in range(2 * (P - r) - 1):
        order.F(0)
    for _ in range(r):
        order.F(1)
        order.F(0)
    for _ in range(P - r):
        order.F(1)
        order.B(1)
        order.W(1)
    while order.forwards(1) < M:
        if order.forwards(0) < M:
            order.F(0)
        order.B(0)
        order.W(0)
        order.F(1)
        order.B(1)
        order.W(1)
    for _ in range(r):
        order.B(0)
        order.B(1)
    for _ in range(P - r):
        order.B(0)
        order.W(0)
    order.rest_of_W(1)
    order.rest_of_W(0)
    return order.cells


def dualpipev(num_ranks: int, num_microbatches: int, rank: int) -> list[Cell]:
    """DualPipeV (DeepSeek, 2025): DualPipe cut in half, so that each rank keeps one copy of the
    parameters; two chunks in a V, forward and backward overlapped in the steady state. The eight
    steps are those of DeepSeek's reference."""
    P, M, r = num_ranks, num_microbatches, rank
    order = _Rank(r, 2 * P - 1 - r)
    for _ in range(2 * (P - 1 - r)):  # 1
        order.F(0)
    for _ in range(r + 1):  # 2
        order.F(0)
        order.F(1)
    for _ in range(P - 1 - r):  # 3
        order.B(1)
        order.W()
        order.F(1)
    for i in range(M - 2 * P + r + 1):  # 4
        if i == 0 and r == P - 1:
            # Here the backward is that of the chunk-1 forward just before, on this very rank.
            order.F(0)
            order.BW(1)
        else:
            order.F_BW(0, 1)
        order.F_BW(1, 0)
    for _ in range(P - 1 - r):  # 5
        order.BW(1)
        order.F_BW(1, 0)
    for i in range(2 * (r + 1)):  # 6: the second half of these leaves its W for later
        split = i > r
        chunk = 1 if i % 2 == 0 else 0
        if split:
            order.B(chunk)
        else:
            order.BW(chunk)
    for _ in range(P - 1 - r):  # 7
        order.W()
        order.B(0)
    order.rest_of_W()  # 8
    return order.cells


def forward_loop(num_ranks: int, num_microbatches: int, num_chunks: int, rank: int) -> list[Cell]:
    """Forwards alone, stages going round the ranks; groups of P microbatches take turns over the
    chunks as in VPP, the last group may be smaller."""
    order = _Rank(*(chunk * num_ranks + rank for chunk in range(num_chunks)))
    for first in range(0, num_microbatches, num_ranks):
        for chunk in range(num_chunks):
            for _ in range(min(num_ranks, num_microbatches - first)):
                order.F(chunk)
    return order.cells


def forward_v(num_ranks: int, num_microbatches: int, rank: int) -> list[Cell]:
    """Forwards alone, stages in a V: as many of chunk 0 ahead as it takes for the first microbatch
    to come back, then both chunks in turn."""
    warmup = min(num_ranks - rank, num_microbatches)
    order = _Rank(rank, 2 * num_ranks - 1 - rank)
    for _ in range(warmup):
        order.F(0)
    for _ in range(num_microbatches):
        order.F(1)
        if order.forwards(0) < num_microbatches:
            order.F(0)
    return order.cells


def split_backward(schedule: Schedule) -> Schedule:
    """The same schedule with each cell `BW` as two cells, `B` and `W`; pairs stay as they are."""

    def split(cell: Cell) -> list[Cell]:
        return [(part,) for part in cell[0].parts] if len(cell) == 1 else [cell]

    cells = tuple(tuple(c for cell in order for c in split(cell)) for order in schedule.cells)
    return replace(schedule, cells=cells)


@dataclass(frozen=True)
class ScheduleInfo:
    """What `make_schedule` needs to know of a schedule."""

    order: Callable[..., list[Cell]]
    """Called with `num_ranks`, `num_microbatches` and `rank`, and with `num_chunks` and `joint` if
    the schedule has a choice of them."""
    cells: tuple[Cells, ...] = ("full",)
    """The forms of backward work that it comes in."""
    placement: Literal["loop", "v"] = "loop"
    """How stages lie on ranks; `v` means two chunks a rank."""
    interleaved: bool = False
    """Whether stages may go round the ranks several times."""


SCHEDULES: dict[str, ScheduleInfo] = {
    "gpipe": ScheduleInfo(gpipe, ("full", "split")),
    "1f1b": ScheduleInfo(one_f_one_b, ("full", "split", "joint")),
    "interleaved": ScheduleInfo(interleaved, ("full", "split", "joint"), interleaved=True),
    "zbh1": ScheduleInfo(zbh1),
    "zbv": ScheduleInfo(zbv, placement="v"),
    "dualpipev": ScheduleInfo(dualpipev, placement="v"),
}
"""The training schedules, by the names that the configuration knows."""


def make_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    cells: Cells = "full",
) -> Schedule:
    """The schedule of a training step.

    Args:
        name: a key of `SCHEDULES`.
        num_ranks: pipeline ranks (P).
        num_microbatches: microbatches of the step (M).
        num_chunks: stages of each rank (V); None: what the schedule has, for `interleaved` 2.
        cells: the form of the backward work, see the top of this file.

    Raises:
        ScheduleError: there is no such schedule, or not for these numbers.
    """
    if name not in SCHEDULES:
        raise ScheduleError(
            f"there is no {name!r}; there are {', '.join(SCHEDULES)}", key="schedule"
        )
    info = SCHEDULES[name]
    _refuse_bad_counts(num_ranks, num_microbatches)
    num_chunks = _checked_chunks(name, num_chunks)
    _refuse_too_many(num_ranks, num_microbatches, num_chunks)
    if cells not in info.cells:
        raise ScheduleError(
            f"{name} has no form {cells!r}; it has {', '.join(info.cells)}", key="cells"
        )
    _refuse_microbatches(name, num_ranks, num_microbatches)
    arguments = {"num_chunks": num_chunks} if info.interleaved else {}
    if "joint" in info.cells:
        arguments["joint"] = cells == "joint"
    orders = [
        info.order(num_ranks=num_ranks, num_microbatches=num_microbatches, rank=rank, **arguments)
        for rank in range(num_ranks)
    ]
    placement = place(info.placement, num_ranks, num_chunks)
    schedule = Schedule(name, num_ranks, num_microbatches, placement, tuple(map(tuple, orders)))
    return split_backward(schedule) if cells == "split" else schedule


def forward_only(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    placement: Literal["loop", "v"] = "loop",
) -> Schedule:
    """The schedule of an evaluation step, for stages that lie as the training schedule has them.

    Raises:
        ScheduleError: a number is below 1, or a V with other than two chunks.
    """
    _refuse_bad_counts(num_ranks, num_microbatches)
    _refuse_too_many(num_ranks, num_microbatches, num_chunks)
    stage_to_rank = place(placement, num_ranks, num_chunks)
    if placement == "v":
        orders = [forward_v(num_ranks, num_microbatches, rank) for rank in range(num_ranks)]
    else:
        orders = [
            forward_loop(num_ranks, num_microbatches, num_chunks, rank) for rank in range(num_ranks)
        ]
    name = "forward_only"
    return Schedule(name, num_ranks, num_microbatches, stage_to_rank, tuple(map(tuple, orders)))


def place(placement: Literal["loop", "v"], num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Rank of each global stage.

    Raises:
        ScheduleError: a V with other than two chunks, or fewer than one chunk.
    """
    if placement == "v":
        if num_chunks != 2:
            raise ScheduleError(
                f"{num_chunks}, but stages in a V are two a rank; take 2", key="num_chunks"
            )
        return v_placement(num_ranks)
    if num_chunks < 1:
        raise ScheduleError(f"{num_chunks} is below 1", key="num_chunks")
    return loop_placement(num_ranks, num_chunks)


def _refuse_bad_counts(num_ranks: int, num_microbatches: int) -> None:
    for key, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ScheduleError(f"{value} is below 1", key=key)


def _checked_chunks(name: str, num_chunks: int | None) -> int:
    info = SCHEDULES[name]
    if info.interleaved:
        if num_chunks is None:
            return 2
        if num_chunks < 2:
            raise ScheduleError(
                f"{name} needs 2 or more, not {num_chunks}; 1f1b is the same with 1",
                key="num_chunks",
            )
        return num_chunks
    own = 2 if info.placement == "v" else 1
    if num_chunks not in (None, own):
        way_out = "" if own == 2 else "; interleaved is 1f1b with several"
        chunks = "chunk" if own == 1 else "chunks"
        raise ScheduleError(
            f"{name} has {own} {chunks} a rank, not {num_chunks}{way_out}", key="num_chunks"
        )
    return own


def _refuse_too_many(num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    counts = {
        "num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks
    }  # fmt: skip
    if math.prod(counts.values()) > _MOST_FORWARDS:
        raise ScheduleError(
            f"{num_ranks} ranks x {num_chunks} chunks x {num_microbatches} microbatches are more "
            f"than the {_MOST_FORWARDS:,} forwards that an order may have; lower one of them",
            key=max(counts, key=counts.__getitem__),
        )


def _refuse_microbatches(name: str, num_ranks: int, num_microbatches: int) -> None:
    if name == "interleaved" and num_microbatches % num_ranks:
        lower = num_microbatches // num_ranks * num_ranks
        raise ScheduleError(
            f"{num_microbatches} is not a multiple of the {num_ranks} ranks, "
            f"which interleaved needs; take {lower + num_ranks}"
            + (f" or {lower}" if lower else "")
            + ", or 1f1b, which takes any number",
            key="num_microbatches",
        )
    least = {"zbv": 2 * num_ranks - 1, "dualpipev": 2 * num_ranks}.get(name, 1)
    if num_microbatches < least:
        raise ScheduleError(
            f"{num_microbatches}, but {name} on {num_ranks} ranks needs at least "
            f"{least}; take more, or zbh1 or 1f1b, which take any number",
            key="num_microbatches",
        )
