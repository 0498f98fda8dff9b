"""One optimizer step: gradients, clipping, update, and the decision to keep it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax

from mxjax.config.schema import Config
from mxjax.models.parts import Params
from mxjax.moe.balance import load_factor, updated_bias
from mxjax.training.gradients import Batch, BatchStatistics, Objective
from mxjax.training.optimizer import global_norm, learning_rate, update_moments
from mxjax.training.state import TrainState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepResult:
    """Figures of one step, as device scalars that are equal on all processes."""

    loss: jax.Array
    router_loss: jax.Array
    z_loss: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    num_targets: jax.Array
    expert_load: jax.Array | None
    """Largest over mean tokens per expert, worst layer; None without experts."""
    needed_capacity: jax.Array
    overflow: jax.Array
    """bool: an MoE buffer was too small. The state was left alone."""
    finite: jax.Array
    """bool: loss and gradients were finite. If not, the parameters were left alone."""
    mtp_loss: jax.Array | None = None
    """None without multi-token prediction."""


def build_step(
    config: Config,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    capacity_factor: float,
) -> Callable[[TrainState, Batch, Params], tuple[TrainState, StepResult, Params]]:
    """The step function, to be jitted: (state, batch, copies) -> new state, result, new copies.

    `copies` are `objective.copies(state.params)`. The update writes those of the next step in the
    pass in which it writes the master weights, which nothing has to read to cast them then.

    A step is *rejected* (state unchanged but `halted`) when a buffer overflowed, when the loss or
    gradient is not finite under `nonfinite: stop`, or when the state came in halted. Under
    `nonfinite: skip` only the step count moves on.
    """
    loss_and_gradients = objective.loss_and_gradients()
    update = build_update(config, optimizer, capacity_factor)

    def step(state: TrainState, batch: Batch, copies: Params):
        key = step_key(config.training.seed, state.step)
        weights = with_copies(state.params, copies)
        state, result = update(state, *loss_and_gradients(weights, state.expert_bias, batch, key))
        return state, result, objective.copies(state.params)

    return step


def with_copies(params: Params, copies: Params) -> Params:
    """What the gradients are computed with: `Objective.copies`, where there are some."""
    return jax.tree.map(lambda master, copy: master if copy is None else copy, params, copies)


def build_update(
    config: Config, optimizer: optax.GradientTransformation, capacity_factor: float
) -> Callable[[TrainState, Params, BatchStatistics], tuple[TrainState, StepResult]]:
    """The part of a step that follows the gradients, to be jitted."""
    training, rate = config.training, learning_rate(config.optimizer, config.training.num_steps)
    skip = training.nonfinite == "skip"

    def update(state: TrainState, grads: Params, stats: BatchStatistics):
        grad_norm = global_norm(grads)
        lr = jnp.asarray(rate(state.step), jnp.float32)
        if config.optimizer.offload:  # the program's output shardings send it back
            fetched = jax.device_put(state.opt_state, jax.memory.Space.Device)
            state = replace(state, opt_state=fetched)
        updated = _update(config, optimizer, state, grads, grad_norm, lr, stats.counts_LE)

        finite = jnp.isfinite(stats.loss) & jnp.isfinite(grad_norm)
        # NaN scores send every token to the same experts: no larger buffer would help.
        overflow = finite & (stats.needed_capacity > capacity_factor)
        rejected = state.halted | overflow | ~(finite | skip)
        apply = ~rejected & finite
        params, opt_state, expert_bias = jax.tree.map(
            lambda new, old: jnp.where(apply, new, old),
            updated,
            (state.params, state.opt_state, state.expert_bias),
        )
        next_state = TrainState(
            step=jnp.where(rejected, state.step, state.step + 1),
            params=params,
            opt_state=opt_state,
            expert_bias=expert_bias,
            halted=rejected,
        )
        result = StepResult(
            loss=stats.loss,
            router_loss=stats.router_loss,
            z_loss=stats.z_loss,
            mtp_loss=stats.mtp_loss,
            grad_norm=grad_norm,
            learning_rate=lr,
            num_targets=stats.num_targets,
            expert_load=None if stats.counts_LE is None else load_factor(stats.counts_LE),
            needed_capacity=stats.needed_capacity,
            overflow=overflow,
            finite=finite,
        )
        return next_state, result

    return update


def step_key(seed: int, step: jax.Array) -> jax.Array:
    """Randomness of the step that follows so many."""
    return jax.random.fold_in(jax.random.key(seed), step)


def _update(config: Config, optimizer, state: TrainState, grads, grad_norm, lr, counts_LE):
    """Parameters, optimizer state and expert bias after this step."""
    clip = config.optimizer.clip_grad
    scale = jnp.minimum(1.0, clip / (grad_norm + 1e-6)) if clip else 1.0
    dtype = jnp.promote_types(config.training.param_dtype, jnp.float32)
    grads = jax.tree.map(lambda g: g.astype(dtype) * scale, grads)
    updates, opt_state = update_moments(optimizer, grads, state.opt_state, state.params, state.step)
    params = jax.tree.map(
        lambda p, u: (p.astype(dtype) + lr * u).astype(p.dtype), state.params, updates
    )
    bias = state.expert_bias
    if config.moe.expert_bias_update_rate:
        bias = updated_bias(bias, counts_LE, config.moe.expert_bias_update_rate)
    return params, opt_state, bias
