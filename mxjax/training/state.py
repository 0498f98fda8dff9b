"""What a training step carries over, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from mxjax.models.parts import Params
from mxjax.training.gradients import Objective


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that the next step depends on, apart from its batch."""

    step: jax.Array
    """int32: steps done."""
    params: Params
    """Master weights."""
    opt_state: Any
    expert_bias: jax.Array | None
    """[MoE layers, experts] fp32: balancing bias of the routers; None without experts."""
    halted: jax.Array
    """bool: a step could not be applied; every later step leaves the state alone until the loop
    has dealt with it. Lets the loop send off a step before it has seen the last one's result."""


def initial_state(
    objective: Objective, optimizer: optax.GradientTransformation, param_dtype: str, key: jax.Array
) -> TrainState:
    """A fresh state; trace it under `jit` with `state_shardings` to create it placed."""
    dtype = jnp.dtype(param_dtype)
    params = jax.tree.map(lambda p: p.astype(dtype), objective.model.init(key))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        expert_bias=objective.model.initial_expert_bias(),
        halted=jnp.zeros((), bool),
    )


def state_shardings(objective: Objective, abstract: TrainState) -> TrainState:
    """Sharding of each leaf of a state; `abstract` is its `eval_shape`."""
    mesh = objective.mesh
    replicated = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), objective.param_specs)
    known = {
        path: (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(abstract.params),
            jax.tree.leaves(params),
            strict=True,
        )
    }

    def like_parameter(path, leaf):
        # optax keeps moments in trees like the parameters' tree: their paths end like a
        # parameter's. Adafactor's factors have smaller shapes than the parameter, and are small.
        ends = (path[start:] for start in range(len(path)))
        shape, sharding = next((known[end] for end in ends if end in known), (None, replicated))
        if leaf.shape != shape:
            return replicated
        offload = objective.config.optimizer.offload
        return sharding.with_memory_kind("pinned_host") if offload else sharding

    opt_state = jax.tree_util.tree_map_with_path(like_parameter, abstract.opt_state)
    expert_bias = None if abstract.expert_bias is None else replicated
    return TrainState(replicated, params, opt_state, expert_bias, replicated)
