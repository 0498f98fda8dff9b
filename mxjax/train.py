"""Train a model: `python -m mxjax.train --config configs/quickstart.yaml [section.key=value ...]`.

Exit codes: 0 done (also after SIGTERM, once the state is saved), 1 the run failed, 2 the
configuration or the data cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mxjax.config import Config, ConfigError, ParallelConfig, load_config, to_yaml


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.train", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML configuration")
    parser.add_argument(
        "--print-config", action="store_true", help="print the whole configuration and stop"
    )
    cluster = parser.add_argument_group(
        "several processes", "only where JAX cannot find out by itself (SLURM, MPI, Kubernetes)"
    )
    cluster.add_argument("--coordinator-address", metavar="HOST:PORT")
    cluster.add_argument("--num-processes", type=int)
    cluster.add_argument("--process-id", type=int)
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="changes to the configuration"
    )
    return parser.parse_intermixed_args(argv)


def start_jax(parallel: ParallelConfig, arguments: argparse.Namespace) -> int:
    """Set JAX up for this run; returns the number of devices over all processes."""
    import jax

    if parallel.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", parallel.cpu_devices)
    if arguments.coordinator_address:
        jax.distributed.initialize(
            arguments.coordinator_address, arguments.num_processes, arguments.process_id
        )
    elif _in_cluster():
        jax.distributed.initialize()
    return jax.device_count()


def _in_cluster() -> bool:
    """Whether a launcher that JAX knows has started several processes."""
    from jax._src.clusters import ClusterEnv

    return any(
        env.is_env_present() and env.get_process_count() > 1 for env in ClusterEnv._cluster_types
    )


def run(config: Config) -> None:
    """Train as configured. JAX is set up already."""
    from mxjax.sharding.mesh import build_mesh
    from mxjax.training.loop import Trainer

    Trainer(config, build_mesh(config.parallel)).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = parse_arguments(argv)
    device_count = lambda parallel: start_jax(parallel, arguments)  # noqa: E731
    try:
        config = load_config(arguments.config, arguments.overrides, device_count)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.print_config:
        print(to_yaml(config), end="")
        return 0

    from mxjax.ckpt.store import CheckpointError
    from mxjax.data import DataError
    from mxjax.training.diagnose import NonFiniteError

    try:
        run(config)
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    except (CheckpointError, NonFiniteError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
