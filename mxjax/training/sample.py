"""A short greedy continuation, to see with one's own eyes that a model has learnt something."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mxjax.sharding.context_parallel import sequence_order
from mxjax.sharding.mesh import BATCH_AXES, SEQUENCE_AXES
from mxjax.training.gradients import REPLICATED, Objective
from mxjax.training.state import TrainState


def greedy_sample(
    objective: Objective, state: TrainState, prompt: list[int], num_tokens: int, seq_length: int
) -> list[int]:
    """`num_tokens` most likely tokens after `prompt`.

    Runs the whole sequence anew for each token: no cache, meant for a few hundred tokens.
    """
    mesh = objective.mesh
    rows = int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))
    spec = PartitionSpec(BATCH_AXES, SEQUENCE_AXES)
    order_S = sequence_order(seq_length, mesh.shape["cp"])
    place_S = jnp.asarray(np.argsort(order_S))

    def next_tokens(params, expert_bias, tokens_BS, positions_BS):
        batch = {
            "tokens": tokens_BS,
            "positions": positions_BS,
            "segment_ids": jnp.ones_like(tokens_BS),
        }
        return objective.greedy(params, expert_bias, batch)

    predict = jax.jit(
        jax.shard_map(
            next_tokens,
            mesh=mesh,
            in_specs=(objective.param_specs, REPLICATED, spec, spec),
            out_specs=spec,
            check_vma=False,
        )
    )

    @partial(jax.jit, out_shardings=NamedSharding(mesh, REPLICATED))
    def extend(params, expert_bias, tokens_S, length):
        tokens_BS = jnp.broadcast_to(tokens_S[order_S], (rows, seq_length))
        positions_BS = jnp.broadcast_to(order_S, (rows, seq_length))
        next_BS = predict(params, expert_bias, tokens_BS, positions_BS)
        best = next_BS[0, place_S[length - 1]]
        return tokens_S.at[length].set(best)

    tokens_S = np.zeros(seq_length, np.int32)
    tokens_S[: len(prompt)] = prompt
    for length in range(len(prompt), len(prompt) + num_tokens):
        tokens_S = extend(state.params, state.expert_bias, tokens_S, length)
    return np.asarray(tokens_S)[len(prompt) : len(prompt) + num_tokens].tolist()
