"""Running a tick table: one program for all ranks of the `pp` axis, a scan over ticks.

In a tick, each kind of cell sits in a `cond` of its own, which one of the ranks that have such a
cell now enter: between them they hold the ring buffers, which XLA then updates in place. After the
cells comes an exchange: a `switch` that all ranks take the same way, whose branches have exactly the
pairs of ranks that have something to send. So a rank waits only for whom it needs.

Collectives over other axes may sit in layers, since all ranks of a stage take the same `cond`.
A `ppermute` may not: XLA can pair it with that of another branch (use `all_to_all`).

Names in the carried state: `x` and `g` rings [slots, ...]; `residuals`, `kept` and `cut` rings by
kind of layer (of a scanned layer loop [slots, layers, ...], else one [slots, ...] per layer);
`grads` by kind; `outer`, gradients of what is not in a layer; `stats`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.pipeline.schedule import Kind
from mxjax.pipeline.split import LayerSplit, split_layer
from mxjax.pipeline.ticks import Flavour, Part, TickTable

AXIS = "pp"

State = dict[str, Any]
Row = dict[str, jax.Array]
Weights = dict[str, Any]
"""For each kind of layer, weights of this rank's layers, chunk after chunk: a list of trees, or one
tree stacked along a first dim. Every chunk takes as many places as the largest on any rank."""


class StagedModel(Protocol):
    """A model as the pipeline sees it. `outer` is the tree of all weights that are not in layers,
    `ctx` whatever the layers of one microbatch share."""

    kinds: tuple[str, ...]

    def stream(self) -> jax.ShapeDtypeStruct:
        """Shape of the residual stream of a microbatch on one rank."""

    def context(self, microbatch: jax.Array) -> Any:
        """Side inputs of a microbatch."""

    def side(self, kind: str, ctx: Any, index: jax.Array) -> Any:
        """Side inputs of the layer with this number in the model."""

    def layer(self, kind: str, weights: Any, x: jax.Array, side: Any) -> tuple:
        """Output like `x`, scalar objective, statistics."""

    def embed(self, outer: Any, microbatch: jax.Array) -> jax.Array:
        """Input of the first layer."""

    def head(self, outer: Any, x: jax.Array, microbatch: jax.Array) -> tuple:
        """Scalar objective, statistics."""

    def empty_statistics(self) -> Any:
        """Statistics of nothing."""

    def add_layer(self, stats: Any, kind: str, index: jax.Array, objective, of_layer) -> Any:
        """`stats` with those of a layer."""

    def add_head(self, stats: Any, microbatch: jax.Array, of_head) -> Any:
        """`stats` with those of a call of `head`."""

    def reduce(self, kind: str, grads: Any) -> Any:
        """Gradients of a layer's weights in the form in which they are summed up."""


class Pipeline:
    """A model, a table and weights, inside `shard_map`.

    Args:
      weights: of the layers; see `Weights`.
      outer: weights of embedding and head, whole, on every rank.
    """

    def __init__(self, model: StagedModel, table: TickTable, weights: Weights, outer: Any):
        self.model, self.table, self.weights, self.outer = model, table, weights, outer
        self._stream = model.stream()
        self._bases = _bases(table)
        self._splits: dict[str, LayerSplit] = {}

    def train(self) -> tuple[Weights, Any, Any]:
        """Gradients of `weights`, of `outer`, and statistics: this rank's sums over all
        microbatches, in fp32."""
        for kind in self._present:
            ctx = self.model.context(jnp.int32(0))
            side = self.model.side(kind, ctx, jnp.int32(0))
            example = jax.tree.map(lambda w: jax.typeof(w), self._layer_weights(kind, 0))
            x = jnp.zeros(self._stream.shape, self._stream.dtype)
            layer = partial(self.model.layer, kind)
            self._splits[kind] = split_layer(layer, example, x, side)
        state = self._scan(self._training_state())
        return state["grads"], state["outer"], state["stats"]

    def evaluate(self) -> Any:
        """Statistics of a forward pass over all microbatches."""
        state = {"x": self._ring("x", self._stream), "stats": self.model.empty_statistics()}
        return self._scan(state)["stats"]

    @property
    def _present(self) -> list[str]:
        """Kinds of which there are layers."""
        return [kind for kind in self.table.kinds if self._bases[kind][-1]]

    def _scan(self, state: State) -> State:
        rank = lax.axis_index(AXIS)
        rows = {name: jnp.asarray(table)[:, rank] for name, table in self.table.rows.items()}
        pattern = jnp.asarray(self.table.pattern)
        return lax.scan(self._tick, state, (rows, pattern))[0]

    def _tick(self, state: State, inputs) -> tuple[State, None]:
        row, pattern = inputs
        state = _where(row["embed"] == 1, self._embed, state, row, ["x"])
        for number, flavour in enumerate(self.table.flavours):
            cell = partial(self._cell, flavour)
            state = _where(row["cell"] == number, cell, state, row, self._written(flavour))
        if self.table.forward_only:
            state = _where(row["head"] == 1, self._head, state, row, ["stats"])
        else:
            keys = ["g", "outer", "stats"]
            state = _where(row["head"] == 1, self._head_and_gradients, state, row, keys)
            gradient = self._embed_gradient
            state = _where(row["embed_gradient"] == 1, gradient, state, row, ["outer"])
        return self._exchange(state, row, pattern), None

    def _written(self, flavour: Flavour) -> list[str]:
        """Which entries of the state a cell changes."""
        keys: set[str] = set()
        for part in flavour:
            if part.kind is Kind.F:
                keys |= {"x", "stats"}
                keys |= set() if self.table.forward_only else {"residuals", "kept"}
            elif part.kind is Kind.B:
                keys |= {"g", "cut"}
            else:
                keys |= {"grads"} | ({"g"} if part.kind is Kind.BW else set())
        return sorted(keys)

    # Cells

    def _cell(self, flavour: Flavour, state: State, row: Row) -> State:
        """A cell's ops, each a list of steps, one per layer. Those of a pair take turns: two loops
        one after the other could not overlap."""
        works = [_Work(self, part, row) for part in flavour]
        for work in works:
            work.begin(state)
        if self._unrolled:
            for i in range(max(len(work.layers) for work in works)):
                for work in works:
                    if i < len(work.layers):
                        work.step(state, *work.layers[i])
        else:
            for steps in _in_step(works):
                _loop(state, steps)
        for work in works:
            work.end(state)
        return state

    def _embed(self, state: State, row: Row) -> State:
        x = self.model.embed(self.outer, row["F.microbatch"])
        state["x"] = _put(state["x"], x, row["F.x"])
        return state

    def _embed_gradient(self, state: State, row: Row) -> State:
        embed = partial(self.model.embed, microbatch=row["B.microbatch"])
        _, pullback = jax.vjp(embed, self.outer)
        (grads,) = pullback(_get(state["g"], row["B.dx"]))
        state["outer"] = _sum(state["outer"], grads)
        return state

    def _head(self, state: State, row: Row) -> State:
        x = _get(state["x"], row["F.y"])
        _, of_head = self.model.head(self.outer, x, row["F.microbatch"])
        state["stats"] = self.model.add_head(state["stats"], row["F.microbatch"], of_head)
        return state

    def _head_and_gradients(self, state: State, row: Row) -> State:
        """Logits live in here only: the gradient of the residual stream waits for B, not they."""
        head = partial(self.model.head, microbatch=row["F.microbatch"])
        gradient = jax.grad(head, argnums=(0, 1), has_aux=True)
        (grads, dx), of_head = gradient(self.outer, _get(state["x"], row["F.y"]))
        state["g"] = _put(state["g"], dx, row["F.g"])
        state["outer"] = _sum(state["outer"], grads)
        state["stats"] = self.model.add_head(state["stats"], row["F.microbatch"], of_head)
        return state

    def _exchange(self, state: State, row: Row, pattern: jax.Array) -> State:
        names = [f"{ring}.{c}" for ring, n in self.table.channels.items() for c in range(n)]
        names = [name for name in names if f"send.{name}" in row]
        if not names:
            return state
        sent = {name: _get(state[name[0]], row[f"send.{name}"]) for name in names}
        branches = [partial(_permute, dict(pairs)) for pairs in self.table.patterns]
        received = lax.switch(pattern, branches, sent)
        for name, value in received.items():
            state[name[0]] = _put(state[name[0]], value, row[f"receive.{name}"])
        return state

    # The state

    @property
    def _unrolled(self) -> bool:
        return all(isinstance(layers, list) for layers in self.weights.values())

    def _layer_weights(self, kind: str, place: int | jax.Array) -> Any:
        return _element(self.weights[kind], place)

    def _ring(self, ring: str, like: Any) -> Any:
        """An empty ring, with its spare slot."""
        slots = self.table.slots[ring] + 1
        return jax.tree.map(lambda a: jnp.zeros((slots, *a.shape), a.dtype), like)

    def _training_state(self) -> State:
        model = self.model
        state: State = {ring: self._ring(ring, self._stream) for ring in ("x", "g")}
        state |= {"residuals": {}, "kept": {}, "cut": {}, "grads": {}}
        for kind in self._present:
            split = self._splits[kind]
            values = {
                "residuals": _select(split.residuals, split.for_weights, False),
                "kept": _select(split.residuals, split.for_weights, True),
                "cut": list(split.cut),
            }
            for name, like in values.items():
                state[name][kind] = self._layer_rings(f"{name}.{kind}", kind, like)
            state["grads"][kind] = self._zero_gradients(kind)
        state["outer"] = jax.tree.map(_zeros_fp32, self.outer)
        state["stats"] = model.empty_statistics()
        return state

    def _layer_rings(self, ring: str, kind: str, like: list) -> Any:
        """Rings for the layers of one stage."""
        slots = self.table.slots.get(ring, 0)  # schedules without W cells need no cut
        layers = self._bases[kind][-1] and max(
            counts[self.table.kinds.index(kind)] for counts in self.table.stage_layers
        )
        if self._unrolled:
            return [[jnp.zeros((slots, *a.shape), a.dtype) for a in like] for _ in range(layers)]
        return [jnp.zeros((slots, layers, *a.shape), a.dtype) for a in like]

    def _zero_gradients(self, kind: str) -> Any:
        reduce = partial(self.model.reduce, kind)
        if self._unrolled:
            like = jax.eval_shape(reduce, self._layer_weights(kind, 0))
            return [jax.tree.map(_zeros_fp32, like) for _ in self.weights[kind]]
        like = jax.eval_shape(jax.vmap(reduce), self.weights[kind])
        return jax.tree.map(_zeros_fp32, like)


class _Work:
    """One op of a cell, layer by layer. Its running value is `state["F"]` (residual stream) or
    `state["B"]` (gradient)."""

    def __init__(self, pipeline: Pipeline, part: Part, row: Row):
        self.pipeline, self.part, self.row = pipeline, part, row
        self.letter = part.kind.value[0]
        kinds = pipeline.table.kinds
        self.layers = [
            (kind, j) for kind, n in zip(kinds, part.layers, strict=True) for j in range(n)
        ]
        if part.kind in (Kind.B, Kind.BW):
            self.layers.reverse()
        self.kinds = [kind for kind, n in zip(kinds, part.layers, strict=True) if n]
        self.offsets = {
            kind: sum(part.layers[:i]) for i, kind in enumerate(kinds)
        }

    def begin(self, state: State) -> None:
        """Fetches the input."""
        self.ctx = self.pipeline.model.context(self.row[f"{self.letter}.microbatch"])
        if self.part.kind is Kind.F:
            state["F"] = _get(state["x"], self.row["F.x"])
        elif self.part.kind is not Kind.W:
            state["B"] = _get(state["g"], self.row["B.g"])

    def step(self, state: State, kind: str, j: int | jax.Array) -> None:
        """Layer `j` of its kind on this stage."""
        pipeline = self.pipeline
        index = self.row[f"{self.letter}.first_layer"] + self.offsets[kind] + j
        side = pipeline.model.side(kind, self.ctx, index)
        place = pipeline._bases[kind][self.part.chunk] + j
        weights = pipeline._layer_weights(kind, place)
        {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.W: self._weight_gradients,
            Kind.BW: self._both,
        }[self.part.kind](state, kind, j, place, index, weights, side)

    def end(self, state: State) -> None:
        """Puts the output where the exchange, the head or the embedding finds it."""
        if self.part.kind is Kind.F:
            state["x"] = _put(state["x"], state.pop("F"), self.row["F.y"])
        elif self.part.kind is not Kind.W:
            state["g"] = _put(state["g"], state.pop("B"), self.row["B.dx"])

    def _forward(self, state, kind, j, place, index, weights, side) -> None:
        model = self.pipeline.model
        if self.pipeline.table.forward_only:
            state["F"], objective, stats = model.layer(kind, weights, state["F"], side)
        else:
            split = self.pipeline._splits[kind]
            state["F"], objective, stats, residuals = split.forward(weights, state["F"], side)
            for name, wanted in (("residuals", False), ("kept", True)):
                values = _select(residuals, split.for_weights, wanted)
                self._write(state, name, kind, j, values)
        state["stats"] = model.add_layer(state["stats"], kind, index, objective, stats)

    def _backward(self, state, kind, j, place, index, weights, side) -> None:
        split = self.pipeline._splits[kind]
        residuals = self._residuals(state, kind, j)
        state["B"], cut = split.backward(weights, side, residuals, state["B"])
        self._write(state, "cut", kind, j, cut)

    def _weight_gradients(self, state, kind, j, place, index, weights, side) -> None:
        split = self.pipeline._splits[kind]
        kept, cut = (self._read(state, name, kind, j) for name in ("kept", "cut"))
        self._add(state, kind, place, split.weight_gradients(weights, side, kept, cut))

    def _both(self, state, kind, j, place, index, weights, side) -> None:
        split = self.pipeline._splits[kind]
        residuals = self._residuals(state, kind, j)
        state["B"], grads = split.backward_both(weights, side, residuals, state["B"])
        self._add(state, kind, place, grads)

    def _residuals(self, state: State, kind: str, j) -> list[jax.Array]:
        """What F left, in its order."""
        split = self.pipeline._splits[kind]
        rest, kept = (iter(self._read(state, name, kind, j)) for name in ("residuals", "kept"))
        return [next(kept if wanted else rest) for wanted in split.for_weights]

    def _read(self, state: State, name: str, kind: str, j) -> list[jax.Array]:
        rings, slot = state[name][kind], self.row[f"{self.letter}.{name}.{kind}"]
        if self.pipeline._unrolled:
            return [_get(ring, slot) for ring in rings[j]]
        return [_get(ring, slot, j) for ring in rings]

    def _write(self, state: State, name: str, kind: str, j, values: list[jax.Array]) -> None:
        rings, slot = state[name][kind], self.row[f"{self.letter}.{name}.{kind}"]
        if self.pipeline._unrolled:
            written = [_put(r, v, slot) for r, v in zip(rings[j], values, strict=True)]
            rings = [written if i == j else ring for i, ring in enumerate(rings)]
        else:
            rings = [_put(r, v, slot, j) for r, v in zip(rings, values, strict=True)]
        state[name] = state[name] | {kind: rings}

    def _add(self, state: State, kind: str, place, grads) -> None:
        # Without the barrier XLA copies the accumulator's slice out to fuse the addition.
        grads = lax.optimization_barrier(self.pipeline.model.reduce(kind, grads))
        total = state["grads"][kind]
        if self.pipeline._unrolled:
            total = [_sum(t, grads) if i == place else t for i, t in enumerate(total)]
        else:
            layer = _element(total, place)
            total = jax.tree.map(
                lambda t, value: _put(t, value, place), total, _sum(layer, grads)
            )
        state["grads"] = state["grads"] | {kind: total}


def _bases(table: TickTable) -> dict[str, list[int]]:
    """For each kind of layer: where each chunk's weights begin, and how many there are."""
    schedule = table.schedule
    bases = {}
    for i, kind in enumerate(table.kinds):
        most = [0] * schedule.num_chunks
        for stage, counts in enumerate(table.stage_layers):
            chunk = schedule.chunk_of(stage)
            most[chunk] = max(most[chunk], counts[i])
        bases[kind] = [sum(most[:c]) for c in range(len(most) + 1)]
    return bases


def _in_step(works: list[_Work]) -> list[list[tuple[_Work, str, int]]]:
    """Loops over layers of one kind: each a list of (work, kind, layers). The ops of a pair share
    a loop where both are made of the same layers."""
    runs = [
        [(work, kind, sum(k == kind for k, _ in work.layers)) for kind in work.kinds]
        for work in works
    ]
    for work, run in zip(works, runs, strict=True):
        if work.part.kind in (Kind.B, Kind.BW):
            run.reverse()
    if len(runs) == 2 and [r[1:] for r in runs[0]] == [r[1:] for r in runs[1]]:
        return [list(pair) for pair in zip(*runs, strict=True)]
    return [[one] for run in runs for one in run]


def _loop(state: State, steps: list[tuple[_Work, str, int]]) -> None:
    """The works of `steps`, a layer of each at a time."""
    layers = steps[0][2]

    def body(state: State, i: jax.Array) -> tuple[State, None]:
        state = dict(state)
        for work, kind, _ in steps:
            backwards = work.part.kind in (Kind.B, Kind.BW)
            work.step(state, kind, layers - 1 - i if backwards else i)
        return state, None

    state.update(lax.scan(body, dict(state), jnp.arange(layers))[0])


def _where(
    flag: jax.Array, do: Callable[[State, Row], State], state: State, row: Row, keys: list[str]
) -> State:
    """`do` on the entries `keys` of the state, if `flag`; it only reads the others."""
    mine = {key: state[key] for key in keys}

    def run(mine: State) -> State:
        after = do(state | mine, row)
        return {key: after[key] for key in keys}

    return state | lax.cond(flag, run, lambda mine: mine, mine)


def _permute(pairs: dict[str, tuple[tuple[int, int], ...]], sent: State) -> State:
    return {
        name: lax.ppermute(value, AXIS, pairs[name]) if name in pairs else value
        for name, value in sent.items()
    }


def _get(ring: jax.Array, *place: jax.Array | int) -> jax.Array:
    """An element of the leading dims. Places are never negative, which XLA need not check."""
    starts = [*place, *[0] * (ring.ndim - len(place))]
    sizes = [*[1] * len(place), *ring.shape[len(place) :]]
    value = lax.dynamic_slice(ring, starts, sizes, allow_negative_indices=False)
    return value.reshape(ring.shape[len(place) :])


def _put(ring: jax.Array, value: jax.Array, *place: jax.Array | int) -> jax.Array:
    starts = [*place, *[0] * (ring.ndim - len(place))]
    value = value.astype(ring.dtype).reshape([1] * len(place) + list(ring.shape[len(place) :]))
    return lax.dynamic_update_slice(ring, value, starts, allow_negative_indices=False)


def _element(layers: Any, place: int | jax.Array) -> Any:
    """Weights of one layer."""
    if isinstance(layers, list):
        return layers[place]
    return jax.tree.map(lambda a: _get(a, place), layers)


def _select(values, flags, wanted: bool) -> list:
    return [value for value, flag in zip(values, flags, strict=True) if flag == wanted]


def _sum(total: Any, grads: Any) -> Any:
    return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)


def _zeros_fp32(like: Any) -> jax.Array:
    return jnp.zeros(like.shape, jnp.promote_types(like.dtype, jnp.float32))
