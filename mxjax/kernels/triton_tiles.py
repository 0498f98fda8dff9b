"""Which part of an array of rows a Triton program computes."""

from __future__ import annotations

import triton
import triton.language as tl


def grid(rows: int, F: int, block: int) -> tuple[int]:
    """Programs for so many rows, or groups of rows, of F columns, a block of columns each."""
    return (rows * triton.cdiv(F, block),)


@triton.jit
def place(F: tl.constexpr, BLOCK: tl.constexpr):
    """(row, or group of rows, as int64; columns) of this program, of rows of F columns.

    Programs that follow each other go along a row: what runs at the same time lies together in
    memory. Of SwiGLU that is 4 % faster than neighbours in different rows.
    """
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    return (program // blocks).to(tl.int64), program % blocks * BLOCK + tl.arange(0, BLOCK)
