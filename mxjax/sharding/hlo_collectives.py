"""Collectives of a compiled program, read from its HLO text (`compiled.as_text()`).

What was written as one collective may be several after compilation, or one for many: the compiler
merges, splits, moves and removes them. Only the compiled program says what really crosses the
network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

Groups = tuple[tuple[int, ...], ...]
"""Device numbers (places in `mesh.devices.flat`) of each group that communicates."""


@dataclass(frozen=True)
class Collective:
    """One collective operation of the program of one device."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    """Of its operands on one device."""
    operand_bytes: int
    """All operands together, on one device."""
    groups: Groups
    """For a collective-permute: its (source, target) pairs."""
    times: int
    """How often one run of the program executes it, as far as `times_known`."""
    times_known: bool
    """False in a loop of unknown length, counted as one round, and in a branch that may not be
    taken, counted as taken."""
    in_loop: bool

    @property
    def group_size(self) -> int:
        """Devices that communicate with each other; 2 for the pairs of a permute."""
        return len(self.groups[0])

    @property
    def payload_bytes(self) -> int:
        """The whole value on one device: result of an all-gather, operand of all others."""
        return self.operand_bytes * (self.group_size if self.kind == "all-gather" else 1)

    @property
    def sent_bytes(self) -> int:
        """What one device must send at least, as in a ring; both phases of an all-reduce."""
        if self.kind == "collective-permute":
            return self.operand_bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.payload_bytes * (self.group_size - 1) // self.group_size

    def axes(self, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
        """Mesh axes along which it communicates, outermost first.

        `mesh_shape`: size of each axis, outermost first (`Mesh.shape`).
        """
        names, sizes = tuple(mesh_shape), tuple(mesh_shape.values())
        groups = np.asarray(self.groups)
        places = np.stack(np.unravel_index(groups, sizes))  # [axis, group, member]
        moves = np.any(places != places[:, :, :1], axis=(1, 2))
        return tuple(name for name, moved in zip(names, moves, strict=True) if moved)


def collectives(hlo: str) -> list[Collective]:
    """Every collective that the program executes, in the order of its text.

    Those between a device and itself are left out: nothing crosses the network.

    Raises:
      ValueError: a form of device groups that is not known here.
    """
    computations, entry, num_devices = _parse(hlo)
    found = _walk(computations, entry, num_devices, times=1, known=True, in_loop=False)
    return [collective for collective in found if _crosses(collective)]


def _crosses(collective: Collective) -> bool:
    return any(len(set(group)) > 1 for group in collective.groups)


@dataclass
class _Instruction:
    type: str
    opcode: str
    operands: list[str]
    attributes: str


@dataclass
class _Computation:
    types: dict[str, str] = field(default_factory=dict)
    """Type of every value by name."""
    relevant: list[_Instruction] = field(default_factory=list)
    """Collectives, and what calls other computations."""


_OPCODE = re.compile(r" ([a-z][\w-]*)\(")
_CALLED = re.compile(
    r"(body|condition|to_apply|calls|true_computation|false_computation)=(%[^\s,]+)"
)
_CALLED_LISTS = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


def _parse(hlo: str) -> tuple[dict[str, _Computation], str, int]:
    """Computations by name, the name of the first one to run, and the number of devices."""
    computations: dict[str, _Computation] = {}
    entry, current = "", _Computation()
    for line in hlo.splitlines():
        if line.startswith(("%", "ENTRY")):
            name = line.removeprefix("ENTRY ").split(" ", 1)[0]
            current = computations[name] = _Computation()
            entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("  ") and " = " in line:
            name, rest = line.strip().removeprefix("ROOT ").split(" = ", 1)
            instruction = _instruction(rest)
            current.types[name] = instruction.type
            if _kind(instruction) or "=%" in rest or "={%" in rest:
                current.relevant.append(instruction)
    header = hlo.partition("\n")[0]
    sizes = [re.search(rf"{key}=(\d+)", header) for key in ("replica_count", "num_partitions")]
    return computations, entry, math.prod(int(size[1]) for size in sizes if size)


def _instruction(text: str) -> _Instruction:
    """`type opcode(operands), attributes`; the type may be a tuple, with spaces."""
    type_end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    match = _OPCODE.match(text, type_end)
    if match is None:
        raise ValueError(f"not an HLO instruction: {text[:200]}")
    operands_end = _closing(text, match.end() - 1)
    operands = re.findall(r"%[^\s,()]+", text[match.end() : operands_end])
    return _Instruction(text[:type_end], match[1], operands, text[operands_end:])


def _closing(text: str, start: int) -> int:
    """Place behind the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"parenthesis not closed: {text[:200]}")


def _kind(instruction: _Instruction) -> str | None:
    """An asynchronous collective counts where it starts."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _walk(computations, name, num_devices, *, times, known, in_loop) -> Iterator[Collective]:
    computation = computations[name]
    for instruction in computation.relevant:
        if kind := _kind(instruction):
            arrays = [
                array
                for operand in instruction.operands
                for array in _ARRAY.findall(computation.types[operand])
            ]
            yield Collective(
                kind=kind,
                shapes=tuple(_dims(dims) for _, dims in arrays),
                operand_bytes=sum(_bits(t) * math.prod(_dims(dims)) for t, dims in arrays) // 8,
                groups=_groups(instruction.attributes, num_devices),
                times=times,
                times_known=known,
                in_loop=in_loop,
            )
            continue
        inside = {"times": times, "known": known, "in_loop": in_loop}
        if instruction.opcode == "while":
            trips = _TRIP_COUNT.search(instruction.attributes)
            rounds = int(trips[1]) if trips else 1
            inside = {"times": times * rounds, "known": known and bool(trips), "in_loop": True}
        elif instruction.opcode == "conditional":
            inside["known"] = False
        for called in _called(instruction.attributes):
            yield from _walk(computations, called, num_devices, **inside)


def _called(attributes: str) -> list[str]:
    names = [name.rstrip("}") for _, name in _CALLED.findall(attributes)]
    lists = ",".join(_CALLED_LISTS.findall(attributes))
    return names + re.findall(r"%[^\s,}]+", lists)


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)


def _bits(dtype: str) -> int:
    """Of one element: 16 for bf16, 8 for f8e4m3fn; a truth value takes a byte."""
    size = re.search(r"\d+", dtype)
    return int(size[0]) if size else 8


_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[\d,]*\},?)*)\}")
_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=@?mesh\[([^\]]*)\] ?\{([^}]*)\}")


def _groups(attributes: str, num_devices: int) -> Groups:
    """In any of the forms in which HLO writes them."""
    if match := _PAIRS.search(attributes):
        return tuple(_dims(pair) for pair in re.findall(r"\{([\d,]+)\}", match[1]))
    if match := _LISTS.search(attributes):
        lists = tuple(_dims(group) for group in re.findall(r"\{([\d,]+)\}", match[1]))
        return lists or (tuple(range(num_devices)),)
    if match := _IOTA.search(attributes):
        dims = _dims(match[2])
        ids = np.arange(math.prod(dims)).reshape(dims)
        if match[3]:
            ids = ids.transpose(_dims(match[3]))
        return _as_groups(ids.reshape(_dims(match[1])))
    if match := _MESH.search(attributes):
        return _mesh_groups(*match.groups())
    raise ValueError(f"device groups in a form that is not known: {attributes[:200]}")


def _mesh_groups(mesh: str, communicating: str) -> Groups:
    """`'dp'=2,'tp'=4` and `'tp'`: groups of 4. `'tp':(1)2` is the outer half of axis tp, (2)2 its
    inner half: an axis is cut into (outer, part, inner)."""
    axes = re.findall(r"'([^']+)'=(\d+)", mesh)
    parts = {
        name: (int(outer or 1), int(size or 0))
        for name, outer, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", communicating)
    }
    sizes, inside = [], []
    for name, text in axes:
        whole = int(text)
        outer, part = parts.get(name, (whole, 1))
        part = part or whole
        inside.append(len(sizes) + 1)
        sizes += [outer, part, whole // (outer * part)]
    outside = [dim for dim in range(len(sizes)) if dim not in inside]
    ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(*outside, *inside)
    return _as_groups(ids.reshape(math.prod(sizes[dim] for dim in outside), -1))


def _as_groups(ids: np.ndarray) -> Groups:
    return tuple(tuple(group) for group in ids.tolist())
