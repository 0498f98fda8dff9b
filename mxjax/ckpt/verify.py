"""Comparing two checkpoints leaf by leaf."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.leaves import Leaf, Value, leaves_of
from mxjax.ckpt.locate import Kind, locate

_BLOCK = 1 << 22
"""Elements compared at a time: what is converted to float64 for the difference stays small."""


@dataclass(frozen=True)
class LeafComparison:
    """How a leaf differs between two checkpoints.

    Attributes:
      a: what the first has, such as ``(8, 128) bfloat16``; None: nothing of that name.
      b: what the second has.
      bitwise: shape, dtype and all bytes are equal.
      max_abs: largest difference of two elements; infinite where only one is finite or NaN; None
        where shapes differ and for leaves that are not tensors.
    """

    name: str
    a: str | None
    b: str | None
    bitwise: bool
    max_abs: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints compared."""

    kind: Kind
    leaves: tuple[LeafComparison, ...]

    @property
    def differing(self) -> tuple[LeafComparison, ...]:
        """The leaves that are not the same bit for bit."""
        return tuple(leaf for leaf in self.leaves if not leaf.bitwise)


def compare(a: str | Path, b: str | Path) -> Comparison:
    """Compares two checkpoints of the same kind, with one tensor of each in memory at a time.

    Raises:
      CheckpointFormatError: one cannot be read, or they are of different kinds.
    """
    first, second = locate(a), locate(b)
    if first.kind is not second.kind:
        raise CheckpointFormatError(
            f"{a} is of kind '{first.kind}' and {b} of kind '{second.kind}': only checkpoints of"
            " the same kind have the same leaves."
        )
    one, other = leaves_of(first), leaves_of(second)
    names = [*one, *(name for name in other if name not in one)]
    compared = [
        compare_leaf(name, one.get(name), other.get(name))
        for name in tqdm(names, unit="leaf", disable=None)
    ]
    return Comparison(first.kind, tuple(compared))


def compare_leaf(name: str, a: Leaf | None, b: Leaf | None) -> LeafComparison:
    """Compares one leaf; None: the checkpoint has none of that name."""
    if isinstance(a, Value) and isinstance(b, Value):
        first, second = a.read(), b.read()
        # As text too: NaN is not equal to itself.
        same = first == second or repr(first) == repr(second)
        return LeafComparison(name, f"{first!r:.60}", f"{second!r:.60}", same)
    shown = tuple(None if leaf is None else _describe(leaf) for leaf in (a, b))
    if a is None or b is None or isinstance(a, Value) or isinstance(b, Value):
        return LeafComparison(name, *shown, bitwise=False)
    if a.shape != b.shape:
        return LeafComparison(name, *shown, bitwise=False)
    bitwise = a.dtype == b.dtype
    max_abs = 0.0
    for x, y in _blocks(a.numpy(), b.numpy()):
        if x.dtype == y.dtype and x.tobytes() == y.tobytes():
            continue
        bitwise = False
        max_abs = max(max_abs, _max_abs(x, y))
    return LeafComparison(name, *shown, bitwise=bitwise, max_abs=max_abs)


def _describe(leaf: Leaf) -> str:
    if isinstance(leaf, Value):
        return f"{leaf.read()!r:.60}"
    return f"{tuple(leaf.shape)} {np.dtype(leaf.dtype).name}"


def _blocks(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    # Flattening copies an array that is not contiguous.
    x, y = a.reshape(-1), b.reshape(-1)
    for start in range(0, x.size, _BLOCK):
        yield x[start : start + _BLOCK], y[start : start + _BLOCK]


def _max_abs(x: np.ndarray, y: np.ndarray) -> float:
    wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
    # Infinities and NaN are what is looked for here.
    with np.errstate(invalid="ignore", over="ignore"):
        u, v = x.astype(wide), y.astype(wide)
        gap = np.abs(u - v)
    gap[(u == v) | (np.isnan(u) & np.isnan(v))] = 0.0
    largest = float(np.max(gap))
    return math.inf if math.isnan(largest) else largest
