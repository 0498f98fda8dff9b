"""Compile the kernels of `mxjax.kernels` for H200 GPUs, on a machine without a GPU.

`python -m tests.kernels.compile_for_h200 programs.json`, in a process of its own: it needs the CUDA
compiler of `jax-cuda13-pjrt` on the path, which other tests must not find. Writes {name: program}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.kernels.fused_ops import OPS, value_and_gradients
from tests.kernels.moe_ops import moe_ops

TARGET = Path(__file__).parents[2] / "mxjax" / "training" / "targets" / "h200.textproto"

Case = tuple[str, Callable, tuple[jax.ShapeDtypeStruct, ...], int]
"""Name; function; shapes on one of two GPUs; how many arguments at the end are alike on both, the
others differing (a `shard_map` with `check_vma` splits their first dim)."""


def fused_ops() -> list[Case]:
    """Forward and backward of each op, recomputed, with the blocks it has by default."""

    def both(op, *arguments):
        run = jax.checkpoint(partial(op.run, implementation="mosaic"))
        return value_and_gradients(run, arguments)

    def case(name, op):
        shapes = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in op.shapes)
        return name, partial(both, op), shapes, op.weights

    # The rest is made of the same parts.
    names = ("swiglu", "add_layer_norm", "bias_dropout_add", "rope_pairs_partial")
    return [case(name, OPS[name]) for name in names]


CASES: list[Case] = [*fused_ops(), *moe_ops()]


def main(path: str) -> None:
    topology = topologies.get_topology_desc(
        "h200", platform="cuda", target_config=TARGET.read_text(), topology="1x1x2"
    )
    mesh = Mesh(np.array(topology.devices), ("gpu",))
    split, alike = PartitionSpec("gpu"), PartitionSpec()
    programs = {}
    for name, function, shapes, num_alike in CASES:
        specs = [split] * (len(shapes) - num_alike) + [alike] * num_alike
        arguments = []
        for shape, spec in zip(shapes, specs, strict=True):
            dims = (2 * shape.shape[0], *shape.shape[1:]) if spec == split else shape.shape
            sharding = NamedSharding(mesh, spec)
            arguments.append(jax.ShapeDtypeStruct(dims, shape.dtype, sharding=sharding))
        # One array of all results: their types differ, and nothing may be left out as unused.
        total = lambda *args, f=function: sum(  # noqa: E731
            jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(f(*args))
        )[None]
        mapped = jax.shard_map(total, mesh=mesh, in_specs=tuple(specs), out_specs=split)
        programs[name] = jax.jit(mapped).lower(*arguments).compile().as_text()
    Path(path).write_text(json.dumps(programs))


if __name__ == "__main__":
    main(*sys.argv[1:])
