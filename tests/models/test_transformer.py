"""The model as a whole: sizes, initial values, randomness."""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from mxjax.config import ModelConfig, MoEConfig
from mxjax.models.transformer import Transformer
from mxjax.training.flops import parameter_counts
from mxjax.training.gradients import Objective

LLAMA3_70B = ModelConfig(
    num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64,
    num_query_groups=8, vocab_size=128256,
)  # fmt: skip
MIXTRAL_8X22B = (
    ModelConfig(
        num_layers=56, hidden_size=6144, ffn_hidden_size=16384, num_attention_heads=48,
        num_query_groups=8, vocab_size=32768,
    ),
    MoEConfig(num_experts=8),
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "moe", "published"),
    [(LLAMA3_70B, MoEConfig(), 70.6e9), (*MIXTRAL_8X22B, 140.6e9)],
    ids=["llama3-70b", "mixtral-8x22b"],
)
def test_large_models_are_described_without_memory(model, moe, published):
    """Shapes only: seconds, and the published number of parameters."""
    started = time.perf_counter()
    infos = jax.tree.leaves(Transformer(model, moe).infos)
    assert time.perf_counter() - started < 20
    total = sum(math.prod(info.shape) for info in infos)
    assert abs(total - published) < 0.002 * published


@pytest.mark.parametrize("shape", ["llama", "gpt2", "mixtral", "deepseek"])
def test_the_formula_of_parameter_counts_is_that_of_the_model(small_config, shape):
    config = small_config(shape)
    infos = jax.tree.leaves(Transformer(config.model, config.moe).infos)
    total = sum(math.prod(info.shape) for info in infos)
    assert total == parameter_counts(config.model, config.moe).total


def test_initial_parameters_are_the_same_on_any_mesh(small_config, mesh_of):
    values = []
    for parallel in [{}, {"dp": 2, "ep": 2, "tp": 2, "zero_stage": 3}]:
        config = small_config("mixtral", parallel=parallel)
        mesh = mesh_of(config)
        objective = Objective(config, mesh)
        shardings = jax.tree.map(lambda s, m=mesh: NamedSharding(m, s), objective.param_specs)
        init = jax.jit(objective.model.init, out_shardings=shardings)
        values.append(jax.tree.map(np.asarray, init(jax.random.key(3))))
    jax.tree.map(np.testing.assert_array_equal, *values)


def test_initial_scale(small_config):
    """Normal with init_method_std; what writes into the residual stream / sqrt(2 layers)."""
    config = small_config("mixtral")
    model = dataclasses.replace(config.model, hidden_size=256, num_layers=8)
    params = Transformer(model, config.moe).init(jax.random.key(0))
    layers = params["moe_layers"]
    for value, std in [
        (params["embedding"]["weight"], 0.02),
        (layers["attention"]["q"], 0.02),
        (layers["mlp"]["experts"]["up"], 0.02),
        (layers["attention"]["out"], 0.02 / 4),
        (layers["mlp"]["experts"]["down"], 0.02 / 4),
    ]:
        assert abs(float(jnp.std(value)) / std - 1) < 0.05
    assert np.all(params["head"]["norm"]["scale"] == 1)
    assert np.any(layers["attention"]["q"][0] != layers["attention"]["q"][1])


def dropout_loss(config, mesh, seed, batch):
    objective = Objective(config, mesh)
    params = jax.jit(objective.model.init)(jax.random.key(0))
    run = jax.jit(objective.loss_and_gradients())
    _, stats = run(params, objective.model.initial_expert_bias(), batch, jax.random.key(seed))
    return float(stats.loss)


def test_dropout_follows_the_key_alone(small_config, mesh_of, packed_batch):
    config = small_config("gpt2")
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, hidden_dropout=0.3, attention_dropout=0.2),
    )
    batch, mesh = packed_batch(config), mesh_of(config)
    first = dropout_loss(config, mesh, 0, batch)
    assert first == dropout_loss(config, mesh, 0, batch)
    assert first != dropout_loss(config, mesh, 1, batch)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_under_tensor_parallel(small_config, mesh_of, packed_batch, sequence_parallel):
    """Hidden dropout alone is equal over tp ranks when the residual stream is: then tp 2 gives the
    loss of one device to rounding. With a split stream each rank draws for its own part."""
    losses = []
    for parallel in [{}, {"tp": 2, "sequence_parallel": sequence_parallel}]:
        config = small_config("gpt2", parallel=parallel)
        model = dataclasses.replace(config.model, hidden_dropout=0.3)
        config = dataclasses.replace(config, model=model)
        losses.append(dropout_loss(config, mesh_of(config), 0, packed_batch(config)))
    close = abs(losses[0] - losses[1]) <= 1e-6 * losses[0]
    assert close != sequence_parallel
    assert abs(losses[0] - losses[1]) < 0.1 * losses[0]
