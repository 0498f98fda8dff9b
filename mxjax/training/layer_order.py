"""Between stacks of layers as pipeline ranks hold them and the model's own order.

Checkpoints know no pipeline: they have every layer once, in the order of the model, so that they
move freely between layouts and schedules. Where ranks hold layers in another order (several chunks,
empty places), each array of the state is rearranged on its way out and in, one after the other: an
all-to-all over `pp` gives each rank a slice of all layers, which it puts in order.

Shapes: P pipeline ranks, K places of a rank, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mxjax.models.parts import at_places
from mxjax.training.gradients import Objective
from mxjax.training.state import TrainState


@dataclass(frozen=True)
class _Stack:
    """How one array is rearranged."""

    places: tuple[int, ...]
    num_layers: int
    here: NamedSharding
    """Of the array as ranks hold it, [P K, ...]."""
    there: NamedSharding
    """Of the array in the order of the model, [L, ...]."""
    dim: int | None
    """Which dim is cut over `pp` there; None: none can be, each rank has all."""

    @property
    def is_split(self) -> bool:
        """Whether ranks hold places of their own. Of small arrays (Adafactor's factors) each has
        all."""
        return "pp" in jax.tree.leaves(tuple(self.here.spec[:1]))


class LayerOrder:
    """Rearranges training states.

    Attributes:
      abstract_state: shapes and shardings in the order of the model.
    """

    def __init__(self, objective: Objective, abstract_state: TrainState):
        self._stacks: dict[tuple, _Stack] = {}

        def describe(path, leaf):
            part = _part_of(path, objective)
            if part is None or part.places is None or leaf.shape[:1] != (len(part.places),):
                return leaf
            stack = _describe(part.places, part.num_layers, leaf)
            self._stacks[path] = stack
            shape = (part.num_layers, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=stack.there)

        self.abstract_state: TrainState = jax.tree_util.tree_map_with_path(describe, abstract_state)

    def to_model(self, state: TrainState) -> TrainState:
        """The state with all layers in the order of the model."""
        return self._map(_gather_layers, state, donate=False)

    def from_model(self, state: TrainState) -> TrainState:
        """The inverse; gives up the arrays of `state` that change."""
        return self._map(_spread_layers, state, donate=True)

    def _map(self, function, state: TrainState, donate: bool) -> TrainState:
        def one(path, leaf):
            stack = self._stacks.get(path)
            if stack is None:
                return leaf
            kind = stack.here.memory_kind
            if kind is not None:  # moments may lie on the host
                leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
            moved = _jitted(function, stack, donate)(leaf)
            if kind is not None:
                moved = jax.device_put(moved, moved.sharding.with_memory_kind(kind))
            # Each needs memory; and JAX on CPUs hangs with too many on their way.
            return jax.block_until_ready(moved)

        return jax.tree_util.tree_map_with_path(one, state)


def _part_of(path: tuple, objective: Objective):
    """The part of the model that an array of the state belongs to: parameters and moments lie in
    trees that name it."""
    names = [getattr(key, "key", None) for key in path]
    return next((p for name, p in objective.model.parts.items() if name in names), None)


def _describe(places: np.ndarray, num_layers: int, leaf: jax.ShapeDtypeStruct) -> _Stack:
    mesh: Mesh = leaf.sharding.mesh
    order = tuple(places.tolist())
    here = _Stack(order, num_layers, leaf.sharding, leaf.sharding, None)
    if not here.is_split:
        return here
    spec = list(leaf.sharding.spec) + [None] * (len(leaf.shape) - len(leaf.sharding.spec))
    local = leaf.sharding.shard_shape(leaf.shape)
    ranks = mesh.shape["pp"]
    dims = [d for d in range(1, len(local)) if local[d] % ranks == 0]
    dim = max(dims, key=lambda d: local[d], default=None)
    spec[0] = None
    if dim is not None:
        axes = spec[dim] or ()
        spec[dim] = (*((axes,) if isinstance(axes, str) else axes), "pp")
    there = NamedSharding(mesh, PartitionSpec(*spec), memory_kind=leaf.sharding.memory_kind)
    return replace(here, there=there, dim=dim)


@cache  # else every save would compile anew
def _jitted(function, stack: _Stack, donate: bool) -> Any:
    specs = stack.here.spec, stack.there.spec
    source, target = specs if function is _gather_layers else specs[::-1]
    mapped = jax.shard_map(
        partial(function, stack),
        mesh=stack.here.mesh,
        in_specs=source,
        out_specs=target,
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=(0,) if donate else ())


def _gather_layers(stack: _Stack, held_K: jax.Array) -> jax.Array:
    """[K, ...] -> [L, ...], of which each rank has a slice."""
    order = np.argsort(stack.places)[stack.places.count(-1) :]
    if not stack.is_split:
        return held_K[order]
    if stack.dim is None:
        return lax.all_gather(held_K, "pp", axis=0, tiled=True)[order]
    sliced = lax.all_to_all(held_K, "pp", split_axis=stack.dim, concat_axis=0, tiled=True)
    return sliced[order]


def _spread_layers(stack: _Stack, layers_L: jax.Array) -> jax.Array:
    """The inverse, with zeros where there is no layer."""
    held = at_places(layers_L, np.array(stack.places))
    if not stack.is_split:
        return held
    if stack.dim is None:
        K = len(stack.places) // stack.here.mesh.shape["pp"]
        return lax.dynamic_slice_in_dim(held, lax.axis_index("pp") * K, K)
    return lax.all_to_all(held, "pp", split_axis=0, concat_axis=stack.dim, tiled=True)
