"""Schedules as tables for one program that all ranks run in step: the tick compiler. No JAX.

In a tick every rank runs at most one cell; then tensors cross from rank to rank. The compiler
assigns ticks, a place in a ring buffer to every value for as long as it lives (interval colouring;
equal on all ranks, so the largest need counts), and the exact pairs of ranks of every transfer.

Five kinds of rings: `x` residual streams between stages, `g` their gradients; and for each kind of
layer what F leaves for B (`residuals`), for B and W (`kept`), and what B leaves for W (`cut`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mxjax.pipeline.schedule import Cell, Kind, Op, Schedule
from mxjax.pipeline.simulate import Costs, op_time
from mxjax.pipeline.stacks import LayerCounts, Stacks

_READ, _WRITE, _EXCHANGE, _PHASES = 1, 2, 3, 4
"""A tick's phases: 0 the embedding is written, cells read, cells write, ranks exchange."""


@dataclass(frozen=True)
class Part:
    """An op of a flavour of cell: which kind of work, on which chunk, with how many layers."""

    kind: Kind
    chunk: int
    layers: LayerCounts

    def layers_of(self, stacks: Stacks) -> list[tuple[str, int]]:
        """Kind of each layer and its number among those of its kind on the stage, in the order in
        which the op takes them."""
        counts = zip(stacks.kinds, self.layers, strict=True)
        found = [(kind, j) for kind, n in counts for j in range(n)]
        return found[::-1] if self.kind in (Kind.B, Kind.BW) else found

    def place(self, kind: str, j: Any, stacks: Stacks) -> tuple[str, Any]:
        """Group of a layer's weights, and its place in it among those of the chunk."""
        return stacks.group(kind), stacks.before(kind, self.layers) + j

    def layers_before(self, kind: str, stacks: Stacks) -> int:
        """Layers of the stage that come before those of this kind in the model."""
        return sum(self.layers[: list(stacks.kinds).index(kind)])


@dataclass(frozen=True)
class Transfer:
    """A residual stream ("x") or gradient ("g") that goes from one rank to another."""

    ring: str
    source: int
    target: int
    source_slot: int
    target_slot: int


Flavour = tuple[Part, ...]
Pattern = tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
"""For each channel that is used in a tick: its ring, and pairs (source, target) of ranks."""


@dataclass(frozen=True)
class TickTable:
    """What each rank does in each tick.

    Attributes:
      flavours: the different cells; a row's `cell` is an index, -1: nothing.
      patterns: the different exchanges; `pattern` [T] is an index. The first is that of none.
      channels: for each ring ("x", "g"), how many transfers a rank may take part in per tick.
      rows: [T, P] int32 by name: `cell`; `embed`, `head`, `embed_gradient` (0 or 1); for the op F,
        B and W of the cell its `<op>.microbatch` and `<op>.first_layer` (number in the model);
        slots `F.x` (input), `F.y` (output), `F.g` (where the head puts its gradient), `B.g`
        (input), `B.dx` (output), `<op>.<ring>.<kind of layer>`; `send.<ring>.<channel>` and
        `receive.<ring>.<channel>`. A slot that nothing is read from or written to is the last
        one of its ring, which is spare.
      slots: for each ring, how many slots it has without the spare one.
      cells: for each rank, the tick of each cell.
    """

    schedule: Schedule
    stacks: Stacks
    flavours: tuple[Flavour, ...]
    patterns: tuple[Pattern, ...]
    pattern: np.ndarray
    channels: Mapping[str, int]
    rows: Mapping[str, np.ndarray]
    slots: Mapping[str, int]
    cells: tuple[tuple[int, ...], ...]
    transfers: tuple[tuple[Transfer, ...], ...]
    """Of each tick."""

    @property
    def num_ticks(self) -> int:
        """T."""
        return len(self.pattern)

    @property
    def forward_only(self) -> bool:
        """Whether it is for evaluation."""
        return self.schedule.forward_only


def compile_ticks(schedule: Schedule, stacks: Stacks, *, deferred: bool = False) -> TickTable:
    """The table of a valid schedule.

    Args:
      stacks: the layers of each stage; stages must lie as in `schedule`.
      deferred: let tensors cross just before they are needed, not as soon as they are there. The
        sender then need not wait for a busy receiver.
    """
    return _Compiler(schedule, stacks, deferred).table()


def time_of_ticks(table: TickTable, costs: Costs) -> float:
    """How long a step takes when ranks go through the table, waiting only for those that they
    exchange something with."""
    schedule = table.schedule
    sizes = [sum(counts) for counts in table.stacks.stage_layers]
    shares = [size * schedule.num_ranks / sum(sizes) for size in sizes]
    clock = [0.0] * schedule.num_ranks
    work = [
        dict(zip(ticks, cells, strict=True))
        for ticks, cells in zip(table.cells, schedule.cells, strict=True)
    ]
    for tick, transfers in enumerate(table.transfers):
        for rank in range(schedule.num_ranks):
            cell = work[rank].get(tick, ())
            overlap = costs.overlap if len(cell) > 1 else 1.0
            clock[rank] += overlap * sum(op_time(op, costs, shares) for op in cell)
        before = list(clock)
        for move in transfers:
            met = max(before[move.source], before[move.target]) + costs.transfer
            for rank in (move.source, move.target):
                clock[rank] = max(clock[rank], met)
    return max(clock)


class _Compiler:
    def __init__(self, schedule: Schedule, stacks: Stacks, deferred: bool):
        self.schedule, self.stacks = schedule, stacks
        self.kinds, self.stage_layers = tuple(stacks.kinds), stacks.stage_layers
        self.deferred = deferred
        self.ticks = _assign(schedule)
        self.tick_of = {
            part: tick
            for rank, order in enumerate(schedule.cells)
            for cell, tick in zip(order, self.ticks[rank], strict=True)
            for op in cell
            for part in op.parts
        }
        self.num_ticks = 1 + max(max(ticks) for ticks in self.ticks if ticks)
        self.lives: dict[str, list[list[tuple[int, int, object]]]] = {}
        self.moves: list[tuple[int, str, object, object, int, int]] = []

    def table(self) -> TickTable:
        self._streams()
        if not self.schedule.forward_only:
            self._layer_values()
        places, slots = {}, {}
        for ring, ranks in self.lives.items():
            colours = [_colour(intervals) for intervals in ranks]
            slots[ring] = max(number for _, number in colours)
            places[ring] = {
                name: slot
                for found, _ in colours
                for names, slot in found.items()
                for name in names
            }
        transfers, patterns, pattern, channels = self._exchanges(places)
        flavours, rows = self._rows(places, slots)
        self._exchange_rows(rows, transfers, slots, channels)
        return TickTable(
            schedule=self.schedule,
            stacks=self.stacks,
            flavours=flavours,
            patterns=patterns,
            pattern=pattern,
            channels=channels,
            rows=rows,
            slots=slots,
            cells=self.ticks,
            transfers=tuple(tuple(t for t, _ in tick) for tick in transfers),
        )

    def _live(self, ring: str, rank: int, start: int, end: int, *names: object) -> None:
        ranks = self.lives.setdefault(ring, [[] for _ in range(self.schedule.num_ranks)])
        ranks[rank].append((start, end, names))

    def _streams(self) -> None:
        """Lives of residual streams and their gradients, and where they cross between ranks.

        Their names are ("in", op) for an op's input and ("out", op) for its output.
        """
        schedule, last = self.schedule, self.schedule.num_stages - 1
        for ring in ("x", "g"):
            self.lives[ring] = [[] for _ in range(schedule.num_ranks)]
        for op, tick in self.tick_of.items():
            rank, now = schedule.stage_to_rank[op.stage], tick * _PHASES
            if op.kind is Kind.F:
                if op.stage == 0:
                    self._live("x", rank, now, now + _READ, ("in", op))
                if op.stage == last:
                    self._live("x", rank, now + _WRITE, now + _EXCHANGE, ("out", op))
                    target = Op(Kind.B, op.stage, op.microbatch)
                    if target in self.tick_of:
                        end = self.tick_of[target] * _PHASES + _READ
                        self._live("g", rank, now + _WRITE, end, ("in", target))
                else:
                    self._move("x", op, Op(Kind.F, op.stage + 1, op.microbatch))
            elif op.kind is Kind.B:
                if op.stage == 0:
                    self._live("g", rank, now + _WRITE, now + _EXCHANGE, ("out", op))
                else:
                    self._move("g", op, Op(Kind.B, op.stage - 1, op.microbatch))

    def _move(self, ring: str, maker: Op, user: Op) -> None:
        """The output of `maker` is the input of `user`."""
        source = self.schedule.stage_to_rank[maker.stage]
        target = self.schedule.stage_to_rank[user.stage]
        made, used = self.tick_of[maker], self.tick_of[user]
        end = used * _PHASES + _READ
        if source == target:
            # One slot is both.
            start = made * _PHASES + _WRITE
            self._live(ring, source, start, end, ("out", maker), ("in", user))
            return
        tick = used - 1 if self.deferred else made
        crossing = tick * _PHASES + _EXCHANGE
        self._live(ring, source, made * _PHASES + _WRITE, crossing, ("out", maker))
        self._live(ring, target, crossing, end, ("in", user))
        self.moves.append((tick, ring, ("out", maker), ("in", user), source, target))

    def _layer_values(self) -> None:
        """Lives of what layers leave for their backward passes. Slots are never shared within a
        tick: the two ops of a pair work at the same time."""
        fused = {
            part
            for rank in range(self.schedule.num_ranks)
            for op in self.schedule.ops(rank)
            if op.kind is Kind.BW
            for part in op.parts
        }
        for op, tick in self.tick_of.items():
            if op.kind is not Kind.F:
                continue
            rank = self.schedule.stage_to_rank[op.stage]
            backward = Op(Kind.B, op.stage, op.microbatch)
            until_b = self.tick_of[backward]
            until_w = self.tick_of[Op(Kind.W, op.stage, op.microbatch)]
            for kind, count in zip(self.kinds, self.stage_layers[op.stage], strict=True):
                if not count:
                    continue
                key = (op.stage, op.microbatch)
                start, end_b, end_w = (
                    t * _PHASES + phase
                    for t, phase in ((tick, _WRITE), (until_b, _EXCHANGE), (until_w, _EXCHANGE))
                )
                self._live(f"residuals.{kind}", rank, start, end_b, key)
                self._live(f"kept.{kind}", rank, start, end_w, key)
                if backward not in fused:
                    made = until_b * _PHASES + _WRITE
                    self._live(f"cut.{kind}", rank, made, end_w, key)

    def _exchanges(self, places):
        """Transfers of each tick with their channel, and the different patterns."""
        by_tick: list[list[tuple[Transfer, int]]] = [[] for _ in range(self.num_ticks)]
        channels = {"x": 0, "g": 0}
        for tick, ring, sent, received, source, target in sorted(self.moves, key=_move_order):
            taken = {
                c
                for other, c in by_tick[tick]
                if other.ring == ring and (other.source == source or other.target == target)
            }
            channel = next(c for c in range(len(taken) + 1) if c not in taken)
            channels[ring] = max(channels[ring], channel + 1)
            transfer = Transfer(ring, source, target, places[ring][sent], places[ring][received])
            by_tick[tick].append((transfer, channel))
        patterns: dict[Pattern, int] = {(): 0}
        pattern = np.zeros(self.num_ticks, np.int32)
        for tick, transfers in enumerate(by_tick):
            pairs: dict[tuple[str, int], list[tuple[int, int]]] = {}
            for transfer, channel in transfers:
                edge = (transfer.source, transfer.target)
                pairs.setdefault((transfer.ring, channel), []).append(edge)
            key = tuple((f"{r}.{c}", tuple(sorted(pairs[r, c]))) for r, c in sorted(pairs))
            pattern[tick] = patterns.setdefault(key, len(patterns))
        return by_tick, tuple(patterns), pattern, channels

    def _rows(self, places, slots):
        """Flavours, and the rows of cells."""
        shape = (self.num_ticks, self.schedule.num_ranks)
        rows: dict[str, np.ndarray] = {
            "cell": np.full(shape, -1, np.int32),
            **{name: np.zeros(shape, np.int32) for name in ("embed", "head", "embed_gradient")},
        }
        flavours: dict[Flavour, int] = {}
        for rank, order in enumerate(self.schedule.cells):
            for cell, tick in zip(order, self.ticks[rank], strict=True):
                rows["cell"][tick, rank] = flavours.setdefault(self._flavour(cell), len(flavours))
                for op in cell:
                    for name, value in self._row(op, places):
                        if name not in rows:
                            ring = _ring_of(name)
                            spare = 0 if ring is None else slots[ring]
                            rows[name] = np.full(shape, spare, np.int32)
                        rows[name][tick, rank] = value
        return tuple(flavours), rows

    def _flavour(self, cell: Cell) -> Flavour:
        return tuple(
            Part(op.kind, self.schedule.chunk_of(op.stage), self.stage_layers[op.stage])
            for op in cell
        )

    def _row(self, op: Op, places):
        """Names and values of an op's entries."""
        letter = "F" if op.kind is Kind.F else "W" if op.kind is Kind.W else "B"
        yield f"{letter}.microbatch", op.microbatch
        yield f"{letter}.first_layer", self.stacks.first_layer(op.stage)
        last = self.schedule.num_stages - 1
        parts = op.parts
        if op.kind is Kind.F:
            yield "F.x", places["x"]["in", op]
            yield "F.y", places["x"]["out", op]
            if op.stage == 0:
                yield "embed", 1
            if op.stage == last:
                yield "head", 1
                if not self.schedule.forward_only:
                    target = Op(Kind.B, op.stage, op.microbatch)
                    yield "F.g", places["g"]["in", target]
        elif op.kind is not Kind.W:
            yield "B.g", places["g"]["in", parts[0]]
            yield "B.dx", places["g"]["out", parts[0]]
            if op.stage == 0:
                yield "embed_gradient", 1
        rings = {
            Kind.F: ("residuals", "kept"),
            Kind.B: ("residuals", "kept", "cut"),
            Kind.W: ("kept", "cut"),
            Kind.BW: ("residuals", "kept"),
        }[op.kind]
        for kind, count in zip(self.kinds, self.stage_layers[op.stage], strict=True):
            for ring in rings:
                if count and f"{ring}.{kind}" in places:
                    key = (op.stage, op.microbatch)
                    yield f"{letter}.{ring}.{kind}", places[f"{ring}.{kind}"][key]

    def _exchange_rows(self, rows, transfers, slots, channels) -> None:
        shape = (self.num_ticks, self.schedule.num_ranks)
        for ring, number in channels.items():
            for channel in range(number):
                for verb in ("send", "receive"):
                    rows[f"{verb}.{ring}.{channel}"] = np.full(shape, slots[ring], np.int32)
        for tick, pairs in enumerate(transfers):
            for move, channel in pairs:
                rows[f"send.{move.ring}.{channel}"][tick, move.source] = move.source_slot
                rows[f"receive.{move.ring}.{channel}"][tick, move.target] = move.target_slot


def _assign(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """The earliest tick of each cell."""
    done: dict[Op, int] = {}
    ticks: list[list[int]] = [[] for _ in schedule.cells]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.cells):
            while len(ticks[rank]) < len(order):
                cell = order[len(ticks[rank])]
                own = {part for op in cell for part in op.parts}
                needs = [
                    need
                    for op in own
                    for need in op.dependencies(schedule.num_stages)
                    if need not in own
                ]
                if any(need not in done for need in needs):
                    break
                before = ticks[rank][-1] if ticks[rank] else -1
                tick = 1 + max([before, *(done[need] for need in needs)])
                ticks[rank].append(tick)
                done |= dict.fromkeys(own, tick)
                moved = True
    for rank, order in enumerate(schedule.cells):
        if len(ticks[rank]) < len(order):
            raise ValueError(f"rank {rank} waits for ever; validate the schedule first")
    return tuple(map(tuple, ticks))


def _colour(intervals: list[tuple[int, int, object]]) -> tuple[dict[object, int], int]:
    """A slot for each half-open interval such that those of one slot do not overlap; how many."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    found: dict[object, int] = {}
    number = 0
    for start, end, key in sorted(intervals, key=lambda interval: interval[:2]):
        free += [slot for until, slot in busy if until <= start]
        busy = [(until, slot) for until, slot in busy if until > start]
        if free:
            free.sort(reverse=True)
            slot = free.pop()
        else:
            slot, number = number, number + 1
        found[key] = slot
        busy.append((end, slot))
    return found, number


def _move_order(move) -> tuple:
    tick, ring, _, (_, user), source, target = move
    return tick, ring, source, target, user.stage, user.microbatch


def _ring_of(row: str) -> str | None:
    """The ring that a row's slots are of."""
    op, _, rest = row.partition(".")
    if op not in "FBW" or rest in ("microbatch", "first_layer", ""):
        return None
    return {"x": "x", "y": "x", "g": "g", "dx": "g"}.get(rest, rest)
