"""Finding where NaN or infinity first appeared."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.models.parts import Params
from mxjax.training.gradients import Batch
from mxjax.training.optimizer import global_norm
from mxjax.training.programs import Programs
from mxjax.training.state import TrainState
from mxjax.training.step import step_key


class NonFiniteError(RuntimeError):
    """A loss or gradient that is NaN or infinite."""


def where_nonfinite(
    programs: Programs, capacity_factor: float, state: TrainState, batch: Batch
) -> str:
    """Describe the first value that is not finite: a parameter, a layer's output, a gradient.

    Runs the batch again, forward and then backward, with the state before the step.
    """
    model = programs.objective.model
    for place in _broken(programs, state.params):
        return f"parameter {place}"
    key = step_key(programs.config.training.seed, state.step)
    evaluate = programs.evaluation(capacity_factor)
    stats, finite = evaluate(state.params, state.expert_bias, batch, key)
    layers = np.concatenate([np.asarray(finite[group]) for group in model.layer_groups])
    if not layers.all():
        return f"output of layer {np.argmin(layers)}"
    if not np.isfinite(stats.loss):
        return "the head or the loss"
    if "mtp_layers" in finite and not (ahead := np.asarray(finite["mtp_layers"])).all():
        return f"output of multi-token prediction module {1 + np.argmin(ahead)}"
    gradient = jax.jit(programs.objective.loss_and_gradients())
    grads, _ = gradient(state.params, state.expert_bias, batch, key)
    if broken := list(_broken(programs, grads)):
        return f"gradient of {broken[-1]}"  # the backward pass ends where the forward pass begins
    if not np.isfinite(jax.jit(global_norm)(grads)):
        return "the gradient's norm; each value is finite, their squares add up to infinity"
    return "nothing on a second try: not reproducible"


def _broken(programs: Programs, tree: Params) -> Iterator[str]:
    """Names of parameters that are not finite, in the order of the forward pass."""

    def finite(path, leaf):
        stacked = programs.objective.model.parts[path[0].key].num_layers is not None
        return jnp.all(jnp.isfinite(leaf), axis=tuple(range(1 if stacked else 0, leaf.ndim)))

    check = jax.jit(
        lambda tree: jax.tree_util.tree_map_with_path(finite, tree),
        out_shardings=programs.replicated,
    )
    flags, first_layer = jax.device_get(check(tree)), 0
    for name, part in programs.objective.model.parts.items():
        layers = range(part.num_layers or 1)
        place_of = layers if part.places is None else np.argsort(part.places)[-len(layers) :]
        for layer in layers:
            for path, flag in jax.tree_util.tree_leaves_with_path(flags[name]):
                if not flag.flat[place_of[layer]]:
                    leaf = jax.tree_util.keystr(path, simple=True, separator=".")
                    where = f" of layer {first_layer + layer}" if part.num_layers else ""
                    yield f"{name}.{leaf}{where}"
        first_layer += part.num_layers or 0
