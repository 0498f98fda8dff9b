"""The cosine router against numpy, and on a mesh against one device."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from examples.cosine_router import CosineRouter
from mxjax.config import Config, ModelConfig, MoEConfig, ParallelConfig, TrainingConfig, load_config
from mxjax.models.parts import Part
from mxjax.sharding.mesh import AXES, build_mesh
from mxjax.training.gradients import Objective

MODEL = ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64)
MOE = MoEConfig(
    num_experts=8,
    router_topk=2,
    moe_ffn_hidden_size=16,
    aux_loss_coeff=0.01,
    router="examples.cosine_router:CosineRouter",
)


def test_experts_are_those_with_the_nearest_direction():
    part = Part(lambda rngs: CosineRouter(MODEL, MOE, rngs))
    params = part.init(jax.random.key(0))
    x = np.random.default_rng(0).standard_normal((2, 6, 32)).astype(np.float32)
    experts, weights, _ = part.bind(params)(x, np.ones((2, 6), bool), np.zeros(8, np.float32))

    token = x.reshape(12, 32) @ params["project"]
    expert = np.asarray(params["weight"])
    cosine = (
        token @ expert / np.outer(np.linalg.norm(token, axis=1), np.linalg.norm(expert, axis=0))
    )
    nearest = np.argsort(-cosine, axis=1)[:, :2]
    np.testing.assert_array_equal(experts, nearest)
    odds = np.exp(5.0 * np.take_along_axis(cosine, nearest, axis=1))
    np.testing.assert_allclose(weights, odds / odds.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("length", [0.01, 100.0])
def test_the_length_of_a_token_does_not_matter(length):
    part = Part(lambda rngs: CosineRouter(MODEL, MOE, rngs))
    router = part.bind(part.init(jax.random.key(0)))
    x = np.random.default_rng(1).standard_normal((1, 8, 32)).astype(np.float32)
    inputs = np.ones((1, 8), bool), np.zeros(8, np.float32)
    np.testing.assert_allclose(router(length * x, *inputs)[1], router(x, *inputs)[1], rtol=1e-4)


def loss_and_gradients(**parallel):
    """Of one batch, for the same parameters under every layout."""
    sizes = ParallelConfig(**dict.fromkeys(AXES, 1) | parallel)
    training = TrainingConfig(seq_length=16, global_batch_size=4, compute_dtype="float32")
    num_devices = math.prod(getattr(sizes, axis) for axis in AXES)
    mesh = build_mesh(sizes, jax.devices()[:num_devices])
    objective = Objective(Config(model=MODEL, moe=MOE, parallel=sizes, training=training), mesh)
    params = jax.tree.map(
        lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)),
        objective.model.init(jax.random.key(0)),
        objective.param_specs,
    )
    tokens = np.random.default_rng(2).integers(0, MODEL.vocab_size, (1, 4, 17), np.int32)
    batch = {
        "tokens": tokens[:, :, :-1],
        "targets": tokens[:, :, 1:],
        "segment_ids": np.ones((1, 4, 16), np.int32),
        "positions": np.broadcast_to(np.arange(16, dtype=np.int32), (1, 4, 16)),
    }
    function = jax.jit(objective.loss_and_gradients())
    bias = objective.model.initial_expert_bias()
    gradients, statistics = function(params, bias, batch, jax.random.key(3))
    return jax.device_get((statistics.loss, gradients))


def test_eight_devices_compute_what_one_does():
    expected_loss, expected = loss_and_gradients()
    loss, gradients = loss_and_gradients(dp=2, ep=2, tp=2, zero_stage=3)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name in ("project", "weight", "scale"):
        want = expected["moe_layers"]["mlp"]["router"][name]
        got = gradients["moe_layers"]["mlp"]["router"][name]
        assert np.max(np.abs(want)) > 0
        np.testing.assert_allclose(got, want, atol=1e-4 * np.max(np.abs(want)))


def test_the_configuration_of_the_tutorial_uses_it():
    config = load_config(Path(__file__).with_name("cosine_router.yaml"))
    assert config.moe.router == "examples.cosine_router:CosineRouter"
