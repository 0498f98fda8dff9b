"""Schedules, decay masks, and every optimizer on one device and on a mesh."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.config.schema import (
    Config,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from mxjax.models.transformer import Transformer
from mxjax.sharding.mesh import AXES
from mxjax.training.optimizer import build_optimizer, learning_rate
from mxjax.training.programs import Programs

NAMES = ("adamw", "adafactor", "sgd", "muon")
NOT_MUON = ("embedding", "head", "router", "scale", "bias")


def rates(num_steps, **settings):
    rate = learning_rate(OptimizerConfig(**settings), num_steps)
    return np.array([float(rate(jnp.int32(index))) for index in range(num_steps)])


def expected_rates(num_steps, after_warmup, lr=0.1, warmup=0):
    """Rates of all steps; `done` counts a step itself."""
    return [
        lr * done / warmup if done <= warmup else after_warmup(done)
        for done in range(1, num_steps + 1)
    ]


def test_constant_after_a_linear_warmup():
    got = rates(10, schedule="constant", lr=0.1, warmup_steps=4)
    np.testing.assert_allclose(got, [0.025, 0.05, 0.075] + [0.1] * 7, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("decay_steps", [None, 12])
def test_cosine_goes_from_the_peak_to_min_lr_at_its_last_step(warmup, decay_steps):
    end = decay_steps or 20

    def cosine(done):
        share = min(1, (done - warmup) / (end - warmup))
        return 0.01 + (0.1 - 0.01) * (1 + math.cos(math.pi * share)) / 2

    settings = {"lr": 0.1, "min_lr": 0.01, "warmup_steps": warmup, "decay_steps": decay_steps}
    got = rates(20, schedule="cosine", **settings)
    np.testing.assert_allclose(got, expected_rates(20, cosine, warmup=warmup), rtol=1e-5)
    np.testing.assert_allclose(got[end - 1 :], 0.01, rtol=1e-5)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("decay_steps", [None, 8])
def test_wsd_is_constant_and_then_falls_linearly_to_min_lr_at_the_last_step(warmup, decay_steps):
    length = decay_steps or 2  # a tenth of 20

    def stable_decay(done):
        share = max(0, done - (20 - length)) / length
        return 0.1 + (0.01 - 0.1) * share

    settings = {"lr": 0.1, "min_lr": 0.01, "warmup_steps": warmup, "decay_steps": decay_steps}
    got = rates(20, schedule="wsd", **settings)
    np.testing.assert_allclose(got, expected_rates(20, stable_decay, warmup=warmup), rtol=1e-5)
    assert got[-1] == pytest.approx(0.01)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_a_run_may_be_all_warmup(schedule):
    got = rates(5, schedule=schedule, lr=0.1, warmup_steps=5)
    np.testing.assert_allclose(got, [0.02, 0.04, 0.06, 0.08, 0.1], rtol=1e-6)


MODELS = {
    "gpt2": (
        ModelConfig(
            num_layers=1,
            hidden_size=32,
            num_attention_heads=4,
            vocab_size=64,
            position_embedding="learned",
            norm="layernorm",
            activation="gelu",
            add_bias_linear=True,
            add_qkv_bias=True,
        ),
        MoEConfig(),
        {"attention_norm", "mlp_norm", "norm", "bias", "q_bias", "kv_bias"}
        | {"out_bias", "up_bias", "down_bias"},
    ),
    "mixtral": (
        ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=64),
        MoEConfig(num_experts=4, shared_expert_intermediate_size=16),
        {"attention_norm", "mlp_norm", "norm"},
    ),
}


@pytest.mark.parametrize("shape", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_without_gradient_only_matrices_decay_each_step_by_the_same_share(name, shape):
    model, moe, not_decayed = MODELS[shape]
    transformer = Transformer(model, moe)
    params = jax.tree.map(lambda info: jnp.full(info.shape, 2.0), transformer.infos)
    optimizer = build_optimizer(OptimizerConfig(name=name, weight_decay=0.25), transformer.infos)
    zeros, state = jax.tree.map(jnp.zeros_like, params), optimizer.init(params)
    for _ in range(2):
        updates, state = jax.jit(optimizer.update)(zeros, state, params)
        for path, update in jax.tree_util.tree_leaves_with_path(updates):
            expected = 0.0 if {key.key for key in path} & not_decayed else -0.5
            place = jax.tree_util.keystr(path)
            np.testing.assert_allclose(update, expected, atol=1e-6, err_msg=place)


@pytest.mark.parametrize("name", NAMES)
def test_empty_places_change_no_update_and_stay_zero(name):
    """Gradients that grow, which Adafactor clips by the root mean square of a stack."""
    transformer = Transformer(ModelConfig(num_layers=2, hidden_size=32), MoEConfig())
    infos, config = transformer.infos, OptimizerConfig(name=name)
    keys = iter(jax.random.split(jax.random.key(0), 99))
    params = jax.tree.map(lambda info: jax.random.normal(next(keys), info.shape), infos)

    def spread(tree):
        layers = jax.tree.map(
            lambda a: jnp.zeros((5, *a.shape[1:])).at[jnp.array([1, 3])].set(a),
            tree["dense_layers"],
        )
        return tree | {"dense_layers": layers}

    def run(params, change, **filled):
        optimizer = build_optimizer(config, infos, filled)
        update, state = jax.jit(optimizer.update), optimizer.init(params)
        for scale in (1.0, 10.0):
            updates, state = update(change(scale), state, params)
        return updates

    def gradients(scale):
        return jax.tree.map(lambda p: scale * jnp.sin(3 * p), params)

    plain = run(params, gradients)
    found = run(spread(params), lambda scale: spread(gradients(scale)), dense_layers=2 / 5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, spread(plain)
    )


def small_config(name, **sizes):
    return Config(
        model=ModelConfig(
            num_layers=1,
            # Adafactor factors from 128 on.
            hidden_size=128 if name == "adafactor" else 32,
            ffn_hidden_size=128 if name == "adafactor" else 48,
            num_attention_heads=4,
            num_query_groups=2,
            vocab_size=64,
        ),
        parallel=ParallelConfig(**(dict.fromkeys(AXES, 1) | sizes)),
        training=TrainingConfig(
            num_steps=10, seq_length=16, global_batch_size=4, compute_dtype="float32"
        ),
        optimizer=OptimizerConfig(name=name, lr={"sgd": 0.3}.get(name, 0.01), schedule="constant"),
    )


@pytest.fixture(scope="module")
def batch():
    """Sequences that count up, which is quickly learnt."""
    start = np.arange(0, 60, 15)[None, :, None]
    tokens = (start + np.arange(16)).astype(np.int32)
    return {
        "tokens": tokens % 64,
        "targets": (tokens + 1) % 64,
        "segment_ids": np.ones_like(tokens),
        "positions": np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape),
    }


def run(programs, state, batch, num_steps=5):
    """State and losses after some steps on the same batch."""
    step = programs.step(math.inf)
    batch = jax.device_put(batch, programs.batch_sharding)
    losses = []
    for _ in range(num_steps):
        state, result = step(state, batch)
        losses.append(float(result.loss))
    return state, losses


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_learns_the_same_on_dp2_tp2_with_zero_1_as_on_one_device(
    name, batch, mesh_of
):
    alone_config, config = small_config(name), small_config(name, dp=2, tp=2, zero_stage=1)
    alone, spread = (Programs(c, mesh_of(c)) for c in (alone_config, config))
    initial = jax.device_get(alone.create_state())
    expected, expected_losses = run(alone, jax.device_put(initial, alone.shardings), batch)
    state, losses = run(spread, jax.device_put(initial, spread.shardings), batch)
    assert min(losses) < losses[0] - 1
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-6)

    def error(got, want):
        return np.max(np.abs(got - want)) / np.max(np.abs(want))

    # Where a gradient is nearly zero its rounding errors are not, and Adam and Muon scale both up
    # to full size: up to 5e-5 were seen, and 4e-7 with SGD, which does not.
    errors = jax.tree.map(error, *jax.device_get((state.params, expected.params)))
    worst = max(jax.tree.leaves(errors))
    assert worst < (2e-6 if name == "sgd" else 2e-4), errors


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_state_is_split_as_parameters_are(name, mesh_of):
    config = small_config(name, dp=2, tp=2, zero_stage=1)
    programs = Programs(config, mesh_of(config))
    leaves = jax.tree.leaves(programs.abstract_state.opt_state)
    held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    # A quarter of what belongs to matrices, half of what belongs to norms; counters are whole.
    assert held < 0.27 * sum(math.prod(leaf.shape) for leaf in leaves)


def test_training_in_bf16_alone_keeps_no_fp32_copy_and_learns(batch, mesh_of):
    config = small_config("adamw", dp=2)
    training = dataclasses.replace(
        config.training, param_dtype="bfloat16", compute_dtype="bfloat16"
    )
    config = dataclasses.replace(config, training=training)
    programs = Programs(config, mesh_of(config))
    state, losses = run(programs, programs.create_state(), batch)
    arrays = [leaf for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.ndim]
    assert {leaf.dtype for leaf in arrays} == {jnp.dtype("bfloat16")}
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("shape", ["gpt2", "qwen3_moe", "deepseek_v3", "deepseek_v2_lite"])
def test_muon_orthogonalises_every_matrix_of_a_layer(shape, small_config):
    """Those of latent attention and multi-token prediction, too. Expert by expert, layer by layer;
    embedding, head, router, norms and biases are AdamW's."""
    config = small_config(shape)
    infos = Transformer(config.model, config.moe).infos
    params = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, jnp.float32), infos)
    optimizer = build_optimizer(OptimizerConfig(name="muon"), infos)
    state = jax.eval_shape(optimizer.init, params)
    momenta = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if "muon" in jax.tree_util.keystr(path) and ".mu" in jax.tree_util.keystr(path)
        if leaf.ndim
    ]
    for path, _ in jax.tree_util.tree_leaves_with_path(infos):
        name = jax.tree_util.keystr(path)
        is_muon = any(momentum.endswith(name) for momentum in momenta)
        assert is_muon == (not any(word in name for word in NOT_MUON)), name
