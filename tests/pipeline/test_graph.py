"""Graphs of traced functions, and programs made of parts of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.pipeline.graph import trace

X = jnp.arange(12.0).reshape(3, 4) / 7


@jax.custom_jvp
def twice(x):
    return 2 * x


@twice.defjvp
def _twice_jvp(primals, tangents):
    return twice(*primals), 2 * tangents[0]


@jax.custom_vjp
def thrice(x):
    return 3 * x


thrice.defvjp(lambda x: (3 * x, None), lambda _, g: (3 * g,))


def function(x, w):
    """Calls of every kind that is inlined, a constant, and a loop, which is not."""
    inner = jax.checkpoint(lambda x: jax.jit(jnp.tanh)(twice(thrice(x)) @ w / 80))  # unsaturated
    total, _ = jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(4), inner(x))
    return {"sum": total + np.arange(4.0), "x": x}


def test_a_graph_computes_what_was_traced():
    def with_gradient(x, w):
        out, pullback = jax.vjp(function, x, w)
        return out, pullback(out)

    w = X.T @ X
    graph, tree = trace(with_gradient, X, w)
    program = graph.program(graph.inputs, graph.outputs)
    expected = jax.jit(with_gradient)(X, w)
    assert tree == jax.tree.structure(expected)
    for a, b in zip(program([X, w]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    left = {op.name for op in graph.operations if any("jaxpr" in key for key in op.eqn.params)}
    assert left == {"scan"}, "calls are inlined, with and without a gradient"


def test_a_program_runs_only_what_is_needed():
    graph, _ = trace(lambda a, b: (jnp.sin(a) * 2 + b, jnp.cos(b)), X, X)
    a, b = graph.inputs
    sum_, cos = graph.outputs
    names = [op.name for op in graph.needed([sum_])]
    assert names == ["sin", "mul", "add"]
    assert [op.name for op in graph.needed([cos])] == ["cos"]
    product = graph.operations[1].outputs[0]
    part = graph.program([product, b], [sum_])
    assert [op.name for op in part.operations] == ["add"]
    np.testing.assert_array_equal(part([X, X])[0], X + X)
    assert graph.dependents([b]) == {b, sum_, cos}
    assert graph.num_bytes(a) == 12 * 4
    with pytest.raises(ValueError, match="neither given nor made"):
        graph.program([b], [sum_])
