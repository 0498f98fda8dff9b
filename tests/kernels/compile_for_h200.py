"""Compile the kernels of `mxjax.kernels` for H200 GPUs, on a machine without a GPU.

`python -m tests.kernels.compile_for_h200 programs.json mosaic optimizer`, in a process of its own:
it needs the CUDA compiler of `jax-cuda13-pjrt` on the path, which other tests must not find. Writes
{name: program} of the kernels of an implementation, of the update of a training step, and of a
product that is added to sums.
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

from mxjax.config.schema import Config, OptimizerConfig, TrainingConfig
from mxjax.kernels.attention import causal_attention
from mxjax.kernels.grouped_matmul import grouped_matmul_weight_gradient
from mxjax.kernels.row_groups import row_groups, sufficient_rows
from mxjax.training.gradients import BatchStatistics
from mxjax.training.optimizer import build_optimizer
from mxjax.training.state import TrainState
from mxjax.training.step import build_update
from tests.kernels.fused_ops import OPS, value_and_gradients
from tests.kernels.moe_ops import LITE, TILE, moe_ops, permute_op

TARGET = Path(__file__).parents[2] / "mxjax" / "training" / "targets" / "h200.textproto"

Case = tuple[str, Callable, tuple[jax.ShapeDtypeStruct, ...], int]
"""Name; function; shapes on one of two GPUs; how many arguments at the end are alike on both, the
others differing (a `shard_map` with `check_vma` splits their first dim)."""


def fused_op(name: str, implementation: str) -> Case:
    """Forward and backward, recomputed, with the blocks that there are by default."""
    op = OPS[name]

    def both(*arguments):
        barriers = (True,) * len(arguments)
        run = jax.checkpoint(partial(op.run, implementation=implementation), prevent_cse=barriers)
        return value_and_gradients(run, arguments)

    shapes = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in op.shapes)
    return name, both, shapes, op.weights


def document_attention(name: str, heads: int, groups: int, width: int, value_width: int) -> Case:
    """Forward and backward, recomputed, of packed documents."""
    B, S = 1, 256

    def attention(ids_BS, *arguments):
        return causal_attention(*arguments, segment_ids_BS=ids_BS, implementation="mosaic")

    def both(ids_BS, *arguments):
        run = jax.checkpoint(attention, prevent_cse=(True,) * 4)
        out, pullback = jax.vjp(partial(run, ids_BS), *arguments)
        return out, pullback(out)

    shapes = (heads, width), (groups, width), (groups, value_width)
    arguments = (jax.ShapeDtypeStruct((B, S, *shape), jnp.bfloat16) for shape in shapes)
    return name, both, (jax.ShapeDtypeStruct((B, S), jnp.int32), *arguments), 0


ATTENTIONS = {"document_attention": (4, 2, 128, 128), "latent_attention": (2, 2, 192, 128)}
"""Query heads, key heads, and the width of these and of values."""


def cases(implementation: str) -> list[Case]:
    if implementation == "triton":
        return [fused_op(name, "triton") for name in TRITON_OPS] + [permute_op("triton")]
    attentions = [document_attention(name, *sizes) for name, sizes in ATTENTIONS.items()]
    return [fused_op(name, "mosaic") for name in MOSAIC_OPS] + [*moe_ops(), *attentions]


MOSAIC_OPS = ("swiglu", "add_layer_norm", "bias_dropout_add", "rope_pairs_partial")
"""The rest is made of the same parts."""
TRITON_OPS = ("swiglu", "bias_swiglu", "bias_dropout_add")


def optimizer_update(mesh: Mesh) -> str:
    """AdamW with clipping on an fp32 matrix with bf16 moments and a bf16 copy, for one GPU."""
    training = TrainingConfig(num_steps=10, compute_dtype="bfloat16")
    config = Config(training=training, optimizer=OptimizerConfig(moments_dtype="bfloat16"))
    optimizer = build_optimizer(config.optimizer, {})
    update = build_update(config, optimizer, capacity_factor=1.0)

    def step(state, grads, stats):
        state, result = update(state, grads, stats)
        return state, result, state.params["w"].astype(jnp.bfloat16)

    def arguments():
        w, number = jnp.zeros((1024, 512)), jnp.float32(0)
        moments = optimizer.init({"w": w})
        state = TrainState(jnp.int32(0), {"w": w}, moments, None, jnp.bool(False))
        stats = BatchStatistics(number, number, number, number, None, number)
        return state, {"w": w.astype(jnp.bfloat16)}, stats

    def placed(leaf):
        sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    shapes = jax.tree.map(placed, jax.eval_shape(arguments))
    return jax.jit(step, donate_argnums=0).lower(*shapes).compile().as_text()


def added_product(mesh: Mesh) -> str:
    """Gradients of experts' weights, added to sums that the caller gives up."""
    E, T, K, H, F = LITE
    rows = sufficient_rows(T * K, E, TILE)

    def step(total_GKN, x_RK, dy_RN, counts_G):
        groups = row_groups(counts_G, rows, TILE)
        return grouped_matmul_weight_gradient(
            x_RK, dy_RN, groups, into_GKN=total_GKN, implementation="mosaic"
        )

    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in (
            ((E, H, F), jnp.float32), ((rows, H), jnp.bfloat16), ((rows, F), jnp.bfloat16),
            ((E,), jnp.int32),
        )
    ]  # fmt: skip
    whole = (PartitionSpec(),) * 4
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=whole, out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0).lower(*shapes).compile().as_text()


def main(path: str, *names: str) -> None:
    topology = topologies.get_topology_desc(
        "h200", platform="cuda", target_config=TARGET.read_text(), topology="1x1x2"
    )
    programs = {}
    for name in names:
        if name in ("optimizer", "added_product"):
            compile_ = optimizer_update if name == "optimizer" else added_product
            programs[name] = compile_(Mesh(np.array(topology.devices[:1]), ("gpu",)))
        else:
            programs |= compiled(cases(name), Mesh(np.array(topology.devices), ("gpu",)))
    Path(path).write_text(json.dumps(programs))


def compiled(cases: list[Case], mesh: Mesh) -> dict[str, str]:
    """The program of each, for two GPUs."""
    split, alike = PartitionSpec("gpu"), PartitionSpec()
    programs = {}
    for name, function, shapes, num_alike in cases:
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
    return programs


if __name__ == "__main__":
    main(*sys.argv[1:])
