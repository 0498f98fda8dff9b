"""The ranks of a pipeline of two, each by itself on one GPU: what they wait for is there already.

    python benchmarks/pipeline_rank.py [--schedules 1f1b,zbh1,...] [other options of pipeline.py]

The stagewise executor sends off the cells of one rank, in the order of the schedule, and gives them
made-up numbers where another rank would have sent something. That is the time in which a rank
works, with what the host adds: a step takes at least as long, and what it takes longer is waiting
and copying between ranks, which `pipeline.py` finds on two GPUs. Beside it stand the same cells by
their costs alone. Ideal is that of `pipeline.py`. The state is made on CPU devices: JAX must see
both (`JAX_PLATFORMS=cuda,cpu`, which this sets).
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from pipeline import (
    arrays,
    capacity_of,
    check,
    configuration,
    costs_of,
    parser_of,
    staged,
    timed,
)
from pipeline_profile import profile

from mxjax.pipeline.configure import costs, stagewise_schedule
from mxjax.pipeline.schedule import Kind, Op
from mxjax.pipeline.simulate import simulate
from mxjax.pipeline.stagewise import Stagewise, _Streams
from mxjax.sharding.mesh import build_mesh
from mxjax.training.gradients import BATCH_SPEC, REPLICATED
from mxjax.training.pipelined import PipelinedObjective


class FromOutside(_Streams):
    """Where another rank would leave something, it is there already."""

    def __init__(self, runner: OneRank, value: jax.Array):
        super().__init__()
        self._runner, self._value = runner, value

    def _from_outside(self, op: Op) -> bool:
        forward = op.kind is Kind.F
        before = op.stage - 1 if forward else op.stage + 1
        last = self._runner.schedule.num_stages - 1
        made_here = not forward and op.stage == last
        return not made_here and self._runner.schedule.stage_to_rank[before] != self._runner.rank

    def wait_for(self, ops: Sequence[Op]) -> None:
        super().wait_for([op for op in ops if not self._from_outside(op)])

    def take(self, op: Op) -> Any:
        return self._value if self._from_outside(op) else super().take(op)


class OneRank(Stagewise):
    """The programs of one rank, all on `device`."""

    def __init__(self, objective: PipelinedObjective, rank: int, device: jax.Device):
        config, mesh = objective.config, objective.mesh
        schedule, _ = stagewise_schedule(config, objective.stacks)
        mesh = Mesh(np.full(mesh.axis_sizes, device), mesh.axis_names)
        super().__init__(
            objective._staged_of, schedule, objective.stacks, mesh, costs=costs(config)
        )
        self.rank, self.mesh = rank, objective.mesh  # where the state is made
        self.sharding = NamedSharding(self.meshes[rank], self._varying)

    def placed(self, tree: Any) -> Any:
        """This rank's part of arrays over the whole mesh."""
        parts = jax.tree.map(lambda a: a.addressable_shards[self.rank].data, tree)
        return jax.device_put(jax.device_get(parts), self.sharding)

    def train_alone(self, stream: jax.Array, *placed: Any) -> Any:
        """The sums of this rank."""
        streams = FromOutside(self, stream)
        sums = self._walk(streams, None, self.rank, *placed)
        streams.check()
        return sums

    def _send(self, result: dict[str, Any], op: Op, streams: _Streams) -> None:
        user = op.stage + 1 if op.kind is Kind.F else op.stage - 1
        end = user in (-1, self.schedule.num_stages)
        if end or self.schedule.stage_to_rank[user] == self.rank:
            super()._send(result, op, streams)


def one_rank(args, objective: PipelinedObjective, inputs: tuple, rank: int, folder: Path | None):
    """Seconds of a step, and the runner."""
    runner = OneRank(objective, rank, jax.devices()[0])
    specs = (objective.param_specs, REPLICATED, BATCH_SPEC, REPLICATED)
    begin = runner.over_mesh(objective._begin, specs, None)
    parts = [runner.placed(tree) for tree in begin(*inputs)]
    shape = runner.make_model(jax.tree.map(lambda a: a[0], parts[0])).stream()
    values = jax.random.normal(jax.random.key(0), (1, *shape.shape), shape.dtype)
    stream = jax.device_put(values, runner.sharding)
    seconds = []
    for _ in range(args.steps + 1):
        started = time.perf_counter()
        jax.block_until_ready(runner.train_alone(stream, *parts))
        seconds.append(time.perf_counter() - started)
    if folder:
        print(profile(lambda: jax.block_until_ready(runner.train_alone(stream, *parts)), folder))
    return statistics.median(seconds[1:]), runner  # the first compiles


def main() -> None:
    parser = parser_of(__doc__)
    args = parser.parse_args()
    check(parser, args, needed=1)
    gpu, cpus = jax.devices()[:1], jax.devices("cpu")[:2]
    half = configuration(args, args.layers)
    found = costs_of(half, stagewise=True)
    ideal = timed(half, gpu, args.steps, {}).seconds
    print(f"ideal: {ideal * 1e3:.1f} ms", flush=True)
    plain = args.microbatches * (found.F + found.BW)
    print(f"{'schedule':18} {'rank':>4} {'ms':>8} {'/ ideal':>8} {'cells':>7} {'deps.':>7}")
    for name in args.schedules.split(","):
        config, _ = staged(args, name, (found.F, found.B, found.W, found.both))
        mesh = build_mesh(config.parallel, cpus)
        objective = PipelinedObjective(config, mesh, capacity_of(config))
        inputs = arrays(config, objective)
        for rank in range(2):
            folder = Path(args.profile, f"{name}_rank{rank}") if args.profile else None
            seconds, runner = one_rank(args, objective, inputs, rank, folder)
            simulated = simulate(runner.schedule, found)
            cells = sum(end - start for start, end in simulated.times[rank])
            print(
                f"{name:18} {rank:>4} {seconds * 1e3:8.1f} {seconds / ideal:8.3f} "
                f"{cells / plain:7.3f} {simulated.makespan / plain:7.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
