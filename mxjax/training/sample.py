"""A short greedy continuation, to see with one's own eyes that a model has learnt something."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from mxjax.sharding.mesh import BATCH_AXES
from mxjax.training.gradients import REPLICATED, Objective
from mxjax.training.predict import predictor
from mxjax.training.state import TrainState


def greedy_sample(
    objective: Objective, state: TrainState, prompt: list[int], num_tokens: int, seq_length: int
) -> list[int]:
    """`num_tokens` most likely tokens after `prompt`.

    Runs the whole sequence anew for each token: no cache, meant for a few hundred tokens.
    """
    mesh = objective.mesh
    rows = int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))
    predict = predictor(objective, "greedy", seq_length)

    @partial(jax.jit, out_shardings=NamedSharding(mesh, REPLICATED))
    def extend(params, expert_bias, tokens_S, length):
        tokens_BS = jnp.broadcast_to(tokens_S, (rows, seq_length))
        best = predict(params, expert_bias, tokens_BS)[0, length - 1]
        return tokens_S.at[length].set(best)

    tokens_S = np.zeros(seq_length, np.int32)
    tokens_S[: len(prompt)] = prompt
    for length in range(len(prompt), len(prompt) + num_tokens):
        tokens_S = extend(state.params, state.expert_bias, tokens_S, length)
        # With more than 32 programs on their way to a device, JAX on CPUs makes threads wait that
        # collectives need.
        tokens_S.block_until_ready()
    return np.asarray(tokens_S)[len(prompt) : len(prompt) + num_tokens].tolist()
