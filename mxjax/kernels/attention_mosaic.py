"""Attention within documents that share a sequence, on Hopper GPUs: what its kernels share.

Of each block of queries only the blocks of keys that its documents reach are visited
(`document_blocks.py`), and a mask is computed only where documents end and on the diagonal. The
forward kernel is in `attention_mosaic_forward.py`, those of the gradient in
`attention_mosaic_gradient.py`.

A thread block has three warpgroups: one copies into a ring of stages in shared memory, two compute,
each one half of a tile. Both work through the same columns of scores, some in a step.

Shapes: B batch, S queries, T keys, N query heads, G key/value heads (N a multiple of G), D width of
query and key heads, E of value heads; in a kernel R rows of scores of a warpgroup, C columns of a
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mxjax.kernels.implementation import is_interpreted, mosaic_kernel, mosaic_obstacle
from mxjax.kernels.mosaic_ring import CONSUMER_REGISTERS, NUM_CONSUMERS, PRODUCER_REGISTERS, THREAD

R = 64
"""The height of a product of wgmma."""
TILE = NUM_CONSUMERS * R
LOG2_E = math.log2(math.e)
MASKED = -1e30
"""Log-sum-exp of a query that sees nothing. Not -inf: the difference of two of these is a
number."""

FULL = plgpu.Layout.WGMMA
ROW, COLUMN = FULL.reduce(1), FULL.reduce(0)
"""Layouts of scores, of a figure for each row of them and of one for each column."""


@dataclass(frozen=True)
class AttentionBlocks:
    """Sizes of the kernels: columns of a step, and steps in shared memory at a time."""

    keys: int = 128
    stages: int = 2
    d_q_keys: int = 64
    """In the gradient of queries."""
    d_q_stages: int = 3
    d_k_queries: int = 64
    """In the gradient of keys and values."""
    d_k_stages: int = 3

    @classmethod
    def of(cls, width: int) -> Self:
        """Those that were fastest on an H200 with queries and keys of 128 and, else, of 192; with
        narrower ones as with 128."""
        return cls() if width <= 128 else cls(keys=64, stages=3)


@dataclass(frozen=True)
class DocumentCall:
    """What the kernels of one attention have in common."""

    scale: float
    """Multiplies the scores."""
    causal: bool
    """A query sees only keys with an index up to its own."""
    blocks: AttentionBlocks

    @classmethod
    def of(cls, q_BSND: jax.Array, scale: float, causal: bool) -> Self:
        """With the sizes that suit these queries."""
        return cls(scale, causal, AttentionBlocks.of(q_BSND.shape[-1]))

    @property
    def factor(self) -> float:
        """Scores times it are exponents of 2."""
        return self.scale * LOG2_E


@dataclass(frozen=True)
class Sizes:
    """Of the arrays of a call; the legend is above."""

    B: int
    S: int
    T: int
    N: int
    G: int
    D: int
    E: int

    @classmethod
    def of(cls, q_BSND: jax.Array, k_BTGD: jax.Array, v_BTGE: jax.Array) -> Self:
        (B, S, N, D), (_, T, G, E) = q_BSND.shape, v_BTGE.shape
        return cls(B, S, T, N, G, D, E)


def mosaic_attention_obstacle(
    q_BSND: jax.Array, k_BTGD: jax.Array, v_BTGE: jax.Array, *, dropout: bool, scale: float
) -> str | None:
    """Why the kernels cannot compute this attention; None: they can."""
    s = Sizes.of(q_BSND, k_BTGD, v_BTGE)
    for dtype in (x.dtype for x in (q_BSND, k_BTGD, v_BTGE)):
        if dtype != jnp.bfloat16:
            return f"it computes in bfloat16, not {dtype}"
    if not isinstance(scale, Real) or scale <= 0:
        return f"it takes a positive number as scale, not {scale}"
    for length in (s.S, s.T):
        if length % TILE:
            return f"a sequence, or a block of it, of {length} tokens is no multiple of {TILE}"
    if s.D % 64 or s.E % 64 or s.D > 192 or s.E > 128:
        return (
            f"heads of width {s.D} and {s.E}: it takes multiples of 64, for queries and keys up to "
            "192 and for values up to 128"
        )
    return "it applies no attention dropout" if dropout else mosaic_obstacle()


def launch(body: Callable[..., None], outs: Any, num_blocks: int, scratch: dict, *operands):
    """`body(*operands, *outputs, **scratch)` in each thread block; axis `block` has its number."""
    kernel = mosaic_kernel(
        body,
        out_type=outs,
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name=THREAD,
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(*operands)


def ring_barriers(stages: int, copies: dict[str, int]) -> dict[str, Any]:
    """`NAME_full` and `NAME_empty` of the parts of a ring, each filled by so many copies."""
    return {
        key: plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
        for name, count in copies.items()
        for key, arrivals in ((f"{name}_full", count), (f"{name}_empty", NUM_CONSUMERS))
    }


# Inside of a kernel


def in_warpgroups(
    copy: Callable[[], None], compute: Callable[[], None], empty: tuple[Any, ...]
) -> None:
    """Run each in its warpgroups. `empty` are the barriers on which the latter hand back what they
    have read of the ring; they do so once for each stage in advance."""
    group = lax.axis_index(THREAD)
    stages = [barrier.at[i] for barrier in empty for i in range(barrier.shape[0])]

    @pl.when(group == NUM_CONSUMERS)
    def _copying():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        copy()
        for stage in stages:
            plgpu.barrier_wait(stage)

    @pl.when(group < NUM_CONSUMERS)
    def _computing():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        for stage in stages:
            plgpu.barrier_arrive(stage)
        compute()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def divided(index: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder."""
    return lax.div(index, jnp.int32(by)), lax.rem(index, jnp.int32(by))


def stage_of(step: jax.Array, ring) -> jax.Array:
    """Where in a ring of buffers the step is."""
    return lax.rem(step, jnp.int32(ring.shape[0]))


def fill(index, full, *copies: tuple[Any, Any]) -> None:
    """Copy each (source, buffers) into the buffer `index`, which the barrier `full` will tell."""
    for source, buffers in copies:
        plgpu.copy_gmem_to_smem(source, buffers.at[index], full.at[index])


def refill(index, empty, full, *copies: tuple[Any, Any]) -> None:
    """`fill`, once the buffer has been handed back. Loads of what is in it and copies into it are
    of different proxies of memory, which no barrier alone orders."""
    plgpu.barrier_wait(empty.at[index])
    plgpu.commit_smem()
    fill(index, full, *copies)


def product(left, right, meanwhile: Callable[[], None] = lambda: None) -> jax.Array:
    """Of two matrices in shared memory; `meanwhile` runs once it is under way."""

    def multiply(acc):
        plgpu.wgmma(acc, left, right)
        meanwhile()
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


def plus_product(total: jax.Array, left: jax.Array, right) -> jax.Array:
    """`total` + `left` `right`, of which the latter is in shared memory."""
    if is_interpreted():  # JAX's interpreter multiplies what is in shared memory only
        return total + jnp.dot(left, right[...], preferred_element_type=jnp.float32)
    multiply = pl.run_state(lambda acc: plgpu.wgmma(acc, left, right))
    return multiply(plgpu.ACC.init(total))


def filled(shape: tuple[int, ...], value: float, layout=FULL) -> jax.Array:
    """fp32 registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def rows(x_R: jax.Array, num_columns: int) -> jax.Array:
    """A figure for each row, beside all columns."""
    return lax.broadcast_in_dim(x_R, (*x_R.shape, num_columns), [0])


def columns(x_C: jax.Array) -> jax.Array:
    """A figure for each column, below all rows."""
    return lax.broadcast_in_dim(x_C, (R, *x_C.shape), [1])


def seen(
    row_ids_R: jax.Array,
    column_ids_C: jax.Array,
    first_row: jax.Array,
    first_column: jax.Array,
    rows_from: int | None,
) -> jax.Array:
    """Which pairs see each other, bool [R, C]: those of one document and, with `rows_from` 1, whose
    row comes no earlier than the column; with -1 no later; with None in any order."""
    ids = rows(row_ids_R, column_ids_C.shape[0])
    same = ids == columns(column_ids_C)
    if rows_from is None:
        return same
    row, column = (plgpu.broadcasted_iota(jnp.int32, ids.shape, d, layout=FULL) for d in (0, 1))
    ahead = (row + first_row) - (column + first_column)
    return same & (ahead * rows_from >= 0)


class Run(NamedTuple):
    """The blocks that a tile sees; see `document_blocks.py`."""

    begin: jax.Array
    plain_begin: jax.Array
    plain_end: jax.Array
    end: jax.Array


def run_of(runs_gmem, batch, tile) -> Run:
    """What `document_blocks.py` says of a tile."""
    # + 0: JAX traces kernels without the types of `check_vma`, but what is read from an operand has
    # one, and as the start of a loop would not fit what comes after it.
    return Run(*(runs_gmem[batch, tile, i] + 0 for i in range(4)))


def over_run(run: Run, visit: Callable[..., Any], carry: Any) -> Any:
    """`visit(masked, block, carry)` for the blocks of a run of `document_blocks.py`, in order."""
    for masked, start, stop in (
        (True, run.begin, run.plain_begin),
        (False, run.plain_begin, run.plain_end),
        (True, run.plain_end, run.end),
    ):
        carry = lax.fori_loop(start, stop, lambda block, c, m=masked: visit(m, block, c), carry)
    return carry
