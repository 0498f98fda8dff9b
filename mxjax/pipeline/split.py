"""One layer's training as three programs: F forward, B input gradient, W weight gradient.

Zero-bubble schedules (Qi et al. 2024) need W apart from B. Forward and backward pass are traced
together, and each expensive operation (matrix product, attention, collective, ...) is put where it
is first needed: F, else B, else W. None is ever done twice. Cheap ones (elementwise, reductions,
changes of shape) may be repeated, and which values cross from F to B and from B to W is the minimum
cut, by bytes, of the graph between expensive operations. So the inputs of a norm or an activation
are kept in the model's precision and its fp32 insides are computed again; what depends on weights
and side inputs only (casts, gathered ZeRO-3 shards, dropout masks) is never kept.

What F leaves waits for long, and only its bytes count. What B leaves for W waits for a few cells at
most, so bytes that W would move to repeat what B has done count as much as those that wait: W gets
the gradient of an activation's input rather than that of its output.

A recompute policy (`jax.checkpoint`) on the layer takes part as it is: what it computes again is
an expensive operation of the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from mxjax.pipeline.gradient_sums import add
from mxjax.pipeline.graph import Graph, Operation, Program, trace

Layer = Callable[[Any, jax.Array, Any], tuple[jax.Array, jax.Array, Any]]
"""(params, x, side) -> (y like x, scalar objective, statistics without gradient)."""

_CHEAP_NAMES = """
abs add add_any and argmax axis_index broadcast_in_dim ceil clamp concatenate convert_element_type
copy cos div dynamic_slice empty2 eq erf exp exp2 expand_dims expm1 floor ge gt integer_pow iota
is_finite le log log1p logistic lt max min mul name ne neg not one_minus_square optimization_barrier
or pad pbroadcast pow pvary reduce_and reduce_max reduce_min reduce_or reduce_precision reduce_sum
reshape rev round rsqrt select_n sign sin slice split sqrt square squeeze stop_gradient sub tan tanh
transpose xor
"""
_CHEAP = frozenset(_CHEAP_NAMES.split())
"""Primitives that are bound by memory and read about as much as they write."""

_CHEAP_KERNELS = frozenset({"tiles_kernel", "registers_kernel", "rows_kernel", "rotation_kernel"})
"""Kernels of which the same is true: elementwise functions (two), norms, rotary embeddings."""

_REARRANGING_NAMES = """
broadcast_in_dim concatenate convert_element_type copy dynamic_slice empty2 expand_dims iota name
optimization_barrier pad pbroadcast pvary reshape rev slice split squeeze stop_gradient transpose
"""
_REARRANGING = frozenset(_REARRANGING_NAMES.split())
"""Cheap ones that compute nothing, and are mostly a part of what reads their results."""

_RESHAPING = frozenset({"copy", "expand_dims", "name", "reshape", "squeeze", "transpose"})
"""Those of them whose result has the same elements, in the precision that they come in."""

_ADDING = frozenset({"grouped_matmul_weight_gradient"})
"""Primitives that take one operand more, to which they add their result."""

_IN_PLACE = _RESHAPING - {"transpose"}
"""Those which leave them in their order."""

_KEPT_LONGER = 8
"""Keeping a residual of F until W costs this many times less than a value of B's own: under delayed
W most ranks' residual slots live that long in any case."""

_INFINITE = 2**30


@dataclass(frozen=True)
class LayerSplit:
    """The three programs and what passes between them.

    Attributes:
      residuals: shape and dtype of what F leaves for B.
      for_weights: which of them W needs too.
      on_host: which of them are to wait in the host's memory.
      cut: shape and dtype of what B leaves for W.
      names: of `residuals` and then of `cut`: the name that the layer gave them
        (`checkpoint_name`), or what is cheaply made of them, or None.
    """

    residuals: tuple[jax.ShapeDtypeStruct, ...]
    for_weights: tuple[bool, ...]
    on_host: tuple[bool, ...]
    cut: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str | None, ...]
    programs: dict[str, Program]
    """F, B, W, BW: the last does B and W in one go."""
    adding: dict[int, tuple[int, tuple[int, ...]]]
    """Gradients of weights that what makes them adds to a sum, see `_adding`."""
    _stats: Any
    _params: Any

    def forward(self, params, x, side) -> tuple[jax.Array, jax.Array, Any, list[jax.Array]]:
        """y, objective, statistics, residuals."""
        y, objective, *rest = self.programs["F"](jax.tree.leaves((params, x, side)))
        n = self._stats.num_leaves
        return y, objective, jax.tree.unflatten(self._stats, rest[:n]), rest[n:]

    def kept_of(self, residuals) -> list[Any]:
        """Those of the residuals (or of what stands for them) that W needs."""
        return [r for r, needed in zip(residuals, self.for_weights, strict=True) if needed]

    def backward(self, params, side, residuals, dy) -> tuple[jax.Array, list[jax.Array]]:
        """Gradient of the input, and what W needs of this pass."""
        dx, *cut = self.programs["B"](jax.tree.leaves((params, side, list(residuals), dy)))
        return dx, cut

    def weight_gradients(self, params, side, residuals, cut, total: Any = None) -> Any:
        """Gradients of the weights; `residuals` are those of `kept_of`. With `total`, the sums of
        earlier ones in fp32: the new sums."""
        leaves = jax.tree.leaves((params, side, list(residuals), list(cut)))
        return self._gradients("W", leaves, total)[1]

    def backward_both(self, params, side, residuals, dy, total: Any = None) -> tuple[Any, Any]:
        """Gradient of the input, and of the weights as `weight_gradients`."""
        leaves = jax.tree.leaves((params, side, list(residuals), dy))
        (dx,), grads = self._gradients("BW", leaves, total)
        return dx, grads

    def _gradients(self, name: str, leaves: list[Any], total: Any) -> tuple[list[Any], Any]:
        """What a program gives before the gradients of the weights, and these."""
        program, n = self.programs[name], self._params.num_leaves
        outputs = program.outputs[-n:]
        if total is None:
            results = program(leaves)
            return results[:-n], jax.tree.unflatten(self._params, results[-n:])
        sums, into = jax.tree.leaves(total), {}
        for v, old in zip(outputs, sums, strict=True):
            if v in self.adding:
                made, shape = self.adding[v]
                into[made] = old.reshape(shape)
        results = program(leaves, into)
        added = [
            grad if v in self.adding else add(old, grad)
            for v, old, grad in zip(outputs, sums, results[-n:], strict=True)
        ]
        return results[:-n], jax.tree.unflatten(self._params, added)


def split_layer(
    layer: Layer,
    params: Any,
    x: jax.Array,
    side: Any,
    offload: Collection[str] = (),
    *,
    fp32_gradients: bool = False,
) -> LayerSplit:
    """Splits `layer` for arguments like these; its objective counts with weight 1.

    `offload`: names of tensors that are to wait in the host's memory; see `LayerSplit.on_host`.
    `fp32_gradients`: those of weights leave their matrix products in fp32. Where nothing lies
    between a product and the sum over microbatches, a GPU's product adds itself to it, and nothing
    is rounded in between. XLA's CPU backend has no such products.
    To be called where the layer could be called: within `shard_map`, for a layer with collectives.
    """

    def joint(params, x, side, dy):
        def run(params, x):
            y, objective, stats = layer(params, x, side)
            return (y, objective), stats

        (y, objective), pullback, stats = jax.vjp(run, params, x, has_aux=True)
        d_params, d_x = pullback((dy, jnp.ones_like(objective)))
        return y, objective, stats, d_x, d_params

    graph, tree = trace(joint, params, x, side, x)
    num_params = len(jax.tree.leaves(params))
    in_params, in_x = graph.inputs[:num_params], graph.inputs[num_params]
    in_side, in_dy = graph.inputs[num_params + 1 : -1], graph.inputs[-1]
    stats_tree = tree.children()[2]
    n = 2 + stats_tree.num_leaves
    out_forward, d_x, d_params = graph.outputs[:n], graph.outputs[n], graph.outputs[n + 1 :]
    if fp32_gradients:
        _widen_products(graph, d_params)
    free = set(range(len(graph.avals))) - graph.dependents([in_x, in_dy])
    forward = graph.needed(out_forward)
    residuals = _cut(graph, free, forward, [d_x, *d_params], early={in_x}, late={in_dy})
    given = set(residuals)
    backward = graph.needed([d_x], given)
    repeats = _repeats(graph, backward)
    # What a recompute policy computes again for W alone (the output of attention) is better done in
    # B, which has its inputs (the scores).
    from_dy = graph.dependents([in_dy])
    backward += [
        op for op in graph.needed(d_params, given) if from_dy.isdisjoint((*op.inputs, *op.outputs))
    ]
    crossing = _cut(graph, free, backward, d_params, early={in_dy}, given=given, repeats=repeats)
    cut = [value for value in crossing if value not in given]
    for_weights = tuple(value in crossing for value in residuals)
    kept = [v for v, needed in zip(residuals, for_weights, strict=True) if needed]
    names = _names(graph)
    held = [*in_params, *in_side]
    return LayerSplit(
        residuals=tuple(_shape(graph, v) for v in residuals),
        for_weights=for_weights,
        on_host=tuple(names.get(value) in offload for value in residuals),
        cut=tuple(_shape(graph, v) for v in cut),
        names=tuple(names.get(v) for v in (*residuals, *cut)),
        programs={
            "F": graph.program([*in_params, in_x, *in_side], [*out_forward, *residuals]),
            "B": graph.program([*held, *residuals, in_dy], [d_x, *cut]),
            "W": graph.program([*held, *kept, *cut], d_params),
            "BW": graph.program([*held, *residuals, in_dy], [d_x, *d_params]),
        },
        adding=_adding(graph, d_params),
        _stats=stats_tree,
        _params=jax.tree.structure(params),
    )


def _sources(graph: Graph, outputs: list[int], through: frozenset[str]) -> dict[int, list[int]]:
    """For each of `outputs` the values that it is a form of, itself first: from the last on by
    operations `through`. Without those outputs whose values something else reads too."""
    uses = Counter([v for op in graph.operations for v in op.inputs] + graph.outputs)
    made_by = {v: op for op in graph.operations for v in op.outputs}
    found = {}
    for value in outputs:
        along = [value]
        while (op := made_by.get(along[-1])) is not None and op.name in through:
            along += op.inputs
        if all(uses[v] == 1 for v in along):
            found[value] = along
    return found


def _widen_products(graph: Graph, outputs: list[int]) -> None:
    """Makes matrix products give those of `outputs` that are nothing else in fp32."""
    made_by = {v: n for n, op in enumerate(graph.operations) for v in op.outputs}
    for value, along in _sources(graph, outputs, _RESHAPING).items():
        n = made_by.get(along[-1])
        if n is None or graph.operations[n].name != "dot_general":
            continue
        if graph.avals[value].dtype.itemsize == 2:
            op = graph.operations[n]
            params = op.eqn.params | {"preferred_element_type": np.dtype(np.float32)}
            graph.operations[n] = replace(op, eqn=op.eqn.replace(params=params))
            for v in along:
                graph.avals[v] = graph.avals[v].update(dtype=np.dtype(np.float32))


def _adding(graph: Graph, outputs: list[int]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """For those of `outputs` that their primitive can add to a sum: its result, and its shape."""
    can_add = {v for op in graph.operations if op.name in _ADDING for v in op.outputs}
    sources = {v: along[-1] for v, along in _sources(graph, outputs, _IN_PLACE).items()}
    return {v: (made, graph.avals[made].shape) for v, made in sources.items() if made in can_add}


def _names(graph: Graph) -> dict[int, str]:
    """For values with a name and those that it is cheaply made of."""
    found: dict[int, str] = {}
    for op in reversed(graph.operations):
        if op.name == "name":
            found |= dict.fromkeys((*op.inputs, *op.outputs), op.eqn.params["name"])
        elif _is_cheap(op):
            of_results = [found[v] for v in op.outputs if v in found]
            for value in op.inputs if of_results else ():
                found.setdefault(value, of_results[0])
    return found


def _is_cheap(op: Operation) -> bool:
    if op.name == "mpmd_map":
        return op.eqn.params["name"] in _CHEAP_KERNELS
    return op.name in _CHEAP


def _repeats(graph: Graph, operations: list[Operation]) -> dict[int, int]:
    """Bytes that are moved to make a result of cheap ones among `operations` again. XLA makes one
    pass of several operations, so that only what they write counts; a kernel reads its inputs."""
    found = {}
    for op in operations:
        if _is_cheap(op) and op.name not in _REARRANGING:
            read = sum(map(graph.num_bytes, op.inputs)) if op.name == "mpmd_map" else 0
            total = read + sum(map(graph.num_bytes, op.outputs))
            found |= dict.fromkeys(op.outputs, total)
    return found


def _shape(graph: Graph, value: int) -> jax.ShapeDtypeStruct:
    aval = graph.avals[value]
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _cut(
    graph: Graph,
    free: set[int],
    first: list[Operation],
    outputs: list[int],
    *,
    early: set[int],
    late: Iterable[int] = (),
    given: Iterable[int] = (),
    repeats: Mapping[int, int] = MappingProxyType({}),
) -> list[int]:
    """Values to hand from one pass to the next: the fewest bytes.

    Args:
      free: values that both passes have, or can make of what both have.
      first: what the earlier pass has to do; expensive operations among it are done only there.
      outputs: what the later pass is for.
      early, late: inputs that the earlier or the later pass has for itself.
      given: values that a pass before both handed on, which cost less; what made them is done.
      repeats: what it costs that the later pass makes a value again, in bytes.
    """
    given = set(given)
    in_first = set(map(id, first))
    late_values = set(late)  # what cannot exist before the later pass
    sources = early | given
    edges: list[tuple[int, int]] = []
    sinks: set[int] = set()
    for op in graph.needed([*outputs, *(v for o in first for v in o.outputs)], given):
        inputs = [v for v in op.inputs if v not in free]
        outs = [v for v in op.outputs if v not in free and v not in given]
        if not outs:
            continue
        expensive = not _is_cheap(op)
        if not late_values.isdisjoint(inputs) or (expensive and id(op) not in in_first):
            late_values.update(outs)
            sinks.update(v for v in inputs if v not in late_values)
        elif expensive:
            sources.update(outs)
        else:
            edges += [(i, o) for i in inputs for o in outs]
    sinks.update(v for v in outputs if v not in free and v not in late_values)
    candidates = sources | sinks | {v for edge in edges for v in edge}
    weights = {
        v: max(1, graph.num_bytes(v) // (_KEPT_LONGER if v in given else 1)) for v in candidates
    }
    repeats = {v: repeats[v] for v in candidates - given if v in repeats}
    return sorted(_minimum_cut(weights, edges, sources & candidates, sinks, repeats))


def _minimum_cut(
    weights: dict[int, int],
    edges: list[tuple[int, int]],
    sources: set[int],
    sinks: set[int],
    repeats: dict[int, int],
) -> set[int]:
    """Nodes of least total weight that every path from a source to a sink passes. Each node behind
    the cut costs its `repeats`."""
    if not sinks:
        return set()
    names = sorted(weights)
    place = {name: i for i, name in enumerate(names)}
    n = len(names)
    source, sink = 2 * n, 2 * n + 1
    # scipy wants 32-bit capacities. Fine steps for the small ones, so that ties are rare.
    unit = max(1, (sum(weights.values()) + sum(repeats.values())) // (_INFINITE // 2))
    arcs: dict[tuple[int, int], int] = {
        (place[v], n + place[v]): 1 + weights[v] // unit for v in names
    }
    arcs |= {(n + place[a], place[b]): _INFINITE for a, b in edges}
    arcs |= {(source, place[v]): 1 + cost // unit for v, cost in repeats.items()}
    arcs |= {(source, place[v]): _INFINITE for v in sources}
    arcs |= {(n + place[v], sink): _INFINITE for v in sinks}
    rows, columns = np.array(list(arcs)).T
    shape = (2 * n + 2,) * 2
    capacity = coo_array((np.array(list(arcs.values()), np.int32), (rows, columns)), shape).tocsr()
    flow = maximum_flow(capacity, source, sink).flow
    residual = capacity - flow
    residual.data = np.maximum(residual.data, 0)
    residual.eliminate_zeros()
    reached = set(breadth_first_order(residual, source, return_predecessors=False).tolist())
    return {v for v in names if place[v] in reached and n + place[v] not in reached}
