"""Compile loss and gradients of a configuration for H200 GPUs, on a machine without a GPU.

`python compile_for_h200.py config.yaml program.hlo`, in a process of its own: it needs the CUDA
compiler of `jax-cuda13-pjrt` on the path, which other tests must not find.
"""

import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding

from mxjax.config import load_config
from mxjax.sharding.mesh import AXES, build_mesh
from mxjax.training.gradients import BATCH_SPEC, REPLICATED
from mxjax.training.pipelined import build_objective

TARGET = Path(__file__).parents[2] / "mxjax" / "training" / "targets" / "h200.textproto"


def main(config_path: str, program_path: str) -> None:
    config = load_config(config_path)
    num_devices = math.prod(getattr(config.parallel, axis) for axis in AXES)
    topology = topologies.get_topology_desc(
        "h200",
        platform="cuda",
        target_config=TARGET.read_text(),
        topology=f"1x1x{num_devices}",  # processes, hosts, GPUs of a host
    )
    mesh = build_mesh(config.parallel, topology.devices)
    objective = build_objective(config, mesh)

    def array(shape, dtype, spec=REPLICATED):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(
        lambda info, spec: array(info.shape, info.dtype, spec),
        objective.model.infos,
        objective.param_specs,
    )
    training, key = config.training, jax.eval_shape(lambda: jax.random.key(0))
    rows = training.global_batch_size // training.num_microbatches
    ids = array((training.num_microbatches, rows, training.seq_length), jnp.int32, BATCH_SPEC)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), ids)
    bias = jax.tree.map(
        lambda leaf: array(leaf.shape, leaf.dtype), objective.model.initial_expert_bias()
    )
    step = jax.jit(objective.loss_and_gradients())
    program = step.lower(params, bias, batch, array(key.shape, key.dtype)).compile()
    Path(program_path).write_text(program.as_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
