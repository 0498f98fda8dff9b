"""The largest published models at full size on 1,024 devices: shapes and placements, no memory."""

import math
import time
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh

from mxjax.config import load_config
from mxjax.sharding.mesh import AXES
from mxjax.training.flops import parameter_counts
from mxjax.training.programs import Programs
from mxjax.training.step import build_step

CONFIGS = Path(__file__).parents[2] / "configs"
LARGEST_WHOLE = 2**20
"""Bytes that an array may have which every device holds as a whole: 1 MiB."""
BYTES_PER_PARAMETER = 4 + 4 + 4
"""fp32 master weight and both moments of AdamW; gradients are placed like the weights."""


def programs(name, *overrides):
    config = load_config(CONFIGS / f"{name}.yaml", overrides)
    mesh = AbstractMesh(tuple(getattr(config.parallel, axis) for axis in AXES), AXES)
    assert mesh.size == 1024
    return Programs(config, mesh)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("deepseek_v3", ()),
        ("mixtral_8x22b", ("parallel.dp=16", "parallel.tp=8", "training.num_microbatches=2")),
        ("mixtral_8x7b", ("parallel.dp=64", "parallel.tp=2", "training.global_batch_size=512")),
    ],
)
def test_the_state_is_spread_evenly(name, overrides):
    """In less than a minute; nothing of size is whole on every device, and each device's share is
    at most 1 % more than a 1,024th."""
    started = time.perf_counter()
    made = programs(name, *overrides)
    whole, per_device = {}, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(made.abstract_state):
        shard = leaf.sharding.shard_shape(leaf.shape)
        per_device += math.prod(shard) * leaf.dtype.itemsize
        if shard == leaf.shape:
            whole[jax.tree_util.keystr(path)] = leaf.size * leaf.dtype.itemsize
    assert time.perf_counter() - started < 60
    assert max(whole.values()) <= LARGEST_WHOLE, whole
    config = made.config
    even = parameter_counts(config.model, config.moe).total * BYTES_PER_PARAMETER / 1024
    assert even <= per_device < 1.01 * even


def test_a_step_of_deepseek_v3_can_be_traced():
    """Every shape inside of the layers fits on every rank, forward and backward."""
    made = programs("deepseek_v3")
    started = time.perf_counter()
    step = build_step(made.config, made.objective, made.optimizer, float("inf"))
    copies = jax.eval_shape(made.objective.copies, made.abstract_state.params)
    state, result, _ = jax.eval_shape(step, made.abstract_state, made.abstract_batch(), copies)
    assert time.perf_counter() - started < 60
    assert jax.tree.map(lambda a: a.shape, state) == jax.tree.map(
        lambda a: a.shape, made.abstract_state
    )
    assert result.mtp_loss.shape == ()
