"""Finding where NaN or infinity first appeared."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.training.gradients import Batch
from mxjax.training.programs import Programs
from mxjax.training.state import TrainState


class NonFiniteError(RuntimeError):
    """A loss or gradient that is NaN or infinite."""


def where_nonfinite(programs: Programs, capacity_factor: float, state: TrainState, batch: Batch):
    """Describe the first value that is not finite: a parameter, a layer's output, a gradient.

    Runs the batch again, forward and then backward, with the state before the step.
    """
    if place := _first_broken(_finite_layers(state.params)):
        return f"parameter {place}"
    key = jax.random.fold_in(jax.random.key(programs.config.training.seed), state.step)
    evaluate = programs.evaluation(capacity_factor)
    stats, finite = evaluate(state.params, state.expert_bias, batch, key)
    first = 0
    for group in finite.values():
        broken = np.flatnonzero(~np.asarray(group))
        if broken.size:
            return f"output of layer {first + broken[0]}"
        first += group.shape[0]
    if not np.isfinite(stats.loss):
        return "the head or the loss"
    gradient = jax.jit(programs.objective.loss_and_gradients())
    grads, _ = gradient(state.params, state.expert_bias, batch, key)
    # The backward pass runs from the last layer to the first: the last broken one broke first.
    place = _first_broken(_finite_layers(grads), last_layer=True)
    return f"gradient of {place}" if place else "nothing on a second try: not reproducible"


def _finite_layers(tree) -> dict:
    """For each leaf, which layers (or the whole leaf) are finite; small and on all processes."""

    def finite(path, leaf):
        stacked = "layers" in jax.tree_util.keystr(path[:1])
        dims = tuple(range(1 if stacked else 0, leaf.ndim))
        return jnp.all(jnp.isfinite(leaf), axis=dims)

    check = jax.jit(lambda t: jax.tree_util.tree_map_with_path(finite, t))
    return check(tree)


def _first_broken(flags, last_layer: bool = False) -> str | None:
    found: list[tuple[int, str]] = []
    for path, flag in jax.tree_util.tree_leaves_with_path(flags):
        broken = np.flatnonzero(~np.atleast_1d(np.asarray(flag)))
        if broken.size:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            layer = int(broken[-1] if last_layer else broken[0])
            where = f"{name} (layer {layer} of its group)" if flag.ndim else name
            found.append((layer, where))
    if not found:
        return None
    return (max if last_layer else min)(found)[1]
