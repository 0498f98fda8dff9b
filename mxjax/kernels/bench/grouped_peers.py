"""The grouped matrix products of torch, `torch._grouped_mm`, on the same groups without padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

NAMES = FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = (
    "grouped_matmul",
    "grouped_matmul_input_gradient",
    "grouped_matmul_weight_gradient",
)


def grouped_mm(
    name: str, K: int, N: int, *counts: int
) -> tuple[Callable[..., Any], list[tuple[int, ...]]] | None:
    """The function that does what our op `name` does, and the shapes of its two operands; None:
    this torch has none.

    Args:
      counts: rows of each group.
    """
    import torch

    if not hasattr(torch, "_grouped_mm") or not torch.cuda.is_available():
        return None
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device="cuda")
    rows, groups = sum(counts), len(counts)
    shapes = {
        FORWARD: [(rows, K), (groups, K, N)],
        INPUT_GRADIENT: [(rows, N), (groups, K, N)],
        WEIGHT_GRADIENT: [(rows, K), (rows, N)],
    }[name]

    def run(first, second):
        if name == INPUT_GRADIENT:
            second = second.transpose(-2, -1)
        if name == WEIGHT_GRADIENT:
            first = first.t()
        return torch._grouped_mm(first, second, offs=ends)

    return run, shapes
