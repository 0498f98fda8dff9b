"""Step time of pipeline schedules of two stages, over the time of the same work without a pipeline.

    python benchmarks/pipeline.py [--model llama|moe] [--ep 1] [--schedules 1f1b,zbh1,...]
        [--layers 4] [--microbatches 16] [--seq-length 4096] [--steps 5] [--scan] [--stagewise]
        [--json out.json] [--profile folder]

Ideal is one GPU, the slower of the two, with half of the layers that accumulates gradients over the
same microbatches. With `--ep 2` each stage, and ideal, has two GPUs that share the experts. The
vocabulary is small, so that embedding and head cost next to nothing on either side. F, B, W and BW
of one rank's layers are measured alone; from them come two predictions: dependencies alone, and
ranks in step as the tick table has them. Times are medians, loss and gradients only.

Before anything is timed, loss and gradient norm must be those of the unpipelined model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from pipeline_profile import profile

from mxjax.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    PipelineConfig,
    TrainingConfig,
)
from mxjax.pipeline.configure import training_table
from mxjax.pipeline.simulate import Costs, simulate
from mxjax.pipeline.ticks import TickTable, time_of_ticks
from mxjax.sharding.mesh import build_mesh
from mxjax.training.gradients import BATCH_SPEC
from mxjax.training.layer_costs import measure_costs
from mxjax.training.optimizer import global_norm
from mxjax.training.pipelined import PipelinedObjective, build_objective, layer_stacks

LLAMA = ModelConfig(
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    vocab_size=512,
)
MOE = MoEConfig(
    num_experts=16, router_topk=4, moe_ffn_hidden_size=2048, capacity_buckets=(1.0,),
    force_balanced=True,
)  # fmt: skip
VARIANTS = {
    "gpipe": {"schedule": "gpipe", "cells": "full"},
    "1f1b": {"schedule": "1f1b", "cells": "full"},
    "1f1b-split": {"schedule": "1f1b", "cells": "split"},
    "1f1b-joint": {"schedule": "1f1b", "cells": "joint"},
    "interleaved": {"schedule": "interleaved", "cells": "full"},
    "interleaved-joint": {"schedule": "interleaved", "cells": "joint"},
    "zbh1": {"schedule": "zbh1"},
    "zbh1-searched": {"schedule": "zbh1", "max_activations": 4},
    "zbv": {"schedule": "zbv"},
    "dualpipev": {"schedule": "dualpipev"},
}


def configuration(args, num_layers: int, **changes) -> Config:
    """A model of so many layers."""
    model = dataclasses.replace(LLAMA, num_layers=num_layers, hidden_size=args.hidden)
    if args.hidden != LLAMA.hidden_size:  # to try the script on a small machine
        heads = args.hidden // 32
        model = dataclasses.replace(
            model, ffn_hidden_size=2 * args.hidden, num_attention_heads=heads, num_query_groups=None
        )
    moe = MOE if args.model == "moe" else MoEConfig()
    config = Config(
        model=model,
        moe=moe,
        data=DataConfig(document_mask=False),
        parallel=ParallelConfig(dp=1, ep=args.ep, zero_stage=0),
        training=TrainingConfig(
            seq_length=args.seq_length,
            global_batch_size=args.microbatches * args.ep,
            num_microbatches=args.microbatches,
            scan_layers=args.scan,
        ),
    )
    return dataclasses.replace(config, **changes)


def arrays(config: Config, objective):
    """Weights that are the same for the same model, and a batch."""
    alone = ParallelConfig(dp=1)
    whole = build_objective(
        dataclasses.replace(config, parallel=alone), build_mesh(alone, jax.devices()[:1])
    )

    def initial(key):
        params = whole.model.init(key)
        parts = objective.model.parts
        placed = {}
        for name, tree in params.items():
            places = parts[name].places
            if places is not None:
                tree = jax.tree.map(lambda a, places=places: a[places], tree)
            placed[name] = tree
        return placed

    shardings = jax.tree.map(
        lambda spec: NamedSharding(objective.mesh, spec), objective.param_specs
    )
    params = jax.jit(initial, out_shardings=shardings)(jax.random.key(0))
    rng = np.random.default_rng(0)
    training = config.training
    rows = training.global_batch_size // training.num_microbatches
    shape = (training.num_microbatches, rows, training.seq_length)
    tokens = rng.integers(0, config.model.vocab_size, shape).astype(np.int32)
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, -1),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape),
    }
    batch = jax.device_put(batch, NamedSharding(objective.mesh, BATCH_SPEC))
    return params, objective.model.initial_expert_bias(), batch, jax.random.key(1)


def capacity_of(config: Config) -> float:
    """Routing is forced to be balanced."""
    return 1.0 if config.moe.num_experts else math.inf


@dataclasses.dataclass
class Timed:
    """A step."""

    seconds: float
    compile_seconds: float
    temp_gib: float
    loss: float
    norm: float


def timed(
    config: Config, devices: list, steps: int, options: dict, stagewise=False, profile_in=None
) -> Timed:
    """Compiles, checks and times loss and gradients."""
    mesh = build_mesh(config.parallel, devices)
    objective = build_objective(config, mesh, capacity_of(config))
    inputs = arrays(config, objective)
    started = time.perf_counter()
    if stagewise:
        compiled = objective.stagewise(options)
        jax.block_until_ready(compiled(*inputs))  # compiles
    else:
        lowered = jax.jit(objective.loss_and_gradients()).lower(*inputs)
        compiled = lowered.compile(compiler_options=options)
    compile_seconds = time.perf_counter() - started
    grads, stats = compiled(*inputs)
    loss, norm = float(stats.loss), float(jax.jit(global_norm)(grads))
    del grads
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        result = compiled(*inputs)
        sent = time.perf_counter() - started
        jax.block_until_ready(result)
        seconds.append(time.perf_counter() - started)
        del result
    if stagewise:
        print(f"sent off after {sent * 1e3:.0f} ms")
    if profile_in:
        print(profile(lambda: jax.block_until_ready(compiled(*inputs)), profile_in))
    temp = math.nan if stagewise else compiled.memory_analysis().temp_size_in_bytes / 2**30
    return Timed(statistics.median(seconds), compile_seconds, temp, loss, norm)


def costs_of(config: Config, stagewise: bool) -> Costs:
    """F, B, W and BW of all layers of `config` for one microbatch, on one stage's GPUs, in ms."""
    config = dataclasses.replace(config, pipeline=PipelineConfig(schedule="gpipe"))
    mesh = build_mesh(config.parallel, jax.devices()[: config.parallel.ep])
    costs = measure_costs(PipelinedObjective(config, mesh, capacity_of(config)), stagewise)
    print(
        f"one rank's layers, ms: F {costs.F:.2f}, B {costs.B:.2f}, W {costs.W:.2f}, "
        f"BW {costs.BW:.2f}",
        flush=True,
    )
    return costs


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, needed: int) -> None:
    """Refuses what could not be measured, before anything is; `needed`: GPUs."""
    for name in ("layers", "microbatches", "seq_length", "hidden", "steps", "ep"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: is below 1")
    if args.ep > 1 and args.model != "moe":
        parser.error(f"--ep {args.ep}: needs experts; add --model moe")
    if MOE.num_experts % args.ep:
        parser.error(f"--ep {args.ep}: {MOE.num_experts} experts do not divide by it")
    if len(jax.devices()) < needed:
        parser.error(f"--ep {args.ep}: needs {needed} devices, here are {len(jax.devices())}")
    if args.profile and jax.default_backend() != "gpu":
        parser.error(f"--profile {args.profile}: needs GPUs, and JAX runs on the CPU here")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no such folder")
    for option in args.xla.split(","):
        if option and option.count("=") != 1:
            parser.error(f"--xla {option}: write name=value")
    for name in args.schedules.split(","):
        if name not in VARIANTS:
            parser.error(f"--schedules {name}: is none of {', '.join(VARIANTS)}")
        try:
            staged(args, name, PipelineConfig().costs)
        except ValueError as error:  # of the layout, or of the schedule
            parser.error(f"--schedules {name}: {error}")


def staged(args, name: str, costs: tuple[float, ...]) -> tuple[Config, TickTable]:
    """Configuration and tick table of a schedule; the model has twice the layers of a rank."""
    pipeline = PipelineConfig(**VARIANTS[name], costs=costs, transfers=args.transfers)
    parallel = ParallelConfig(pp=2, dp=1, ep=args.ep, zero_stage=0)
    config = configuration(args, 2 * args.layers, pipeline=pipeline, parallel=parallel)
    return config, training_table(config, layer_stacks(config))


def parser_of(description: str) -> argparse.ArgumentParser:
    """The options of a model, a stage and a measurement."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--model", choices=["llama", "moe"], default="llama")
    parser.add_argument("--schedules", default=",".join(VARIANTS))
    parser.add_argument("--layers", type=int, default=4, help="of one rank")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--scan", action="store_true", help="scan over layers")
    parser.add_argument("--ep", type=int, default=1, help="GPUs of a stage, for --model moe")
    parser.add_argument(
        "--profile", metavar="FOLDER", help="also say what the programs of a step take"
    )
    parser.add_argument("--transfers", choices=["auto", "immediate", "deferred"], default="auto")
    parser.add_argument("--json")
    parser.add_argument("--stagewise", action="store_true", help="one program per cell")
    parser.add_argument("--xla", default="", help="compiler options, as name=value,name=value")
    return parser


def main() -> None:
    parser = parser_of(__doc__)
    args = parser.parse_args()
    check(parser, args, needed=2 * args.ep)
    options = dict(option.split("=") for option in args.xla.split(",") if option)
    options = {name: {"true": True, "false": False}.get(v, v) for name, v in options.items()}
    half = configuration(args, args.layers)
    costs = costs_of(half, args.stagewise)
    gpus = jax.devices()[: 2 * args.ep]
    stages = gpus[: args.ep], gpus[args.ep :]
    alone = [timed(half, stage, args.steps, options) for stage in stages]
    ideal = max(alone, key=lambda found: found.seconds)
    each = ", ".join(f"{found.seconds * 1e3:.1f}" for found in alone)
    print(f"ideal: {each} ms on each stage's GPUs, temp {ideal.temp_gib:.1f} GiB", flush=True)
    whole = timed(configuration(args, 2 * args.layers), stages[0], 1, options)
    print(f"unpipelined: loss {whole.loss:.6f}, gradient norm {whole.norm:.6f}", flush=True)
    print(
        f"{'schedule':18} {'step ms':>8} {'/ ideal':>8} {'deps.':>7} {'ticks':>7} {'temp GiB':>9} "
        f"{'compile s':>10}"
    )
    rows = []
    for name in args.schedules.split(","):
        config, table = staged(args, name, (costs.F, costs.B, costs.W, costs.both))
        profile_in = Path(args.profile, name) if args.profile else None
        plain = args.microbatches * (costs.F + costs.BW)
        row = {
            "schedule": name,
            "dependencies": simulate(table.schedule, costs).makespan / plain,
            "ticks": time_of_ticks(table, costs) / plain,
        }
        try:
            found = timed(config, gpus, args.steps, options, args.stagewise, profile_in)
        except Exception as error:  # one that does not fit shall not hide the others
            print(f"{name:18} {str(error)[:150]}", flush=True)
            continue
        for what in ("loss", "norm"):
            off = abs(getattr(found, what) / getattr(whole, what) - 1)
            if not off < 1e-2:
                raise SystemExit(f"{name}: {what} {getattr(found, what)} is off by {off:.1e}")
        row |= {"ratio": found.seconds / ideal.seconds} | dataclasses.asdict(found)
        rows.append(row)
        print(
            f"{name:18} {found.seconds * 1e3:8.1f} {row['ratio']:8.3f} "
            f"{row['dependencies']:7.3f} {row['ticks']:7.3f} {found.temp_gib:9.1f} "
            f"{found.compile_seconds:10.1f}",
            flush=True,
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {
                    "costs": dataclasses.asdict(costs),
                    "ideal": dataclasses.asdict(ideal),
                    "rows": rows,
                },
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
