"""Layers that offload: what one leaves in the host's memory travels beside the next one.

JAX's own offloading sends and fetches a tensor within the layer that makes or reads it. That leaves
a transfer less time than it takes, and the layer's end waits for it. Here

    forward:   layer l computes, while what layer l - 1 left is on its way to the host;
    backward:  layer l computes, while what layer l - 1 left is on its way back.

What the last layer leaves stays on the device, for the backward pass begins with it. So the device
holds what two layers offload. It takes a scan: of unrolled layers XLA sends tensors so late that
nothing is freed.

The forward pass of a layer makes its results and all that its pullback needs, the residuals. Those
that are weights or side inputs are not stored again; those that are the same for every layer are
kept once.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from mxjax.kernels.implementation import varying_over
from mxjax.remat.residuals import sources_of

LayerFunction = Callable[..., tuple]
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
AWAY, SAME, KEPT = "away", "same", "kept"
"""Where a residual is: on the host, the same for every layer, or on the device for each layer."""
NO_X = object()
"""A leaf, as None would be none: what the pullback needs of x is stored as any residual."""


@dataclass(frozen=True)
class Offloading:
    """A layer that leaves the tensors of these names (`with_softmax`) in the host's memory.

    Attributes:
      layer: (weights, x, ctx, index, bias) -> (x, aux), under a policy that keeps the tensors.
    """

    layer: LayerFunction
    offload: Set[str]


def run_offloading(
    run: Offloading, params: Any, x: jax.Array, ctx: Any, indices_L: jax.Array, bias_LE: Any
) -> tuple[jax.Array, Any]:
    """A group of layers, of stacked parameters: (x, aux with a first dim for the layers)."""

    @jax.custom_vjp
    def layers(params, x, side):
        return forward(params, x, side)[0]

    def forward(params, x, side):
        ctx, *by_layer = side
        first, *rest = jax.tree.map(lambda a: a[0], (params, *by_layer))
        program = _forward_program(run, (first, x, ctx, *rest))

        def one(carry, inputs):
            x, away, _ = carry
            layer_params, index, bias_E = inputs
            # A copy that XLA cannot see through. Without, this layer's tensors would be written
            # where these lie, and their making would wait for the transfer.
            away = jax.tree.map(lambda a: jnp.where(index >= 0, a, jnp.zeros_like(a)), away)
            sent = jax.device_put(away, HOST)
            (x, aux), residuals = program((layer_params, x, ctx, index, bias_E))
            return (x, residuals[AWAY], residuals[SAME]), (aux, residuals[KEPT], sent)

        carry = x, program.nothing(AWAY), program.nothing(SAME)
        (x, *last), (aux, kept, sent) = lax.scan(one, carry, (params, *by_layer))
        return (x, aux), (program, params, side, last, kept, sent)

    def backward(residuals, d_results):
        program, params, (ctx, *by_layer), (away, same), kept, sent = residuals
        d_x, d_aux = d_results

        def one(carry, inputs):
            d_x, away = carry
            layer_params, *rest, kept, sent, d_aux = inputs
            fetched = jax.device_put(sent, DEVICE)
            held = {AWAY: away, SAME: same, KEPT: kept}
            d_params, d_x = program.pull_back([d_x, *d_aux], (layer_params, NO_X, ctx, *rest), held)
            return (d_x, fetched), d_params

        inputs = params, *by_layer, kept, sent, program.floats(d_aux)
        (d_x, _), d_params = lax.scan(one, (d_x, away), inputs, reverse=True)
        return d_params, d_x, None

    layers.defvjp(forward, backward)
    return layers(params, x, (ctx, indices_L, bias_LE))


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Program:
    """One layer's forward pass, and how to read what it returns.

    Attributes:
      jaxpr: (weights, x, ctx, index, bias) -> differentiable results, others, residuals; all flat.
      results, pullback: trees of the layer's results, and of its pullback with the residuals.
      is_float: which results are differentiable.
      places: of each residual: the argument that it is, or where it is and its number there.
      types: of what is in each place.
    """

    jaxpr: core.ClosedJaxpr
    results: Any
    is_float: tuple[bool, ...]
    pullback: Any
    places: tuple[int | tuple[str, int], ...]
    types: dict[str, list[Any]]

    def __call__(self, arguments: tuple) -> tuple[Any, dict[str, list[jax.Array]]]:
        """The layer's results, and the residuals of each place."""
        found = core.jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(arguments))
        results, residuals = found[: len(self.is_float)], found[len(self.is_float) :]
        number = sum(self.is_float)
        floats, others = iter(results[:number]), iter(results[number:])
        leaves = [next(floats if is_float else others) for is_float in self.is_float]
        held: dict[str, list] = {place: [None] * len(types) for place, types in self.types.items()}
        for place, residual in zip(self.places, residuals, strict=True):
            if not isinstance(place, int):
                held[place[0]][place[1]] = residual
        return jax.tree.unflatten(self.results, leaves), held

    def pull_back(self, d_floats: list, arguments: tuple, held: dict[str, list]) -> tuple:
        """Gradients of weights and x. `arguments` have `NO_X` in its place."""
        leaves = jax.tree.leaves(arguments)
        residuals = [
            leaves[place] if isinstance(place, int) else held[place[0]][place[1]]
            for place in self.places
        ]
        return jax.tree.unflatten(self.pullback, residuals)(d_floats)

    def floats(self, d_aux: Any) -> tuple[jax.Array, ...]:
        """The gradients that are some: of results but x."""
        leaves = zip(jax.tree.leaves(d_aux), self.is_float[1:], strict=True)
        return tuple(d for d, is_float in leaves if is_float)

    def nothing(self, place: str) -> list[jax.Array]:
        """Zeros, for before the first layer."""
        return [
            varying_over(jnp.zeros(aval.shape, aval.dtype), aval.manual_axis_type.varying)
            for aval in self.types[place]
        ]


def _forward_program(run: Offloading, arguments: tuple) -> _Program:
    leaves, tree = jax.tree.flatten(arguments)
    trees: dict[str, Any] = {}

    def layer(side, params, x):
        results, trees["results"] = jax.tree.flatten(run.layer(params, x, *side))
        trees["is_float"] = tuple(jnp.issubdtype(r.dtype, jnp.floating) for r in results)
        floats = [r for r, is_float in zip(results, trees["is_float"], strict=True) if is_float]
        others = [r for r, is_float in zip(results, trees["is_float"], strict=True) if not is_float]
        return floats, others

    def forward(*leaves):
        params, x, *side = jax.tree.unflatten(tree, leaves)
        floats, pullback, others = jax.vjp(partial(layer, side), params, x, has_aux=True)
        residuals, trees["pullback"] = jax.tree.flatten(pullback)
        return floats, others, residuals

    jaxpr = jax.make_jaxpr(forward)(*leaves)
    sizes = [len(jax.tree.leaves(argument)) for argument in arguments]
    before_x, after_ctx = sizes[0], sum(sizes[:3])
    of_each_layer = {*range(before_x + 1), *range(after_ctx, sum(sizes))}
    places, types, seen = [], {AWAY: [], SAME: [], KEPT: []}, {}
    variables = jaxpr.jaxpr.outvars[len(trees["is_float"]) :]
    for var, source in zip(variables, sources_of(jaxpr.jaxpr, variables), strict=True):
        if source.name in run.offload:
            where = AWAY
        elif source.argument not in (None, before_x):
            places.append(source.argument)
            continue
        else:
            is_key = jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key)
            where = KEPT if source.depends_on & of_each_layer or is_key else SAME
        if id(var) not in seen:
            seen[id(var)] = where, len(types[where])
            types[where].append(var.aval)
        places.append(seen[id(var)])
    return _Program(jaxpr, places=tuple(places), types=types, **trees)
