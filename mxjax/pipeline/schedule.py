"""What a pipeline schedule is: for each rank, the order of its work. No JAX, no devices.

The model is cut into global stages 0, 1, ..., in the order in which a microbatch passes them; each
stage lies on one rank, and a rank that has several calls them its chunks. A rank works through its
**cells** in order. A cell is one op, or an overlapped pair ``F|BW`` that runs as one. When a cell
runs is not part of a schedule: it starts as soon as the rank is free and what it needs is there
(`simulate.py` gives times, the tick compiler gives ticks).

Written form, also in files: ``F3.0`` (forward of stage 3, microbatch 0), ``B3.0`` (gradient of its
input), ``W3.0`` (gradients of its weights), ``BW3.0`` (both at once), ``F0.7|BW3.3`` (a pair).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class ScheduleError(ValueError):
    """A schedule that cannot be made, read or run; the message says why and what would do.

    Attributes:
        key: the argument to change, None if the mistake is in the schedule itself.
        message: the text without the key.
    """

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key = key
        self.message = message


class Kind(Enum):
    """What an op computes. Members compare by identity; `value` is the written form."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"


_OP = re.compile(r"(F|BW|B|W)(\d+)\.(\d+)")


@dataclass(frozen=True)
class Op:
    """One piece of work: `kind` of one global stage for one microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"

    @property
    def parts(self) -> tuple[Op, ...]:
        """The op in terms of F, B and W alone: `BW` is B, then W."""
        if self.kind is not Kind.BW:
            return (self,)
        return (
            Op(Kind.B, self.stage, self.microbatch),
            Op(Kind.W, self.stage, self.microbatch),
        )

    def dependencies(self, num_stages: int) -> tuple[Op, ...]:
        """The F, B and W that must be done before this op may start.

        F needs the stage before; B needs its own F (whose activations it reads) and the stage
        after (the gradient of its output); W needs its B.
        """
        stage, microbatch = self.stage, self.microbatch
        if self.kind is Kind.F:
            return (Op(Kind.F, stage - 1, microbatch),) if stage > 0 else ()
        if self.kind is Kind.W:
            return (Op(Kind.B, stage, microbatch),)
        own = Op(Kind.F, stage, microbatch)
        if stage == num_stages - 1:
            return (own,)
        return (own, Op(Kind.B, stage + 1, microbatch))


Cell = tuple[Op, ...]
"""One op, or an overlapped pair: an F and a B or BW of another microbatch or stage."""


def parse_cell(text: str) -> Cell:
    """`"F4.3|BW7.1"` as a cell.

    Raises:
        ScheduleError: the text is not of that form, or a pair is not F and B or BW.
    """
    ops = []
    for part in text.split("|"):
        match = _OP.fullmatch(part.strip())
        if not match:
            raise ScheduleError(
                f"cell {text!r}: {part.strip()!r} is not an op; write F, B, W or BW, the stage, a "
                "dot and the microbatch, as in F3.0"
            )
        ops.append(Op(Kind(match[1]), int(match[2]), int(match[3])))
    pair_kinds = [op.kind for op in ops]
    if len(ops) > 1 and pair_kinds not in ([Kind.F, Kind.B], [Kind.F, Kind.BW]):
        raise ScheduleError(f"cell {text!r}: only F|B and F|BW can overlap, in that order")
    return tuple(ops)


def format_cell(cell: Cell) -> str:
    """The written form of a cell."""
    return "|".join(str(op) for op in cell)


def loop_placement(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Rank of each stage when stages go round the ranks: chunk c of rank r is stage c P + r."""
    return tuple(range(num_ranks)) * num_chunks


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Rank of each stage when they go down the ranks and back up: stages r and 2P-1-r on rank r,
    so that rank 0 has both the first and the last stage."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


@dataclass(frozen=True)
class Schedule:
    """The order of work of every rank, for one training (or evaluation) step.

    Making one checks nothing but the lengths; `validate.py` says whether it can run.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    """Rank of each global stage."""
    cells: tuple[tuple[Cell, ...], ...]
    """For each rank, its cells in order."""

    def __post_init__(self) -> None:
        if len(self.cells) != self.num_ranks:
            raise ScheduleError(
                f"schedule {self.name}: {self.num_ranks} ranks, but orders of {len(self.cells)}"
            )

    @property
    def num_stages(self) -> int:
        """Global stages of the model."""
        return len(self.stage_to_rank)

    @property
    def num_chunks(self) -> int:
        """Stages of each rank (of the rank that has most)."""
        return max(len(self.stages_of(rank)) for rank in range(self.num_ranks))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Global stages of a rank, ascending; the position is the chunk number."""
        return tuple(s for s, owner in enumerate(self.stage_to_rank) if owner == rank)

    def chunk_of(self, stage: int) -> int:
        """Which chunk of its rank a stage is."""
        return self.stages_of(self.stage_to_rank[stage]).index(stage)

    def ops(self, rank: int) -> Iterator[Op]:
        """The ops of a rank in order, pairs one after the other."""
        for cell in self.cells[rank]:
            yield from cell

    @property
    def forward_only(self) -> bool:
        """Whether there is no backward work at all: an evaluation schedule."""
        return all(op.kind is Kind.F for rank in range(self.num_ranks) for op in self.ops(rank))

    def to_json(self) -> dict[str, Any]:
        """As a dict of JSON types, in the format of schedule files (`docs/pipeline.md`)."""
        return {
            "schedule": self.name,
            "ranks": self.num_ranks,
            "microbatches": self.num_microbatches,
            "virtual": self.num_chunks,
            "format": _FORMAT,
            "stage_to_rank": {str(s): rank for s, rank in enumerate(self.stage_to_rank)},
            "ops": {
                str(rank): [format_cell(cell) for cell in order]
                for rank, order in enumerate(self.cells)
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        """Inverse of `to_json`; other keys (`source`, ...) are free text and not read.

        Raises:
            ScheduleError: a key is missing, ranks or stages are not numbered 0, 1, ..., or a cell
                is not of the written form.
        """
        missing = [key for key in _FILE_KEYS if key not in data]
        if missing:
            raise ScheduleError(
                f"schedule without {', '.join(missing)}; a schedule file has "
                f"{', '.join(_FILE_KEYS)}"
            )
        num_ranks, num_microbatches = data["ranks"], data["microbatches"]
        for key in ("ranks", "microbatches"):
            if type(data[key]) is not int or data[key] < 1:
                raise ScheduleError(f"{key}: {data[key]!r} is not a whole number above 0")
        if type(data["schedule"]) is not str:
            raise ScheduleError(f"schedule: {data['schedule']!r} is not a name")
        orders = _numbered(data["ops"], "ops")
        if len(orders) != num_ranks:
            raise ScheduleError(f"ranks: {num_ranks}, but ops has orders of {len(orders)}")
        owners = _numbered(data["stage_to_rank"], "stage_to_rank")
        for stage, owner in enumerate(owners):
            if type(owner) is not int or not 0 <= owner < num_ranks:
                raise ScheduleError(
                    f"stage_to_rank of stage {stage}: {owner!r} is none of ranks 0 to "
                    f"{num_ranks - 1}"
                )
        cells = []
        for rank, order in enumerate(orders):
            if not isinstance(order, list):
                raise ScheduleError(f"ops of rank {rank}: {order!r} is not a list of cells")
            try:
                cells.append(tuple(parse_cell(str(text)) for text in order))
            except ScheduleError as error:
                raise ScheduleError(f"ops of rank {rank}: {error}") from error
        if num_microbatches > sum(map(len, cells)):
            raise ScheduleError(
                f"microbatches: {num_microbatches}, but ops has only {sum(map(len, cells))} cells"
            )
        return cls(data["schedule"], num_ranks, num_microbatches, owners, tuple(cells))

    def save(self, path: str | Path) -> None:
        """Write a schedule file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a schedule file. It is not validated here: see `validate.validate`.

        Raises:
            ScheduleError: not JSON, or not a schedule file.
            OSError: the file cannot be read.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(data, Mapping):
                raise ScheduleError(
                    f"a schedule file is one JSON object, not {type(data).__name__}"
                )
            return cls.from_json(data)
        except json.JSONDecodeError as error:
            raise ScheduleError(f"{path}: is not JSON: {error}") from error
        except ValueError as error:
            raise ScheduleError(f"{path}: {error}") from error


_FILE_KEYS = ("schedule", "ranks", "microbatches", "stage_to_rank", "ops")
_FORMAT = (
    "op = <kind><stage>.<microbatch>; stage is the GLOBAL virtual stage (0..P*V-1). F forward, B "
    "input-grad only, W weight-grad only, BW full backward (B then W), 'X|Y' = one overlapped "
    "forward+backward cell."
)


def _numbered(table: Any, key: str) -> tuple[Any, ...]:
    """The values of {"0": ..., "1": ...} in order."""
    if not isinstance(table, Mapping):
        raise ScheduleError(f"{key}: must be an object with keys 0, 1, ...")
    numbers = [str(i) for i in range(len(table))]
    if sorted(table) != sorted(numbers):
        raise ScheduleError(
            f"{key}: has keys {', '.join(table)}; expected 0 to {len(numbers) - 1}, each once"
        )
    return tuple(table[number] for number in numbers)
