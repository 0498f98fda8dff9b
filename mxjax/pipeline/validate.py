"""Can this schedule run, and does it compute each gradient exactly once?

For schedules written by hand, and for the generators' own tests. Nothing here knows costs or time.
"""

from __future__ import annotations

from collections import Counter

from mxjax.pipeline.schedule import Cell, Kind, Op, Schedule, ScheduleError, format_cell

_SHOWN = 20
"""Problems named in one message; one slip in a file often makes hundreds."""

_PASSES = {Kind.F: "forward", Kind.B: "input gradient", Kind.W: "weight gradient"}


def validate(schedule: Schedule, forward_only: bool = False) -> None:
    """Return if the schedule can run; `forward_only` asks for an evaluation schedule.

    Raises:
        ScheduleError: it cannot; the message lists what is wrong, with rank and cell.
    """
    found = problems(schedule, forward_only)
    if found:
        more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        listed = "".join(f"\n  {problem}" for problem in found[:_SHOWN])
        raise ScheduleError(f"schedule {schedule.name} cannot run:{listed}{more}")


def problems(schedule: Schedule, forward_only: bool = False) -> list[str]:
    """All that is wrong with a schedule, one sentence each; empty if nothing is.

    Checks come in stages, because a mistake of one stage makes false alarms in the next: placement,
    then each op by itself, then whether all are there once, then their order on each rank, then
    whether ranks wait for each other in a circle.
    """
    for check in (_placement, _single_ops, _completeness, _order):
        found = check(schedule, forward_only)
        if found:
            return found
    try:
        execution_order(schedule)
    except ScheduleError as error:
        return [str(error)]
    return []


def execution_order(schedule: Schedule) -> list[tuple[int, int]]:
    """(rank, number of the cell on it) of all cells, each after all that it needs.

    Raises:
        ScheduleError: there is no such order; the message names who waits for whom.
    """
    position = [0] * schedule.num_ranks
    done: set[Op] = set()
    order: list[tuple[int, int]] = []
    moved = True
    while moved:
        moved = False
        for rank, cells in enumerate(schedule.cells):
            while position[rank] < len(cells) and not _missing(
                cells[position[rank]], schedule.num_stages, done
            ):
                done.update(part for op in cells[position[rank]] for part in op.parts)
                order.append((rank, position[rank]))
                position[rank] += 1
                moved = True
    stuck = [rank for rank, cells in enumerate(schedule.cells) if position[rank] < len(cells)]
    if stuck:
        raise ScheduleError(_who_waits_for_whom(schedule, position, done, stuck[0]))
    return order


def _missing(cell: Cell, num_stages: int, done: set[Op]) -> list[Op]:
    return [need for op in cell for need in op.dependencies(num_stages) if need not in done]


def _who_waits_for_whom(schedule: Schedule, position: list[int], done: set[Op], rank: int) -> str:
    """Follow the waiting from one stuck rank until it closes or ends at work that nobody does."""
    waits, seen = [], []
    while rank not in seen:
        seen.append(rank)
        cell = schedule.cells[rank][position[rank]]
        need = _missing(cell, schedule.num_stages, done)[0]
        waits.append(f"rank {rank} waits in cell {position[rank]} ({format_cell(cell)}) for {need}")
        rank = schedule.stage_to_rank[need.stage]
        later = schedule.cells[rank][position[rank] :]
        if not any(need in op.parts for cell in later for op in cell):
            return f"deadlock: {', '.join(waits)}, which rank {rank} never does"
    return f"deadlock: {', '.join(waits)}: a circle"


def _placement(schedule: Schedule, forward_only: bool) -> list[str]:
    counts = Counter(schedule.stage_to_rank)
    unknown = sorted(rank for rank in counts if not 0 <= rank < schedule.num_ranks)
    if unknown:
        return [f"stage_to_rank names rank {unknown[0]}; there are 0 to {schedule.num_ranks - 1}"]
    per_rank = [counts[rank] for rank in range(schedule.num_ranks)]
    if len(set(per_rank)) > 1 or not per_rank[0]:
        return [
            f"stage_to_rank gives the ranks {per_rank} stages; all need equally many, 1 or more"
        ]
    return []


def _single_ops(schedule: Schedule, forward_only: bool) -> list[str]:
    found = []
    for rank, cells in enumerate(schedule.cells):
        for number, cell in enumerate(cells):
            where = f"rank {rank}, cell {number} ({format_cell(cell)})"
            if [op.kind for op in cell] not in _CELL_KINDS:
                found.append(f"{where}: a cell is one op, or F|B or F|BW")
            for op in cell:
                if not 0 <= op.stage < schedule.num_stages:
                    found.append(f"{where}: stages are 0 to {schedule.num_stages - 1}")
                elif schedule.stage_to_rank[op.stage] != rank:
                    owner = schedule.stage_to_rank[op.stage]
                    found.append(f"{where}: stage {op.stage} lies on rank {owner}")
                if not 0 <= op.microbatch < schedule.num_microbatches:
                    last = schedule.num_microbatches - 1
                    found.append(f"{where}: microbatches are 0 to {last}")
                if forward_only and op.kind is not Kind.F:
                    found.append(f"{where}: backward work in an evaluation schedule")
    return found


_CELL_KINDS = [[kind] for kind in Kind] + [[Kind.F, Kind.B], [Kind.F, Kind.BW]]


def _completeness(schedule: Schedule, forward_only: bool) -> list[str]:
    writers: dict[Op, list[str]] = {}
    for cells in schedule.cells:
        for number, cell in enumerate(cells):
            for op in cell:
                for part in op.parts:
                    writers.setdefault(part, []).append(f"cell {number} ({format_cell(cell)})")
    found = []
    for stage, rank in enumerate(schedule.stage_to_rank):
        for microbatch in range(schedule.num_microbatches):
            for kind in (Kind.F,) if forward_only else (Kind.F, Kind.B, Kind.W):
                places = writers.get(Op(kind, stage, microbatch), [])
                what = f"{_PASSES[kind]} of microbatch {microbatch} in stage {stage}"
                if not places:
                    found.append(f"rank {rank}: no {what}")
                elif len(places) > 1:
                    found.append(f"rank {rank}: {what} more than once, in {' and '.join(places)}")
    return found


def _order(schedule: Schedule, forward_only: bool) -> list[str]:
    found = []
    for rank, cells in enumerate(schedule.cells):
        number_of = {
            part: number for number, cell in enumerate(cells) for op in cell for part in op.parts
        }
        newest: dict[tuple[Kind, int], int] = {}
        for number, cell in enumerate(cells):
            where = f"rank {rank}, cell {number} ({format_cell(cell)})"
            for op in cell:
                for need in op.dependencies(schedule.num_stages):
                    # What other ranks do is left to `execution_order`.
                    if number_of.get(need, -1) == number:
                        found.append(f"{where}: {op} needs {need}, so they cannot overlap")
                    elif number_of.get(need, -1) > number:
                        found.append(
                            f"{where}: needs {need}, which comes later, in cell {number_of[need]}"
                        )
                # In order, so that gradients add up in the same order in every schedule.
                for part in op.parts:
                    before = newest.get((part.kind, part.stage), -1)
                    if part.microbatch < before:
                        found.append(
                            f"{where}: {_PASSES[part.kind]} of microbatch {part.microbatch} after "
                            f"that of {before}; microbatches go in order"
                        )
                    newest[part.kind, part.stage] = part.microbatch
    return found
