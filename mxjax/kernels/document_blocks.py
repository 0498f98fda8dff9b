"""Which blocks of keys a block of queries sees, when documents share a sequence.

Tokens of one document follow each other, so what a block of queries sees is a run of blocks of
keys. Where all queries and keys are of one document, nothing is to be masked:

    begin            plain_begin          plain_end             end
    | some are masked | all pairs are seen | some are masked    |

The same holds for the blocks of queries that see a block of keys.

Shapes: B batch, Q and K numbers of blocks of queries and of keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def runs_of_keys(
    q_ids: jax.Array, k_ids: jax.Array, num_queries: int, num_keys: int, causal: bool
) -> jax.Array:
    """Begin, plain begin, plain end and end, in blocks of `num_keys` keys, for each block of
    `num_queries` queries: int32 [B, Q, 4].

    Args:
      q_ids, k_ids: document of each query and key, int32 [B, tokens], whole blocks of them.
      causal: a query sees only keys with an index up to its own.
    """
    return _runs(*_relations(q_ids, k_ids, num_queries, num_keys, causal))


def runs_of_queries(
    q_ids: jax.Array, k_ids: jax.Array, num_queries: int, num_keys: int, causal: bool
) -> jax.Array:
    """As `runs_of_keys`, in blocks of queries, for each block of keys: int32 [B, K, 4]."""
    relations = _relations(q_ids, k_ids, num_queries, num_keys, causal)
    return _runs(*(x.swapaxes(1, 2) for x in relations))


def _relations(q_ids, k_ids, num_queries: int, num_keys: int, causal: bool):
    """Whether some and whether all pairs of two blocks see each other, bool [B, Q, K]. "Some" may
    be too many: it goes by the least and the greatest id."""
    q_low, q_high = (x[:, :, None] for x in _ranges(q_ids, num_queries))
    k_low, k_high = (x[:, None] for x in _ranges(k_ids, num_keys))
    every = (q_low == k_high) & (k_low == q_high)
    # Padding, which is 0, comes last: as the least id it would make its block one of all documents.
    q_low, q_high = (x[:, :, None] for x in _ranges(_padding_last(q_ids), num_queries))
    k_low, k_high = (x[:, None] for x in _ranges(_padding_last(k_ids), num_keys))
    some = (q_low <= k_high) & (k_low <= q_high)
    if causal:
        first_query = jnp.arange(some.shape[1])[:, None] * num_queries
        first_key = jnp.arange(some.shape[2]) * num_keys
        some &= first_key < first_query + num_queries
        every &= first_key + num_keys <= first_query + 1
    return some, every


def _padding_last(ids: jax.Array) -> jax.Array:
    return jnp.where(ids == 0, jnp.iinfo(ids.dtype).max, ids)


def _ranges(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Least and greatest id of each block."""
    blocks = ids.reshape(ids.shape[0], -1, size)
    return blocks.min(-1), blocks.max(-1)


def _runs(some: jax.Array, every: jax.Array) -> jax.Array:
    """Of the blocks all of whose pairs see each other the last unbroken stretch is the plain one;
    without any the run is masked from begin to end."""
    index = jnp.arange(some.shape[2])
    begin = jnp.argmax(some, axis=2)
    end = jnp.max(jnp.where(some, index + 1, 0), axis=2)
    plain_end = jnp.max(jnp.where(every, index + 1, 0), axis=2)
    before = ~every & (index < plain_end[..., None])
    plain_begin = jnp.maximum(begin, jnp.max(jnp.where(before, index + 1, 0), axis=2))
    has_plain = plain_end > 0
    plain = (jnp.where(has_plain, x, end) for x in (plain_begin, plain_end))
    return jnp.stack([begin, *plain, end], axis=-1).astype(jnp.int32)
