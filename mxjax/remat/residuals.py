"""What a function leaves for its backward pass, tensor by tensor, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

_SAME_VALUE = frozenset(["name", "device_put", "reduce_precision", "optimization_barrier", "copy"])
"""Primitives whose results are their inputs, on the host perhaps."""

_BODIES = {"jit": "jaxpr", "remat2": "jaxpr", "shard_map": "jaxpr", "closed_call": "call_jaxpr"}


@dataclass(frozen=True)
class Residual:
    """One array between forward and backward pass.

    Attributes:
      name: of `NAMES`, or of attention's softmax; None: it has none.
      on_host: it waits in the host's memory.
    """

    name: str | None
    argument: int | None
    """Which argument (flat) it is, if it is one."""
    depends_on: frozenset[int]
    """Arguments (flat) that it is made of."""
    shape: tuple[int, ...]
    dtype: Any
    on_host: bool

    @property
    def num_bytes(self) -> int:
        """On one device, where the function is traced within `shard_map`."""
        return math.prod(self.shape) * self.dtype.itemsize


def residuals_of(function: Callable, *arguments: Any) -> list[Residual]:
    """Residuals of `function`, whose results are all differentiated that can be.

    `arguments` may be shapes, or tracers within `shard_map`. Arguments of integers or keys are
    taken along but not differentiated.
    """
    leaves, tree = jax.tree.flatten(arguments)
    wanted = [jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) for leaf in leaves]

    def pullback(*leaves):
        chosen = [leaf for leaf, float_ in zip(leaves, wanted, strict=True) if float_]

        def of_floats(*chosen):
            rest = iter(chosen)
            mixed = [
                next(rest) if float_ else leaf for leaf, float_ in zip(leaves, wanted, strict=True)
            ]
            return function(*jax.tree.unflatten(tree, mixed))

        return jax.tree.leaves(jax.vjp(of_floats, *chosen)[1])

    jaxpr = jax.make_jaxpr(pullback)(*leaves).jaxpr
    return _described(jaxpr)


def _described(jaxpr: core.Jaxpr) -> list[Residual]:
    given = (v for v in jaxpr.outvars if not isinstance(v, core.Literal))
    variables = list(dict.fromkeys(given))
    return [
        Residual(
            name=source.name,
            argument=source.argument,
            depends_on=source.depends_on,
            shape=var.aval.shape,
            dtype=var.aval.dtype,
            on_host="host" in str(var.aval.memory_space).lower(),
        )
        for var, source in zip(variables, sources_of(jaxpr, variables), strict=True)
        if hasattr(var.aval.dtype, "itemsize")  # random keys have none
    ]


@dataclass(frozen=True)
class Source:
    """Where a variable of a program comes from; see `Residual`."""

    name: str | None
    argument: int | None
    depends_on: frozenset[int]


def sources_of(jaxpr: core.Jaxpr, variables: Sequence[core.Var]) -> list[Source]:
    """Of each of these variables."""
    arguments = {var: i for i, var in enumerate(jaxpr.invars)}
    ancestors = _ancestors(jaxpr)

    def source(var: core.Var) -> Source:
        if isinstance(var, core.Literal):
            return Source(None, None, frozenset())
        name, _, origin = _origin(jaxpr, var)
        return Source(name, arguments.get(origin), ancestors.get(var, frozenset()))

    return [source(var) for var in variables]


def _origin(jaxpr: core.Jaxpr, var: Any) -> tuple[str | None, str | None, Any]:
    """Name, primitive that made it (None: none did here) and the variable in `jaxpr` itself."""
    name = None
    makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    while (eqn := makers.get(var)) is not None:
        kind = eqn.primitive.name
        if kind == "name":
            name = name or eqn.params["name"]
        if kind in _SAME_VALUE:
            var = eqn.invars[eqn.outvars.index(var) if len(eqn.invars) > 1 else 0]
            continue
        if kind not in _BODIES:
            return name, kind, var
        inner = eqn.params[_BODIES[kind]]
        inner = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
        out = inner.outvars[eqn.outvars.index(var)]
        if isinstance(out, core.Literal):
            return name, kind, var
        inner_name, made_by, out = _origin(inner, out)
        name = name or inner_name
        if made_by is not None:
            return name, made_by, var
        if out not in inner.invars:  # a constant
            return name, kind, var
        var = eqn.invars[inner.invars.index(out)]
    return name, None, var


def _ancestors(jaxpr: core.Jaxpr) -> dict[Any, frozenset[int]]:
    """For each variable, the arguments it depends on."""
    found = {var: frozenset([i]) for i, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        inputs = (v for v in eqn.invars if not isinstance(v, core.Literal))
        all_of = frozenset().union(*(found.get(v, frozenset()) for v in inputs))
        found |= dict.fromkeys(eqn.outvars, all_of)
    return found
