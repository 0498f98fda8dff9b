"""Causal attention whose keys and values are spread over `cp`, one block of them at a time.

Rank r holds chunks r and 2 cp - 1 - r of the sequence (`context_parallel.py`), "low" and "high".
It attends to its own block first, causally. To the block of another rank r' its queries stand thus:

    r' < r   low and high queries see the low chunk, none the high one
    r' > r   the high queries see both chunks, the low ones nothing

Either is two pairs of chunks, and one of them, high queries with the low chunk, is always there. So
every rank computes two full pairs per step, picked by selects: equal work, no branch on the rank,
and no score is computed to be masked (but at document boundaries and in the rank's own block).

A transport brings the blocks, and their gradients home (Ring Attention, Liu et al. 2023; all-gather
as in Llama 3, 2024). The backward pass has the blocks brought anew: only the rank's own part of
anything is kept between the passes.

Shapes: B batch, S this rank's part of the sequence, N query heads, G key/value heads, D width of
query and key heads, E width of value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.kernels.attention_block import (
    MASKED,
    BlockOptions,
    attention_block,
    attention_block_gradient,
    named_results,
)

type Block = tuple[jax.Array, jax.Array, jax.Array | None]
"""Keys, values and segment ids of one rank."""


@dataclass(frozen=True)
class Ring:
    """Blocks go from rank to rank: each holds its own and one or two others at a time.

    `ppermute` passes them to the next rank. `alltoall` swaps them within pairs of ranks, for which
    their number must be even: r with 1 - r and r with -1 - r in turn, which in `size` steps shows
    every rank every block. It is for programs whose ranks may take different branches, where a
    `ppermute` can meet that of another branch.
    """

    size: int
    rotation: Literal["ppermute", "alltoall"] = "ppermute"

    @property
    def period(self) -> int:
        """Steps after which the pattern of exchange repeats; step % period is a `turn`."""
        return 1 if self.rotation == "ppermute" else 2

    def source(self, step: int | jax.Array) -> jax.Array:
        """Rank whose block is here at `step` (0: its own)."""
        rank = lax.axis_index("cp")
        if self.rotation == "ppermute":
            return (rank - step) % self.size
        return jnp.where(step % 2 == 0, rank + step, step - rank) % self.size

    def start(self, own: Any) -> Any:
        """What is here at step 0."""
        return own

    def advance(self, held: Any, turn: int) -> Any:
        """What is here at a step of this turn, made of what was here a step before. `size` steps
        lead home."""
        if self.rotation == "ppermute":
            pairs = [(rank, (rank + 1) % self.size) for rank in range(self.size)]
            return jax.tree.map(lambda x: lax.ppermute(x, "cp", pairs), held)
        return jax.tree.map(partial(_swap, 1 if turn else -1, self.size), held)

    def block(self, held: Any, step: int | jax.Array) -> Any:
        """The block of rank `source(step)`."""
        return held

    def start_sum(self, own: Any) -> Any:
        """Gradients of blocks, of which there are those of this rank's own."""
        return own

    def add(self, total: Any, gradient: Any, step: int | jax.Array, turn: int) -> Any:
        """With those of rank `source(step)`: they travel along with the block."""
        return jax.tree.map(jnp.add, self.advance(total, turn), gradient)

    def home(self, total: Any) -> Any:
        """Sum over all ranks of the gradients of this rank's block."""
        return self.advance(total, self.size % self.period)


@dataclass(frozen=True)
class AllGather:
    """All blocks at once: one collective there and one back, and memory for all keys and values."""

    size: int
    period: int = 1

    def source(self, step: int | jax.Array) -> jax.Array:
        """Rank whose block is computed with at `step` (0: its own)."""
        return (lax.axis_index("cp") - step) % self.size

    def start(self, own: Any) -> Any:
        """All blocks, [cp, ...]."""
        return jax.tree.map(lambda x: lax.all_gather(x, "cp"), own)

    def advance(self, held: Any, turn: int) -> Any:
        """They stay where they are."""
        return held

    def block(self, held: Any, step: int | jax.Array) -> Any:
        """The block of rank `source(step)`."""
        return jax.tree.map(lambda x: x[self.source(step)], held)

    def start_sum(self, own: Any) -> Any:
        """Gradients of all blocks, [cp, ...]."""
        zeros = jax.tree.map(lambda x: jnp.zeros((self.size, *x.shape), x.dtype), own)
        return self.add(zeros, own, 0, 0)

    def add(self, total: Any, gradient: Any, step: int | jax.Array, turn: int) -> Any:
        """With those of rank `source(step)`."""
        return jax.tree.map(lambda t, g: t.at[self.source(step)].set(g), total, gradient)

    def home(self, total: Any) -> Any:
        """Sum over all ranks of the gradients of this rank's block."""
        return jax.tree.map(lambda x: lax.psum_scatter(x, "cp"), total)


def _swap(of_pair: int, size: int, x: jax.Array) -> jax.Array:
    """`x` of the partner: the numbers of both add up to `of_pair`, modulo `size`."""
    pairs = [[rank, (of_pair - rank) % size] for rank in range(size)]
    pairs = [pair for pair in pairs if pair[0] < pair[1]]
    rank = lax.axis_index("cp")
    # Not of a table: `jax.checkpoint` fails on constants in derivatives (JAX 0.11, 0.12).
    place = jnp.where(rank < (of_pair - rank) % size, 1, 0)  # of the partner in its pair
    return lax.all_to_all(jnp.stack([x, x]), "cp", 0, 0, axis_index_groups=pairs)[place]


def _over_blocks(transport: Ring | AllGather, own: Block, carry: Any, visit: Callable) -> Any:
    """`carry = visit(carry, block, step, turn)` for the blocks of all other ranks.

    While one is worked on, the next one is on its way. A scan: in a straight program a compiler
    may let the ring run ahead of the computation, and hold all blocks at the same time.
    """
    period, last = transport.period, transport.size - 1

    def visit_some(state, first):
        held, carry = state
        for i in range(period):
            ahead = transport.advance(held, (i + 2) % period)
            block = transport.block(held, first + i)
            held, carry = ahead, visit(carry, block, first + i, (i + 1) % period)
        return (held, carry), None

    held = transport.advance(transport.start(own), 1 % period)
    if last > 1:
        (held, carry), _ = lax.scan(visit_some, (held, carry), jnp.arange(1, last, period))
    return visit(carry, transport.block(held, last), last, last % period)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def blockwise_attention(
    q_BSND: jax.Array,
    k_BSGD: jax.Array,
    v_BSGE: jax.Array,
    segment_ids_BS: jax.Array | None,
    key: jax.Array | None,
    options: BlockOptions,
    transport: Ring | AllGather,
) -> jax.Array:
    """Causal attention of this rank's queries to all of the sequence, [B, S, N, E].

    Every query sees itself, so no row is empty. `key`, for dropout, must differ between ranks.
    """
    return _forward(q_BSND, k_BSGD, v_BSGE, segment_ids_BS, key, options, transport)[0]


def _forward(q, k, v, ids, key, options, transport):
    attention = partial(attention_block, options=options)
    own_ids = None if ids is None else (ids, ids)
    out, lse = attention(q, k, v, own_ids, _step_key(key, 0), causal=True)

    def visit(rows, block, step, _):
        low, high = rows
        earlier = _is_earlier(transport, step)
        arguments = (*_pairs(q, ids, block, earlier), _step_key(key, step))
        outs, lses = (jnp.split(x, 2) for x in attention(*arguments, causal=False))
        high = _merge(high, (outs[0], lses[0]))
        low = _merge(low, (outs[1], jnp.where(earlier, lses[1], MASKED)))
        return low, _merge(high, (outs[1], jnp.where(earlier, MASKED, lses[1])))

    rows = tuple(zip(_halves(out), _halves(lse, 2), strict=True))
    low, high = _over_blocks(transport, (k, v, ids), rows, visit)
    out = jnp.concatenate([low[0], high[0]], axis=1).astype(q.dtype)
    out, lse = named_results(out, jnp.concatenate([low[1], high[1]], axis=2))
    return out, (q, k, v, ids, key, out, lse)


def _backward(options, transport, residuals, d_out):
    q, k, v, ids, key, out, lse = residuals
    gradient = partial(attention_block_gradient, options=options)
    own_ids = None if ids is None else (ids, ids)
    d_q, *d_own = gradient(q, k, v, own_ids, _step_key(key, 0), out, lse, d_out, causal=True)

    def visit(carry, block, step, turn):
        d_q, total = carry
        earlier = _is_earlier(transport, step)
        arguments = (*_pairs(q, ids, block, earlier), _step_key(key, step))
        rows = _queries(out, earlier), _queries(lse, earlier, 2), _queries(d_out, earlier)
        d_queries, *d_keys = gradient(*arguments, *rows, causal=False)
        d_block = [_keys_gradient(x, earlier) for x in d_keys]
        d_q += _queries_gradient(d_queries, earlier)
        return d_q, transport.add(total, d_block, step, turn)

    carry = d_q, transport.start_sum(d_own)
    d_q, total = _over_blocks(transport, (k, v, ids), carry, visit)
    d_k, d_v = transport.home(total)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


blockwise_attention.defvjp(_forward, _backward)


def _step_key(key: jax.Array | None, step: int | jax.Array) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, step)


def _is_earlier(transport: Ring | AllGather, step: int | jax.Array) -> jax.Array:
    """Whether the block of this step is of an earlier rank."""
    return transport.source(step) < lax.axis_index("cp")


def _merge(rows, more):
    """Output [B, S, N, E] and log-sum-exp [B, N, S] of rows over the keys of both."""
    (out, lse), (more_out, more_lse) = rows, more
    both_lse = jnp.logaddexp(lse, more_lse)

    def share(part_lse):
        return jnp.exp(part_lse - both_lse).transpose(0, 2, 1)[..., None]

    return out * share(lse) + more_out * share(more_lse), both_lse


def _halves(x: jax.Array, dim: int = 1) -> list[jax.Array]:
    return jnp.split(x, 2, axis=dim)


def _pairs(q, ids, block: Block, earlier):
    """Queries, keys, values and segment ids of the two pairs of chunks, along the batch."""
    k, v, kv_ids = block
    pair_ids = None if ids is None else (_queries(ids, earlier), _keys(kv_ids, earlier))
    return _queries(q, earlier), _keys(k, earlier), _keys(v, earlier), pair_ids


def _queries(x, earlier, dim: int = 1):
    """High; low or high."""
    low, high = _halves(x, dim)
    return jnp.concatenate([high, jnp.where(earlier, low, high)])


def _queries_gradient(d_pairs, earlier):
    first, second = jnp.split(d_pairs, 2)
    low, high = jnp.where(earlier, second, 0), first + jnp.where(earlier, 0, second)
    return jnp.concatenate([low, high], axis=1)


def _keys(x, earlier):
    """Low; low or high."""
    low, high = _halves(x)
    return jnp.concatenate([low, jnp.where(earlier, low, high)])


def _keys_gradient(d_pairs, earlier):
    first, second = jnp.split(d_pairs, 2)
    low, high = first + jnp.where(earlier, second, 0), jnp.where(earlier, 0, second)
    return jnp.concatenate([low, high], axis=1)
