"""Train a model: `python -m mxjax.train --config configs/quickstart.yaml [section.key=value ...]`.

Exit codes: 0 done (also after SIGTERM, once the state is saved), 1 the run failed, 2 the
configuration or the data cannot be used.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from mxjax.config import Config, ConfigError, ParallelConfig, Problem, load_config, to_yaml
from mxjax.config.checks import AXES

LAUNCHER_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Environment variables in which launchers say how many processes they have started."""

MOST_COMPILED_FOR = 64
"""Devices of a target that a plan compiles for."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.train", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML configuration")
    parser.add_argument(
        "--print-config", action="store_true", help="print the whole configuration and stop"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="compile a step, print its memory, collectives and FLOPs, and stop",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    elsewhere = parser.add_argument_group("plans of devices that are not here")
    elsewhere.add_argument("--target", choices=["h200"], help="kind of device to plan for")
    elsewhere.add_argument(
        "--devices", type=int, metavar="N", help="how many; default: the product of the axes"
    )
    elsewhere.add_argument(
        "--no-compile",
        action="store_true",
        help="plan from shapes alone, which needs no compiler (always so above 64 devices and with "
        "optimizer.offload)",
    )
    cluster = parser.add_argument_group(
        "several processes (one command each, on one or more hosts)"
    )
    cluster.add_argument(
        "--distributed",
        action="store_true",
        help="find them through SLURM, MPI or Kubernetes",
    )
    cluster.add_argument("--coordinator-address", metavar="HOST:PORT", help="or name them by hand")
    cluster.add_argument("--num-processes", type=int)
    cluster.add_argument("--process-id", type=int)
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="changes to the configuration"
    )
    return parser.parse_intermixed_args(argv)


def start_jax(parallel: ParallelConfig, arguments: argparse.Namespace) -> int:
    """Set JAX up for this run; returns the number of devices over all processes."""
    import jax

    from mxjax.sharding.mesh import use_cpu_devices

    if arguments.target:
        from mxjax.training.target import use_target_compiler

        use_target_compiler()
        sizes = [getattr(parallel, axis) for axis in AXES]
        return abs(prod(sizes)) if arguments.devices is None else arguments.devices
    use_cpu_devices(parallel.cpu_devices)
    if arguments.coordinator_address:
        jax.distributed.initialize(
            arguments.coordinator_address, arguments.num_processes, arguments.process_id
        )
    elif arguments.distributed:
        jax.distributed.initialize()
    return jax.device_count()


def check_options(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the options taken together; None: nothing."""
    if arguments.json and not arguments.plan:
        return "--json belongs to --plan"
    if (arguments.devices is not None or arguments.no_compile) and not arguments.target:
        return "--devices and --no-compile belong to --target"
    if arguments.devices is not None and arguments.devices < 1:
        return f"--devices {arguments.devices}: it takes at least one"
    if arguments.target and not arguments.plan:
        return "--target belongs to --plan"
    if arguments.plan and (arguments.distributed or arguments.coordinator_address):
        return (
            "--plan runs in one process, on the devices that it sees; for more, plan with "
            "parallel.cpu_devices"
        )
    by_hand = (arguments.coordinator_address, arguments.num_processes, arguments.process_id)
    if any(value is not None for value in by_hand) and None in by_hand:
        return "--coordinator-address, --num-processes and --process-id belong together"
    tasks = next((int(os.environ[name]) for name in LAUNCHER_TASKS if name in os.environ), 1)
    if tasks > 1 and not arguments.distributed and not arguments.coordinator_address:
        return (
            f"this is one of {tasks} tasks of a launcher, and each would train by itself in the "
            "same run_dir; add --distributed"
        )
    return None


def check_backend(config: Config) -> None:
    """Raises ConfigError if a setting needs another kind of device than JAX sees."""
    import jax

    from mxjax.kernels.implementation import mosaic_obstacle

    processes = jax.process_count()
    if config.parallel.pp > 1 and config.pipeline.executor == "stagewise" and processes > 1:
        obstacle = f"needs one process that drives all devices, and there are {processes}; use auto"
        raise ConfigError([Problem("pipeline.executor", "stagewise", obstacle)])
    named, obstacle = config.model.attention_implementation, None
    if named == "cudnn" and jax.default_backend() != "gpu":
        obstacle = f"needs an NVIDIA GPU, and JAX sees only {jax.default_backend()}"
    elif named == "mosaic" and (reason := mosaic_obstacle()):
        obstacle = f"cannot run: {reason}"
    if obstacle:
        raise ConfigError(
            [Problem("model.attention_implementation", named, f"{obstacle}; use auto")]
        )


def print_plan(config: Config, arguments: argparse.Namespace) -> None:
    """Say what a step will need. JAX is set up already; nothing is created, read or written."""
    from mxjax.sharding.mesh import build_mesh
    from mxjax.training.plan import as_table, fitted, make_plan

    if arguments.target:
        from mxjax.training.target import TARGETS, abstract_mesh, target_mesh

        target = TARGETS[arguments.target]
        devices = prod(getattr(config.parallel, axis) for axis in AXES)
        # Devices that are not here have no host whose memory a compiler could place moments in.
        offload = config.optimizer.offload
        if arguments.no_compile or devices > MOST_COMPILED_FOR or offload:
            mesh = abstract_mesh(target, config.parallel)
        else:
            mesh = target_mesh(target, config.parallel)
    else:
        check_backend(config)
        target, mesh = None, build_mesh(config.parallel)
    choice = fitted(config, mesh, target)
    print(*choice.lines, sep="\n", end="\n\n" if choice.lines else "", file=sys.stderr)
    plan = make_plan(choice.config, mesh, target)
    print(json.dumps(plan.as_json(), indent=2) if arguments.json else as_table(plan))


def run(config: Config) -> None:
    """Train as configured. JAX is set up already."""
    check_backend(config)
    config = replace(config, run_dir=str(Path(config.run_dir).expanduser()))
    from mxjax.sharding.mesh import build_mesh
    from mxjax.training.host_memory import check_host_memory
    from mxjax.training.layer_costs import with_costs
    from mxjax.training.loop import Trainer, say
    from mxjax.training.plan import fitted

    mesh = build_mesh(config.parallel)
    choice = fitted(with_costs(config, mesh), mesh)
    for line in choice.lines:
        say(line)
    check_host_memory(choice.config, mesh)
    Trainer(choice.config, mesh).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = parse_arguments(argv)
    if problem := check_options(arguments):
        return report(problem, 2)
    try:
        config = load_config(
            arguments.config, arguments.overrides, lambda parallel: start_jax(parallel, arguments)
        )
    except ConfigError as error:
        return report(error, 2)
    if arguments.print_config:
        print(to_yaml(config), end="")
        return 0
    from mxjax.ckpt.errors import CheckpointFormatError
    from mxjax.ckpt.store import CheckpointError
    from mxjax.data import DataError
    from mxjax.kernels.implementation import ImplementationError
    from mxjax.training.diagnose import NonFiniteError
    from mxjax.training.run_dir import RunDirError

    try:
        if arguments.plan:
            print_plan(config, arguments)
        else:
            run(config)
    except (CheckpointFormatError, ConfigError, DataError, ImplementationError) as error:
        return report(error, 2)
    except (CheckpointError, NonFiniteError, RunDirError) as error:
        return report(error, 1)
    return 0


def report(error: object, exit_code: int) -> int:
    """Say what went wrong, without a traceback; returns `exit_code`."""
    print(error, file=sys.stderr, flush=True)
    if "jax" in sys.modules and sys.modules["jax"].process_count() > 1:
        # A normal exit would join threads that wait for the other processes.
        os._exit(exit_code)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
