"""Running a schedule as many programs: each cell is a program of its rank's devices alone.

The other executor over the same schedules and the same layer split. For each rank a thread of the
host walks through its cells and sends off one compiled program for each; devices run ahead on their
own, and a rank waits only for what it needs. What layers leave for their backward passes are plain
arrays, which no ring copies. It is for one process that drives all devices, and for cells long
enough that the host keeps ahead.

What layers offload is in the host's memory between programs. F sends it there as soon as it is
made; B and W fetch it layer by layer, the next layer's while one is computed.

Every array between programs is that of one device with a leading dim for the devices of the rank
(`Stagewise._varying`): programs are fully manual, and nothing is equal on several devices that need
be known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from threading import Condition, Lock
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mxjax.pipeline.executor import StagedModel
from mxjax.pipeline.gradient_sums import add, zero_sums
from mxjax.pipeline.schedule import Cell, Kind, Op, Schedule
from mxjax.pipeline.send_order import awaited
from mxjax.pipeline.simulate import Costs
from mxjax.pipeline.split import LayerSplit, split_layer
from mxjax.pipeline.stacks import Stacks
from mxjax.pipeline.ticks import Part

AXIS = "pp"

_SUMS = ("grads", "outer", "stats")
"""Over microbatches: of layers' gradients, of other gradients, and of statistics."""

_WITHOUT_GRAPHS = {"xla_gpu_graph_min_graph_size": "100000"}
"""Each call of a program has other buffers, for which its CUDA graphs would have to be updated."""


class Stagewise:
    """Programs of a schedule on a mesh.

    Args:
      make_model: inputs of a step (batch, keys, ...) on one device -> the model.
      mesh: with `AXIS` as its first axis.
      costs: of F, B and W, for the order in which the host sends things off.
    """

    def __init__(
        self,
        make_model: Callable[[Any], StagedModel],
        schedule: Schedule,
        stacks: Stacks,
        mesh: Mesh,
        compiler_options: Mapping[str, Any] = MappingProxyType({}),
        costs: Costs | None = None,
    ):
        self._options = dict(compiler_options)
        platform = mesh.devices.flat[0].platform
        self._on_cpu = platform == "cpu"
        if platform == "gpu":
            self._options |= _WITHOUT_GRAPHS
        self.make_model, self.schedule, self.stacks = make_model, schedule, stacks
        self.mesh = mesh
        sizes = [sum(counts) for counts in stacks.stage_layers]
        self._awaited = awaited(schedule, costs, sizes)
        self.meshes = [
            Mesh(mesh.devices[rank : rank + 1], mesh.axis_names) for rank in range(mesh.shape[AXIS])
        ]
        self._varying = PartitionSpec(mesh.axis_names)
        self._threads = ThreadPoolExecutor(len(self.meshes), thread_name_prefix="stage")
        self._splits: dict[str, LayerSplit] = {}
        self._splitting = Lock()
        self._programs: dict[tuple[str, int], Callable] = {}
        self._first_runs = Lock()
        self._numbers: dict[tuple[int, int], jax.Array] = {}

    def train(self, inputs: Any, layers: Any, outer: Any) -> tuple[Any, Any, Any]:
        """Gradients of `layers` (lists by group, one tree for each place), of `outer`, and
        statistics: sums over all microbatches of each device.

        All arguments and results are arrays over the whole mesh with a leading dim for devices.
        """
        streams = _Streams()
        walk = partial(self._walk, streams, jax.config.jax_default_matmul_precision)
        ranks = range(len(self.meshes))
        walks = [self._threads.submit(walk, rank, inputs, layers, outer) for rank in ranks]
        wait(walks)
        streams.check()
        sums = [walk.result() for walk in walks]
        return tuple(self._joined([of_rank[name] for of_rank in sums]) for name in _SUMS)

    def over_mesh(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """A program of all devices; None as specs: arrays with a leading dim for devices."""

        def shard(*arguments):
            if in_specs is None:
                arguments = jax.tree.map(lambda a: a[0], arguments)
            results = function(*arguments)
            return jax.tree.map(lambda a: a[None], results) if out_specs is None else results

        return jax.jit(
            jax.shard_map(
                shard,
                mesh=self.mesh,
                in_specs=self._varying if in_specs is None else in_specs,
                out_specs=self._varying if out_specs is None else out_specs,
                check_vma=False,
            )
        )

    def _walk(self, streams: _Streams, precision: str | None, rank: int, *arguments) -> Any:
        """Sends off all cells of a rank; its sums. Threads do not inherit JAX's settings:
        `precision`."""
        try:
            with jax.default_matmul_precision(precision):
                # Not all at once: the first rank's devices are to begin soon.
                streams.wait_for(self._awaited[rank][0])
                run = _Rank(*(self._of_rank(tree, rank) for tree in arguments))
                for n, cell in enumerate(self.schedule.cells[rank]):
                    streams.wait_for(self._awaited[rank][n])
                    self._run(run, rank, cell, streams)
                return {name: self._take_sum(run, rank, name) for name in _SUMS}
        except BaseException as error:
            streams.fail(error)

    def _take_sum(self, run: _Rank, rank: int, name: str) -> Any:
        """To be added to. Zeros are made when they are needed: the first ranks' then, while they
        wait for gradients."""
        if name not in run.sums:
            zeros = self._program(f"zero_{name}", partial(self._zeros, name), rank)
            return zeros(run.inputs, run.layers, run.outer)
        return run.sums.pop(name)

    def _run(self, run: _Rank, rank: int, cell: Cell, streams: _Streams) -> None:
        """Sends off one cell, and its results on their way."""
        stages = tuple((op.kind, op.stage) for op in cell)
        of_cell = "_".join(f"{kind.value}{stage}" for kind, stage in stages)
        program = self._program(of_cell, partial(self._cell, stages), rank, donate=(0,))
        given: list[Any] = []
        for op in cell:
            name = (op.stage, op.microbatch)
            if op.kind is Kind.F:
                given.append({"x": streams.take(op) if op.stage else None})
            elif op.kind is Kind.W:
                given.append({"kept": run.kept.pop(name), "cut": run.cut.pop(name)})
            else:
                dy = streams.take(op.parts[0])
                given.append({"dy": dy, "residuals": run.residuals.pop(name)})
                if op.kind is Kind.BW:
                    run.kept.pop(name)
        sums = {name: self._take_sum(run, rank, name) for name in self._added_to(stages)}
        microbatches = [self._number(rank, op.microbatch) for op in cell]
        held = run.layers, run.outer, run.inputs
        sums, results = program(sums, held, microbatches, given)
        run.sums |= sums
        for op, result in zip(cell, results, strict=True):
            name = (op.stage, op.microbatch)
            if op.kind is Kind.F:
                run.residuals[name] = result["residuals"]
                run.kept[name] = {
                    layer: self._splits[layer.rpartition("/")[0]].kept_of(values)
                    for layer, values in result["residuals"].items()
                }
                self._send(result, op, streams)
            elif op.kind is not Kind.W:
                if op.kind is Kind.B:
                    run.cut[name] = result["cut"]
                self._send(result, op, streams)

    def _send(self, result: dict[str, Any], op: Op, streams: _Streams) -> None:
        last = self.schedule.num_stages - 1
        if op.kind is Kind.F:
            if op.stage == last:
                streams.put(Op(Kind.B, op.stage, op.microbatch), result["dy"])
                return
            user, value = Op(Kind.F, op.stage + 1, op.microbatch), result["y"]
        elif op.stage == 0:
            return
        else:
            user, value = Op(Kind.B, op.stage - 1, op.microbatch), result["dx"]
        target = self.meshes[self.schedule.stage_to_rank[user.stage]]
        streams.put(user, jax.device_put(value, NamedSharding(target, self._varying)))

    # Programs

    def _program(self, name: str, function: Callable, rank: int, donate=()) -> Callable:
        """`function` on the devices of a rank, compiled once."""
        if (name, rank) not in self._programs:

            def shard(*arguments):
                results = function(*jax.tree.map(lambda a: a if _on_host(a) else a[0], arguments))
                return jax.tree.map(lambda a: a if _on_host(a) else a[None], results)

            shard.__name__ = name  # what profiles show
            jitted = jax.jit(
                jax.shard_map(
                    shard,
                    mesh=self.meshes[rank],
                    in_specs=self._varying,
                    out_specs=self._varying,
                    check_vma=False,
                ),
                donate_argnums=donate,
                compiler_options=self._options,
            )
            self._programs[name, rank] = _Program(jitted, self._first_runs, waits=self._on_cpu)
        return self._programs[name, rank]

    def _zeros(self, name: str, inputs, layers, outer):
        model = self.make_model(inputs)
        if name == "stats":
            return model.empty_statistics()
        if name == "outer":
            return zero_sums(outer)
        return {
            group: [zero_sums(jax.eval_shape(partial(model.reduce, group), tree)) for tree in trees]
            for group, trees in layers.items()
        }

    def _added_to(self, stages) -> list[str]:
        """Those of the sums that a cell adds to."""
        last = self.schedule.num_stages - 1
        added = {
            "grads": any(kind in (Kind.W, Kind.BW) for kind, _ in stages),
            "outer": (Kind.F, last) in stages
            or any(kind in (Kind.B, Kind.BW) and stage == 0 for kind, stage in stages),
            "stats": any(kind is Kind.F for kind, _ in stages),
        }
        return [name for name in _SUMS if added[name]]

    def _cell(self, stages: tuple, sums, held, microbatches, given):
        """One cell: all its ops, layer by layer in turn."""
        layers, outer, inputs = held
        state = {name: dict(of) if name == "grads" else of for name, of in sums.items()}
        model = self.make_model(inputs)
        works = [
            _Work(self, model, layers, outer, kind, stage, microbatch, values)
            for (kind, stage), microbatch, values in zip(stages, microbatches, given, strict=True)
        ]
        for work in works:
            work.begin()
        for i in range(max(len(work.layers) for work in works)):
            for work in works:
                if i < len(work.layers):
                    work.step(state, i)
        results = [work.end(state) for work in works]
        return state, results

    def split(self, model: StagedModel, kind: str, weights, x, side) -> LayerSplit:
        """F, B and W of a kind of layer; made by the first program that has one."""
        with self._splitting:
            if kind not in self._splits:
                layer, offload = partial(model.layer, kind), model.offloaded(kind)
                self._splits[kind] = split_layer(
                    layer, weights, x, side, offload, fp32_gradients=not self._on_cpu
                )
            return self._splits[kind]

    # Arrays

    def _number(self, rank: int, microbatch: int) -> jax.Array:
        """The number of a microbatch on the devices of a rank. Kept, and made on the host: made on
        a device, it would wait there for all work that was sent off before."""
        key = (rank, microbatch)
        if key not in self._numbers:
            mesh = self.meshes[rank]
            value = np.full((mesh.size,), microbatch, np.int32)
            self._numbers[key] = jax.device_put(value, NamedSharding(mesh, self._varying))
        return self._numbers[key]

    def _of_rank(self, tree: Any, rank: int) -> Any:
        """The part of arrays over the whole mesh that a rank has, without a copy."""
        mesh = self.meshes[rank]
        devices, sharding = set(mesh.devices.flat), NamedSharding(mesh, self._varying)

        def part(array: jax.Array) -> jax.Array:
            shards = [s.data for s in array.addressable_shards if s.device in devices]
            shape = (mesh.size, *array.shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, shards)

        return jax.tree.map(part, tree)

    def _joined(self, trees: list[Any]) -> Any:
        """The inverse, for all ranks."""
        sharding = NamedSharding(self.mesh, self._varying)

        def join(*parts: jax.Array) -> jax.Array:
            shards = [s.data for part in parts for s in part.addressable_shards]
            shape = (self.mesh.size, *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, shards)

        return jax.tree.map(join, *trees)


def _on_host(array: jax.Array) -> bool:
    """Also of an array that is traced."""
    return jax.typeof(array).memory_space is jax.memory.Space.Host


class _Program:
    """A jitted function, for arguments of the types of the first call.

    Threads compile at the same time, but a first run is alone among first runs: there cuDNN
    captures graphs, which was seen to fail in two threads ("capturing stream has unjoined work").
    """

    def __init__(self, jitted: Any, first_runs: Lock, *, waits: bool = False):
        """`waits`: for its results. On a CPU, which computes with a few threads, programs that were
        sent off ahead can take all of them, while the collectives in which they are wait for
        devices that have none."""
        self.lower, self._first_runs, self._waits = jitted.lower, first_runs, waits
        self._compiled: Callable | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is not None:
            results = self._compiled(*arguments)
            return jax.block_until_ready(results) if self._waits else results
        compiled = self.lower(*arguments).compile()
        with self._first_runs:
            results = jax.block_until_ready(compiled(*arguments))
        self._compiled = compiled
        return results


class _Rank:
    """What a rank holds while a step runs."""

    def __init__(self, inputs, layers, outer):
        self.inputs, self.layers, self.outer = inputs, layers, outer
        self.sums: dict[str, Any] = {}
        self.residuals: dict[tuple[int, int], Any] = {}
        self.kept: dict[tuple[int, int], Any] = {}
        self.cut: dict[tuple[int, int], Any] = {}


class _Streams:
    """Inputs of ops on the devices of their rank, from the threads that make them to those that
    need them."""

    def __init__(self) -> None:
        self._there: dict[Op, Any] = {}
        self._error: BaseException | None = None
        self._changed = Condition()

    def put(self, op: Op, value: Any) -> None:
        """Leaves the input of `op`."""
        with self._changed:
            self._there[op] = value
            self._changed.notify_all()

    def wait_for(self, ops: Sequence[Op]) -> None:
        """Waits until the inputs of `ops` are there, if only as promises of their devices."""
        with self._changed:
            for op in ops:
                self._changed.wait_for(lambda op=op: op in self._there or self._error is not None)
                self.check()

    def take(self, op: Op) -> Any:
        """Waits until it is there."""
        self.wait_for([op])
        with self._changed:
            return self._there.pop(op)

    def fail(self, error: BaseException) -> None:
        """Ends all waiting: a thread cannot go on. The first error is the cause of the others."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what made a thread fail."""
        if self._error is not None:
            raise self._error


class _Work:
    """One op of a cell while it is traced."""

    def __init__(self, owner, model, layers, outer, kind, stage, microbatch, given):
        self.owner, self.model, self.weights, self.outer = owner, model, layers, outer
        self.kind, self.stage, self.microbatch, self.given = kind, stage, microbatch, given
        stacks: Stacks = owner.stacks
        self.part = Part(kind, owner.schedule.chunk_of(stage), stacks.stage_layers[stage])
        self.layers = self.part.layers_of(stacks)
        self.made: dict[str, Any] = {}

    def begin(self) -> None:
        self.ctx = self.model.context(self.microbatch)
        if self.kind is Kind.F:
            first = self.stage == 0
            self.x = self.model.embed(self.outer, self.microbatch) if first else self.given["x"]
        else:
            self.x = self.given.get("dy")
        self.fetch(0)

    def fetch(self, i: int) -> None:
        """Brings what F left of the layer that comes as number i, not before `self.x` is there:
        left to itself, XLA would fetch all layers' first."""
        if self.kind is Kind.F or i == len(self.layers):
            return
        kind, j = self.layers[i]
        values = self.given["kept" if self.kind is Kind.W else "residuals"][f"{kind}/{j}"]
        away = [value for value in values if _on_host(value)]
        if away:
            away, self.x = lax.optimization_barrier((away, self.x))
        fetched = (jax.device_put(value, jax.memory.Space.Device)[0] for value in away)
        self.fetched = [next(fetched) if _on_host(value) else value for value in values]

    def step(self, state, i: int) -> None:
        stacks = self.owner.stacks
        kind, j = self.layers[i]
        before = stacks.first_layer(self.stage) + self.part.layers_before(kind, stacks)
        index = jnp.int32(before + j)
        side = self.model.side(kind, self.ctx, index)
        group, place = self.part.place(kind, j, stacks)
        place += stacks.bases[group][self.part.chunk]
        weights, name = self.weights[group][place], f"{kind}/{j}"
        if self.kind is Kind.F:
            split = self.owner.split(self.model, kind, weights, self.x, side)
            self.x, objective, stats, residuals = split.forward(weights, self.x, side)
            self.made[name] = [
                jax.device_put(value[None], jax.memory.Space.Host) if away else value
                for value, away in zip(residuals, split.on_host, strict=True)
            ]
            state["stats"] = self.model.add_layer(state["stats"], kind, index, objective, stats)
            return
        split: LayerSplit = self.owner._splits[kind]
        residuals = self.fetched
        self.fetch(i + 1)
        if self.kind is Kind.B:
            self.x, self.made[name] = split.backward(weights, side, residuals, self.x)
            return
        sums = list(state["grads"][group])
        into = None if self.model.reduces else sums[place]
        if self.kind is Kind.W:
            cut = self.given["cut"][name]
            grads = split.weight_gradients(weights, side, residuals, cut, into)
            self.x = min(jax.tree.leaves(grads), key=lambda leaf: leaf.size)  # see `fetch`
        else:
            self.x, grads = split.backward_both(weights, side, residuals, self.x, into)
        if self.model.reduces:
            grads = add(sums[place], self.model.reduce(kind, grads))
        sums[place] = grads
        state["grads"][group] = sums

    def end(self, state) -> dict[str, Any]:
        """What goes out of the cell."""
        if self.kind is Kind.F:
            if self.stage < self.owner.schedule.num_stages - 1:
                return {"y": self.x, "residuals": self.made}
            head = partial(self.model.head, microbatch=self.microbatch)
            gradient = jax.grad(head, argnums=(0, 1), has_aux=True)
            (grads, dy), of_head = gradient(self.outer, self.x)
            state["outer"] = add(state["outer"], grads)
            state["stats"] = self.model.add_head(state["stats"], self.microbatch, of_head)
            return {"dy": dy, "residuals": self.made}
        if self.kind is Kind.W:
            return {}
        if self.stage == 0:
            embed = partial(self.model.embed, microbatch=self.microbatch)
            _, pullback = jax.vjp(embed, self.outer)
            state["outer"] = add(state["outer"], pullback(self.x)[0])
        cut = {"cut": self.made} if self.kind is Kind.B else {}
        return cut if self.stage == 0 else cut | {"dx": self.x}
