"""A traced function as a flat list of operations, and programs that run some of them.

A jaxpr nests calls, and its variables belong to it. Here calls are inlined and values are numbers,
so that any subset of the operations can be run with any values given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.extend import core

_BODIES = {
    "jit": "jaxpr",
    "remat2": "jaxpr",  # of jax.checkpoint
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",  # of a Pallas kernel
}
"""Calls that only group operations, by the parameter that holds what they call. Derivatives have
been taken when a graph is made, so their rules are of no further use."""


@dataclass(frozen=True)
class Operation:
    """One primitive applied to values."""

    eqn: core.JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name


@dataclass
class Graph:
    """Operations in an order in which they can run.

    Attributes:
      avals: shape and dtype of each value.
      constants: values that are known.
      inputs, outputs: of the traced function, flat.
    """

    operations: list[Operation] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def num_bytes(self, value: int) -> int:
        """Size of a value."""
        aval = self.avals[value]
        return math.prod(aval.shape) * aval.dtype.itemsize

    def dependents(self, values: Iterable[int]) -> set[int]:
        """These values and all that depend on one of them."""
        found = set(values)
        for operation in self.operations:
            if not found.isdisjoint(operation.inputs):
                found.update(operation.outputs)
        return found

    def needed(self, outputs: Iterable[int], given: Iterable[int] = ()) -> list[Operation]:
        """What must run to have `outputs` if `given` are there."""
        given = set(given)
        wanted, found = set(outputs) - given, []
        for operation in reversed(self.operations):
            if not wanted.isdisjoint(operation.outputs):
                found.append(operation)
                wanted.update(set(operation.inputs) - given)
        return found[::-1]

    def program(self, inputs: Sequence[int], outputs: Sequence[int]) -> Program:
        """What makes `outputs` of `inputs`.

        Raises:
          ValueError: that is not possible.
        """
        operations = self.needed(outputs, inputs)
        made = {v for operation in operations for v in operation.outputs}
        wanted = {v for operation in operations for v in operation.inputs} | set(outputs)
        missing = wanted - made - set(inputs) - set(self.constants)
        if missing:
            raise ValueError(f"values {sorted(missing)} are neither given nor made")
        return Program(operations, tuple(inputs), tuple(outputs), self.constants)


@dataclass(frozen=True)
class Program:
    """A function of some values of a graph to others."""

    operations: list[Operation]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: dict[int, Any]

    def __call__(
        self, arguments: Sequence[Any], into: Mapping[int, Any] = MappingProxyType({})
    ) -> list[Any]:
        """Values of `outputs`. What makes one of `into` gets what is there as one operand more, to
        add itself to."""
        values = dict(self.constants)
        values.update(zip(self.inputs, arguments, strict=True))
        for operation in self.operations:
            eqn = operation.eqn
            params = eqn.primitive.get_bind_params(eqn.params)
            inputs = [values[v] for v in operation.inputs]
            inputs += [into[v] for v in operation.outputs if v in into]
            with eqn.ctx.manager:
                results = eqn.primitive.bind(*inputs, **params)
            if not eqn.primitive.multiple_results:
                results = [results]
            values.update(zip(operation.outputs, results, strict=True))
        return [values[v] for v in self.outputs]


def trace(function, *arguments) -> tuple[Graph, Any]:
    """The graph of `function` for arguments like these, and the tree of its outputs."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    graph = Graph()
    graph.inputs = [_new(graph, var.aval) for var in closed.jaxpr.invars]
    consts = [_constant(graph, value) for value in closed.consts]
    graph.outputs = _inline(graph, closed.jaxpr, consts, graph.inputs)
    return graph, jax.tree.structure(shapes)


def _new(graph: Graph, aval: Any) -> int:
    graph.avals.append(aval)
    return len(graph.avals) - 1


def _constant(graph: Graph, value: Any) -> int:
    number = _new(graph, jax.typeof(value))
    graph.constants[number] = value
    return number


def _inline(graph: Graph, jaxpr, consts: list[int], inputs: list[int]) -> list[int]:
    """Adds the operations of `jaxpr`; gives its outputs."""
    number = dict(zip(jaxpr.constvars, consts, strict=True))
    number |= dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom) -> int:
        if isinstance(atom, core.Literal):
            return _constant(graph, np.asarray(atom.val, atom.aval.dtype))
        return number[atom]

    for eqn in jaxpr.eqns:
        arguments = [read(atom) for atom in eqn.invars]
        body = _BODIES.get(eqn.primitive.name)
        if body is None:
            results = [_new(graph, var.aval) for var in eqn.outvars]
            graph.operations.append(Operation(eqn, tuple(arguments), tuple(results)))
        else:
            inner = eqn.params[body]
            inner, values = (
                (inner.jaxpr, inner.consts) if isinstance(inner, core.ClosedJaxpr) else (inner, ())
            )
            inner_consts = [_constant(graph, value) for value in values]
            results = _inline(graph, inner, inner_consts, arguments)
        number |= dict(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
