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


def state_shardings(
    objective: Objective, optimizer: optax.GradientTransformation, abstract: TrainState
) -> TrainState:
    """Sharding of each leaf of a state; `abstract` is its `eval_shape`."""
    mesh = objective.mesh
    replicated = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), objective.param_specs)

    def like_parameter(leaf, parameter, sharding):
        # Moments have their parameter's shape; Adafactor's factors do not and are small.
        return sharding if leaf.shape == parameter.shape else replicated

    opt_state = optax.tree_map_params(
        optimizer,
        like_parameter,
        abstract.opt_state,
        abstract.params,
        params,
        transform_non_params=lambda _: replicated,
    )
    expert_bias = None if abstract.expert_bias is None else replicated
    return TrainState(replicated, params, opt_state, expert_bias, replicated)
