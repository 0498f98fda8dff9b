"""Running a tick table: one program for all ranks of the `pp` axis, a scan over ticks.

In a tick, each kind of cell sits in a loop of its own, which the ranks that have such a cell now
run through once and the others not at all. What the cell changes is the loop's carry, which XLA
updates in place: of a `cond` it copied 1.6 GiB of gradients where the flag was false. After the
cells comes an exchange: a `switch` that all ranks take the same way, whose branches have exactly
the pairs of ranks that have something to send. So a rank waits only for whom it needs.

Collectives over other axes may sit in layers, since all ranks of a stage run the same cells.
A `ppermute` may not: XLA can pair it with that of another branch (use `all_to_all`).

Names in the carried state: `x` and `g` rings [slots, ...]; `outer`, gradients of what is not in a
layer; `stats`. With a scanned layer loop: `residuals/KIND`, `kept/KIND`, `cut/KIND`, lists of rings
[slots, layers, ...]; `grads/GROUP/CHUNK`. With an unrolled one each layer has its own: rings
`residuals/KIND/LAYER` [slots, ...] by the layer's number on its stage, `grads/GROUP/PLACE`. A cell
gets only those that it changes: XLA copies what a `cond` merely passes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.pipeline.gradient_sums import add, sum_dtype, zero_sums
from mxjax.pipeline.schedule import Kind
from mxjax.pipeline.split import LayerSplit, split_layer
from mxjax.pipeline.ticks import Flavour, Part, TickTable

AXIS = "pp"

State = dict[str, Any]
Row = dict[str, jax.Array]
Weights = dict[str, Any]
"""For each group of layers, weights of this rank's layers, chunk after chunk: a list of trees, or
one tree stacked along a first dim. Every chunk takes as many places as the largest on any rank."""


class StagedModel(Protocol):
    """A model as the pipeline sees it. `outer` is the tree of all weights that are not in layers,
    `ctx` whatever the layers of one microbatch share."""

    def stream(self) -> jax.ShapeDtypeStruct:
        """Shape of the residual stream of a microbatch on one rank."""

    def context(self, microbatch: jax.Array) -> Any:
        """Side inputs of a microbatch."""

    def side(self, kind: str, ctx: Any, index: jax.Array) -> Any:
        """Side inputs of the layer with this number in the model."""

    def layer(self, kind: str, weights: Any, x: jax.Array, side: Any) -> tuple:
        """Output like `x`, scalar objective, statistics."""

    def offloaded(self, kind: str) -> Collection[str]:
        """Names of what such a layer leaves in the host's memory (executor stagewise)."""

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

    @property
    def reduces(self) -> bool:
        """Whether that is another form; if not, what makes them may add them to the sums."""


class Pipeline:
    """A model, a table and weights, inside `shard_map`.

    Args:
      weights: of the layers; see `Weights`.
      outer: weights of embedding and head, whole, on every rank.
    """

    def __init__(self, model: StagedModel, table: TickTable, weights: Weights, outer: Any):
        self.model, self.table, self.weights, self.outer = model, table, weights, outer
        self._stream = model.stream()
        self._bases = table.stacks.bases
        self._splits: dict[str, LayerSplit] = {}

    def train(self) -> tuple[Weights, Any, Any]:
        """Gradients of `weights`, of `outer`, and statistics: this rank's sums over all
        microbatches, in fp32."""
        for kind in self._present:
            ctx = self.model.context(jnp.int32(0))
            side = self.model.side(kind, ctx, jnp.int32(0))
            group = self.table.stacks.group(kind)
            example = self._layer_weights(group, self._chunk_with(group), 0)
            x = jnp.zeros(self._stream.shape, self._stream.dtype)
            layer = partial(self.model.layer, kind)
            self._splits[kind] = split_layer(layer, example, x, side)
        state = self._scan(self._training_state())
        return self._gradients(state), state["outer"], state["stats"]

    def evaluate(self) -> Any:
        """Statistics of a forward pass over all microbatches."""
        state = {"x": self._ring("x", self._stream), "stats": self.model.empty_statistics()}
        return self._scan(state)["stats"]

    @property
    def _present(self) -> list[str]:
        """Kinds of which there are layers."""
        return [kind for kind, number in self.table.stacks.kinds.items() if number]

    @property
    def _groups(self) -> list[str]:
        """Groups of which there are layers."""
        return [group for group, bases in self._bases.items() if bases[-1]]

    def _scan(self, state: State) -> State:
        rank = lax.axis_index(AXIS)
        rows = {name: jnp.asarray(table)[:, rank] for name, table in self.table.rows.items()}
        pattern = jnp.asarray(self.table.pattern)
        return lax.scan(self._tick, state, (rows, pattern))[0]

    def _tick(self, state: State, inputs) -> tuple[State, None]:
        row, pattern = inputs
        for number, flavour in enumerate(self.table.flavours):
            cell = partial(self._cell, flavour)
            state = _where(row["cell"] == number, cell, state, row, self._written(flavour))
        return self._exchange(state, row, pattern), None

    def _written(self, flavour: Flavour) -> list[str]:
        """Which entries of the state a cell changes."""
        keys: set[str] = set()
        for part in flavour:
            works = part.layers_of(self.table.stacks)
            if part.kind is Kind.F:
                keys |= {"x", "stats"}
                if not self.table.forward_only:
                    names = ("residuals", "kept")
                    keys |= {self._ring_key(name, *work) for name in names for work in works}
                    keys |= {"g", "outer"} if self._may_have_head(part) else set()
                continue
            if part.kind is not Kind.W:
                keys |= {"g"} | ({"outer"} if self._may_have_embedding(part) else set())
            if part.kind is Kind.B:
                keys |= {self._ring_key("cut", *work) for work in works}
            else:
                keys |= {self._grads_key(part, *work) for work in works}
        return sorted(keys)

    def _ring_key(self, name: str, kind: str, j: int | jax.Array) -> str:
        return f"{name}/{kind}/{j}" if self._unrolled else f"{name}/{kind}"

    def _grads_key(self, part: Part, kind: str, j: int | jax.Array) -> str:
        group, place = part.place(kind, j, self.table.stacks)
        chunk = part.chunk
        return f"grads/{group}/{self._bases[group][chunk] + place if self._unrolled else chunk}"

    def _may_have_embedding(self, part: Part) -> bool:
        return self._may_be(part, 0)

    def _may_have_head(self, part: Part) -> bool:
        return self._may_be(part, self.table.schedule.num_stages - 1)

    def _may_be(self, part: Part, stage: int) -> bool:
        """Whether cells with this part include those of `stage`."""
        layers = self.table.stacks.stage_layers[stage]
        return (part.chunk, part.layers) == (self.table.schedule.chunk_of(stage), layers)

    # Cells

    def _cell(self, flavour: Flavour, state: State, row: Row) -> State:
        """A cell's ops, each a list of steps, one per layer. Those of a pair take turns: two loops
        one after the other could not overlap."""
        works = [_Work(self, part, row) for part in flavour]
        for work in works:
            if work.part.kind is Kind.F and self._may_have_embedding(work.part):
                state.update(_where(row["embed"] == 1, self._embed, state, row, ["x"]))
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
        for part in flavour:
            state = self._around(part, state, row)
        return state

    def _around(self, part: Part, state: State, row: Row) -> State:
        """What follows the layers: the head, the gradient of the embedding."""
        if part.kind is Kind.F and self._may_have_head(part):
            if self.table.forward_only:
                return _where(row["head"] == 1, self._head, state, row, ["stats"])
            keys = ["g", "outer", "stats"]
            return _where(row["head"] == 1, self._head_and_gradients, state, row, keys)
        if part.kind in (Kind.B, Kind.BW) and self._may_have_embedding(part):
            gradient = self._embed_gradient
            return _where(row["embed_gradient"] == 1, gradient, state, row, ["outer"])
        return state

    def _embed(self, state: State, row: Row) -> State:
        x = self.model.embed(self.outer, row["F.microbatch"])
        state["x"] = _put(state["x"], x, row["F.x"])
        return state

    def _embed_gradient(self, state: State, row: Row) -> State:
        embed = partial(self.model.embed, microbatch=row["B.microbatch"])
        _, pullback = jax.vjp(embed, self.outer)
        (grads,) = pullback(_get(state["g"], row["B.dx"]))
        state["outer"] = add(state["outer"], grads)
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
        state["outer"] = add(state["outer"], grads)
        state["stats"] = self.model.add_head(state["stats"], row["F.microbatch"], of_head)
        return state

    def _exchange(self, state: State, row: Row, pattern: jax.Array) -> State:
        names = [f"{ring}.{c}" for ring, n in self.table.channels.items() for c in range(n)]
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

    def _layer_weights(self, group: str, chunk: int, place: int | jax.Array) -> Any:
        base, end = self._bases[group][chunk : chunk + 2]
        if self._unrolled:
            return self.weights[group][base + place]
        return jax.tree.map(lambda a: _get(a[base:end], place), self.weights[group])

    def _ring(self, ring: str, like: Any) -> Any:
        """An empty ring, with its spare slot."""
        slots = self.table.slots[ring] + 1
        return jax.tree.map(lambda a: jnp.zeros((slots, *a.shape), a.dtype), like)

    def _training_state(self) -> State:
        state: State = {ring: self._ring(ring, self._stream) for ring in ("x", "g")}
        state["outer"] = zero_sums(self.outer)
        state["stats"] = self.model.empty_statistics()
        for kind in self._present:
            for name in ("residuals", "kept", "cut"):
                state |= self._layer_rings(name, kind)
        for group in self._groups:
            state |= self._zero_gradients(group)
        return state

    def _layer_values(self, name: str, kind: str) -> list[jax.ShapeDtypeStruct]:
        """What one layer puts into the rings of this name."""
        split = self._splits[kind]
        return list(split.cut) if name == "cut" else _of_ring(name, split, split.residuals)

    def _layer_rings(self, name: str, kind: str) -> State:
        """Rings for the layers of one stage. Elements are flat: XLA would choose other layouts for
        them in F than in B, and rearrange whole rings in between."""
        like = self._layer_values(name, kind)
        slots = self.table.slots.get(f"{name}.{kind}", 0)  # without W cells there is no cut
        k = list(self.table.stacks.kinds).index(kind)
        layers = max(counts[k] for counts in self.table.stacks.stage_layers)
        if self._unrolled:
            return {
                self._ring_key(name, kind, j): [jnp.zeros((slots, a.size), a.dtype) for a in like]
                for j in range(layers)
            }
        rings = [jnp.zeros((slots, layers, a.size), a.dtype) for a in like]
        return {self._ring_key(name, kind, 0): rings}

    def _zero_gradients(self, group: str) -> State:
        bases = self._bases[group]
        example = self._layer_weights(group, self._chunk_with(group), 0)
        like = jax.eval_shape(partial(self.model.reduce, group), example)
        if self._unrolled:
            return {f"grads/{group}/{place}": zero_sums(like) for place in range(bases[-1])}
        return {
            f"grads/{group}/{chunk}": jax.tree.map(
                lambda a, n=bases[chunk + 1] - base: jnp.zeros((n, *a.shape), sum_dtype(a)), like
            )
            for chunk, base in enumerate(bases[:-1])
        }

    def _chunk_with(self, group: str) -> int:
        """The first chunk that has such layers."""
        bases = self._bases[group]
        return next(c for c in range(len(bases) - 1) if bases[c + 1] > bases[c])

    def _gradients(self, state: State) -> Weights:
        """The sums in the form of the weights."""
        grads: Weights = {}
        for group in self._groups:
            bases = self._bases[group]
            parts = bases[-1] if self._unrolled else len(bases) - 1
            trees = [state[f"grads/{group}/{part}"] for part in range(parts)]
            if not self._unrolled:
                trees = jax.tree.map(lambda *a: jnp.concatenate(a), *trees)
            grads[group] = trees
        return grads


class _Work:
    """One op of a cell, layer by layer. Its running value is `state["F"]` (residual stream) or
    `state["B"]` (gradient)."""

    def __init__(self, pipeline: Pipeline, part: Part, row: Row):
        self.pipeline, self.part, self.row = pipeline, part, row
        self.letter = part.kind.value[0]
        self.layers = part.layers_of(pipeline.table.stacks)

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
        before = self.part.layers_before(kind, pipeline.table.stacks)
        index = self.row[f"{self.letter}.first_layer"] + before + j
        side = pipeline.model.side(kind, self.ctx, index)
        group, place = self.part.place(kind, j, pipeline.table.stacks)
        weights = pipeline._layer_weights(group, self.part.chunk, place)
        {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.W: self._weight_gradients,
            Kind.BW: self._both,
        }[self.part.kind](state, kind, j, index, weights, side)

    def end(self, state: State) -> None:
        """Puts the output where the exchange, the head or the embedding finds it."""
        if self.part.kind is Kind.F:
            state["x"] = _put(state["x"], state.pop("F"), self.row["F.y"])
        elif self.part.kind is not Kind.W:
            state["g"] = _put(state["g"], state.pop("B"), self.row["B.dx"])

    def _forward(self, state, kind, j, index, weights, side) -> None:
        model = self.pipeline.model
        if self.pipeline.table.forward_only:
            state["F"], objective, stats = model.layer(kind, weights, state["F"], side)
        else:
            split = self.pipeline._splits[kind]
            state["F"], objective, stats, residuals = split.forward(weights, state["F"], side)
            for name in ("residuals", "kept"):
                self._write(state, name, kind, j, _of_ring(name, split, residuals))
        state["stats"] = model.add_layer(state["stats"], kind, index, objective, stats)

    def _backward(self, state, kind, j, index, weights, side) -> None:
        split = self.pipeline._splits[kind]
        residuals = self._residuals(state, kind, j)
        state["B"], cut = split.backward(weights, side, residuals, state["B"])
        self._write(state, "cut", kind, j, cut)

    def _weight_gradients(self, state, kind, j, index, weights, side) -> None:
        split = self.pipeline._splits[kind]
        kept, cut = (self._read(state, name, kind, j) for name in ("kept", "cut"))
        self._add(state, kind, j, split.weight_gradients(weights, side, kept, cut))

    def _both(self, state, kind, j, index, weights, side) -> None:
        split = self.pipeline._splits[kind]
        residuals = self._residuals(state, kind, j)
        state["B"], grads = split.backward_both(weights, side, residuals, state["B"])
        self._add(state, kind, j, grads)

    def _residuals(self, state: State, kind: str, j) -> list[jax.Array]:
        """What F left, in its order."""
        split = self.pipeline._splits[kind]
        rest, kept = (iter(self._read(state, name, kind, j)) for name in ("residuals", "kept"))
        return [next(kept if wanted else rest) for wanted in split.for_weights]

    def _read(self, state: State, name: str, kind: str, j) -> list[jax.Array]:
        rings = state[self.pipeline._ring_key(name, kind, j)]
        shapes = self.pipeline._layer_values(name, kind)
        slot = self._slot(name, kind, j)
        return [_get(r, *slot).reshape(a.shape) for r, a in zip(rings, shapes, strict=True)]

    def _write(self, state: State, name: str, kind: str, j, values: list[jax.Array]) -> None:
        key = self.pipeline._ring_key(name, kind, j)
        slot = self._slot(name, kind, j)
        state[key] = [_put(r, v, *slot) for r, v in zip(state[key], values, strict=True)]

    def _slot(self, name: str, kind: str, j) -> tuple:
        slot = self.row[f"{self.letter}.{name}.{kind}"]
        return (slot,) if self.pipeline._unrolled else (slot, j)

    def _add(self, state: State, kind: str, j, grads) -> None:
        pipeline = self.pipeline
        key = pipeline._grads_key(self.part, kind, j)
        _, place = self.part.place(kind, j, pipeline.table.stacks)
        total, grads = state[key], pipeline.model.reduce(kind, grads)
        if pipeline._unrolled:
            state[key] = add(total, grads)
            return
        # Without the barrier XLA copies the accumulator's slice out to fuse the addition.
        grads = lax.optimization_barrier(grads)
        layer = add(jax.tree.map(lambda t: _get(t, place), total), grads)
        state[key] = jax.tree.map(lambda t, value: _put(t, value, place), total, layer)


def _in_step(works: list[_Work]) -> list[list[tuple[_Work, str, int]]]:
    """Loops over layers of one kind: each a list of (work, kind, layers). The ops of a pair share
    a loop where both are made of the same layers."""
    runs = [
        [(work, kind, n) for kind, n in Counter(kind for kind, _ in work.layers).items()]
        for work in works
    ]
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

    return state | lax.fori_loop(0, flag.astype(jnp.int32), lambda _, mine: run(mine), mine)


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


def _of_ring(name: str, split: LayerSplit, residuals) -> list:
    """Those that go into the rings `kept`, or the others."""
    if name == "kept":
        return split.kept_of(residuals)
    return [r for r, needed in zip(residuals, split.for_weights, strict=True) if not needed]
