"""What the model says of whole sequences, outside of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from mxjax.sharding.context_parallel import sequence_order
from mxjax.sharding.mesh import BATCH_AXES, SEQUENCE_AXES
from mxjax.training.gradients import REPLICATED, Objective


def predictor(objective: Objective, what: Literal["greedy", "logits"], seq_length: int) -> Callable:
    """(params, expert_bias, tokens [B, S]) -> `Objective.greedy` [B, S] or `.logits` [B, S, V].

    To be called under `jit` with global arrays. Sequences are one document each, in their natural
    order; that in which `cp` wants them is made and undone here.
    """
    order_S = sequence_order(seq_length, objective.mesh.shape["cp"])
    place_S = np.argsort(order_S)
    spec = PartitionSpec(BATCH_AXES, SEQUENCE_AXES)

    def of_rank(params, expert_bias, tokens_BS, positions_BS):
        batch = {
            "tokens": tokens_BS,
            "positions": positions_BS,
            "segment_ids": jnp.ones_like(tokens_BS),
        }
        return getattr(objective, what)(params, expert_bias, batch)

    shards = jax.shard_map(
        of_rank,
        mesh=objective.mesh,
        in_specs=(objective.param_specs, REPLICATED, spec, spec),
        out_specs=PartitionSpec(*spec, "tp") if what == "logits" else spec,
        check_vma=False,
    )

    def predict(params, expert_bias, tokens_BS):
        positions_BS = jnp.broadcast_to(jnp.asarray(order_S), tokens_BS.shape)
        return shards(params, expert_bias, tokens_BS[:, order_S], positions_BS)[:, place_S]

    return predict
