"""A Flax module as the rest of the trainer sees it: shapes first, then a pure function of arrays.

State is plain nested dicts of arrays (`optax` and checkpoints like them); modules exist only while
a layer is traced. A `Part` translates between the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mxjax.sharding.rules import ParamInfo

Params = dict


def param(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    std: float = 0.0,
    constant: float = 0.0,
    dtype: jnp.dtype = jnp.float32,
    keep_precision: bool = False,
) -> nnx.Param:
    """A parameter with one logical axis name (or None) per dim: normal with `std`, or constant."""
    if std:
        value = std * jax.random.normal(rngs.params(), shape, jnp.float32)
    else:
        value = jnp.full(shape, constant, jnp.float32)
    return nnx.Param(value.astype(dtype), sharding_names=axes, keep_precision=keep_precision)


class Part:
    """One module class of the model, or `num_layers` of them stacked along a first dim.

    Args:
      stack: logical name of the first dim.
      places: for each place of the stack the number of its layer, or -1 for none (zeros); None:
        the layers in their order.

    Attributes:
      infos: nested dict of `ParamInfo`, the same structure as the parameters.
    """

    def __init__(
        self,
        build: Callable[[nnx.Rngs], nnx.Module],
        num_layers: int | None = None,
        *,
        stack: str = "layers",
        places: np.ndarray | None = None,
    ):
        self._build = build
        self._stack = stack
        self.num_layers = num_layers
        self.places = places
        # Logical names are not mesh axes: Flax must not try to place arrays by them.
        with nnx.use_eager_sharding(False):
            module = jax.eval_shape(lambda: build(nnx.Rngs(0)))
        self._treedef = jax.tree.structure(module)
        self.infos = self._describe(module)

    def _describe(self, module: nnx.Module) -> dict:
        variables, _ = jax.tree.flatten_with_path(
            module, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
        self._paths = [tuple(_key_name(key) for key in path) for path, _ in variables]
        places = self.num_layers if self.places is None else len(self.places)
        stack = () if places is None else (places,)
        infos: dict = {}
        for path, variable in zip(self._paths, (v for _, v in variables), strict=True):
            value = variable.get_value()
            metadata = variable.get_metadata()
            info = ParamInfo(
                shape=(*stack, *value.shape),
                dtype=value.dtype,
                axes=(*((self._stack,) if stack else ()), *metadata["out_sharding"]),
                keep_precision=metadata["keep_precision"],
            )
            _set(infos, path, info)
        return infos

    @property
    def num_parameters(self) -> int:
        """Parameters of the part, without empty places."""
        sizes = sum(math.prod(info.shape) for info in jax.tree.leaves(self.infos))
        return sizes if self.places is None else sizes // len(self.places) * self.num_layers

    @property
    def filled(self) -> float:
        """Share of the places that hold a layer."""
        return 1.0 if self.places is None else self.num_layers / len(self.places)

    @property
    def layer_infos(self) -> dict:
        """`infos` of a single layer of a stacked part."""
        return jax.tree.map(
            lambda i: ParamInfo(i.shape[1:], i.dtype, i.axes[1:], i.keep_precision), self.infos
        )

    def init(self, key: jax.Array) -> Params:
        """Initial parameters; trace it inside `jit` with output shardings to create them placed."""
        if self.num_layers is None:
            return self._init_one(key)
        keys = jax.random.split(key, self.num_layers)
        if self.places is None:
            return jax.vmap(self._init_one)(keys)
        params = jax.vmap(self._init_one)(keys[np.maximum(self.places, 0)])
        return jax.tree.map(lambda leaf: only_layers(leaf, self.places), params)

    def place(self, layers: np.ndarray) -> np.ndarray:
        """One stacked array as a checkpoint has it, in the order of the model, at `places`."""
        return layers if self.places is None else at_places(layers, self.places)

    def _init_one(self, key: jax.Array) -> Params:
        with nnx.use_eager_sharding(False):
            leaves = jax.tree.leaves(self._build(nnx.Rngs(key)))
        params: Params = {}
        for path, leaf in zip(self._paths, leaves, strict=True):
            _set(params, path, leaf)
        return params

    def bind(self, params: Params) -> nnx.Module:
        """The module with these arrays (of one layer, if stacked) as its weights."""
        return jax.tree.unflatten(self._treedef, [_get(params, path) for path in self._paths])


def at_places[A: (np.ndarray, jax.Array)](layers: A, places: np.ndarray) -> A:
    """A stack of layers in the order of the model, [L, ...], at `places`, [K, ...]; see `Part`."""
    return only_layers(layers[np.maximum(places, 0)], places)


def only_layers[A: (np.ndarray, jax.Array)](stacked: A, places: np.ndarray) -> A:
    """Zeros where a place, [K, ...], holds no layer."""
    xp = stacked.__array_namespace__()
    taken = (places >= 0).reshape(-1, *[1] * (stacked.ndim - 1))
    return xp.where(taken, stacked, xp.zeros((), stacked.dtype))


def stack_layers(layers: list) -> Any:
    """Equal trees, one for each layer, as one tree with a first dim for the layers."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def layer_of(stack: Any, index: int) -> Any:
    """One layer of what `stack_layers` gives."""
    return jax.tree.map(lambda leaf: leaf[index], stack)


def layers_of(layers: Any, wanted: slice) -> Any:
    """Some layers of what `stack_layers` gives, or of a list."""
    if isinstance(layers, list):
        return layers[wanted]
    if wanted == slice(0, jax.tree.leaves(layers)[0].shape[0]):
        return layers
    return jax.tree.map(lambda leaf: leaf[wanted], layers)


def unstack_layers(layers: Any) -> list:
    """The inverse of `stack_layers`."""
    number = jax.tree.leaves(layers)[0].shape[0]
    return [layer_of(layers, i) for i in range(number)]


def _key_name(key) -> str:
    return str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))))


def _set(tree: dict, path: tuple[str, ...], value) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _get(tree: dict, path: tuple[str, ...]):
    for name in path:
        tree = tree[name]
    return tree
