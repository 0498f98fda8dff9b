"""The model as a whole: sizes, initial values, randomness."""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

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


@pytest.mark.parametrize(
    ("shape", "model", "moe"),
    [
        ("llama", {}, {}),
        ("llama", {"head_dim": 12, "num_query_groups": 1, "tie_embeddings": True}, {}),
        ("llama", {"add_qkv_bias": True, "norm": "layernorm"}, {}),
        ("gpt2", {}, {}),
        ("gpt2", {"add_bias_linear": False, "tie_embeddings": False, "activation": "swiglu"}, {}),
        ("mixtral", {}, {}),
        ("mixtral", {"activation": "gelu", "add_bias_linear": True}, {}),
        ("mixtral", {}, {"shared_expert_intermediate_size": 0, "moe_ffn_hidden_size": None}),
        ("deepseek", {"num_layers": 5}, {"first_k_dense": 2}),
    ],
    ids=str,
)
def test_the_formula_of_parameter_counts_is_that_of_the_model(small_config, shape, model, moe):
    config = small_config(shape, model=model, moe=moe)
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


@pytest.fixture
def dropout_loss(small_config, mesh_of, random_weights):
    """(sections' changes) -> the loss of a GPT-2-like model as a function of (seed, batch)."""

    def make(**sections):
        config = small_config("gpt2", **sections)
        objective = Objective(config, mesh_of(config))
        params, _ = random_weights(objective.model)
        run = jax.jit(objective.loss_and_gradients())
        return lambda seed, batch: float(run(params, None, batch, jax.random.key(seed))[1].loss)

    return make


def test_dropout_follows_the_key_alone(small_config, packed_batch, dropout_loss):
    batch = packed_batch(small_config("gpt2"))
    loss = dropout_loss(model={"hidden_dropout": 0.3, "attention_dropout": 0.2})
    assert loss(0, batch) == loss(0, batch)
    assert loss(0, batch) != loss(1, batch)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_under_tensor_parallel(small_config, packed_batch, dropout_loss, sequence_parallel):
    """Hidden dropout alone is equal over tp ranks when the residual stream is: then tp 2 gives the
    loss of one device to rounding. With a split stream each rank draws for its own part."""
    batch, model = packed_batch(small_config("gpt2")), {"hidden_dropout": 0.3}
    alone = dropout_loss(model=model)(0, batch)
    parallel = {"tp": 2, "sequence_parallel": sequence_parallel}
    split = dropout_loss(model=model, parallel=parallel)(0, batch)
    close = abs(alone - split) <= 1e-6 * alone
    assert close != sequence_parallel
    assert abs(alone - split) < 0.1 * alone


def test_every_layer_draws_its_own_dropout(small_config, mesh_of, packed_batch):
    """Layers with equal weights make the same of the same input, unless there is dropout."""
    config, first, second = small_config("gpt2"), 0, 1
    same_input = np.random.default_rng(0).normal(size=(8, 32, 32)).astype(np.float32)
    batch = {name: value[0] for name, value in packed_batch(config).items()}

    def outputs(hidden_dropout):
        model = Transformer(
            dataclasses.replace(config.model, hidden_dropout=hidden_dropout), config.moe
        )
        params = model.init(jax.random.key(0))
        layers = params["dense_layers"]
        params["dense_layers"] = jax.tree.map(lambda p: jnp.stack([p[first]] * 2), layers)

        def feed_all_alike(layer, infos, index):
            return lambda params, x, *rest: (x, layer(params, same_input, *rest)[0] - same_input)

        def local(params, batch):
            ctx = model.context(batch, jax.random.key(1))
            return model.hidden(params, None, batch["tokens"], ctx, feed_all_alike)[1][
                "dense_layers"
            ]

        spec = PartitionSpec()
        run = jax.shard_map(
            local, mesh=mesh_of(config), in_specs=spec, out_specs=spec, check_vma=False
        )
        return jax.jit(run)(params, batch)

    plain, dropped = outputs(0.0), outputs(0.5)
    np.testing.assert_array_equal(plain[first], plain[second])
    # A quarter of the values are left out after both attention and MLP.
    out = dropped == 0
    assert abs(np.mean(out) - 0.25) < 0.02
    assert abs(np.mean(out[first] & out[second]) - 0.25**2) < 0.02


@pytest.mark.parametrize(
    ("training", "parallel"), [({"num_microbatches": 2}, {}), ({}, {"dp": 2})], ids=str
)
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_every_microbatch_and_data_rank_draws_its_own_dropout(
    small_config, packed_batch, dropout_loss, rate, training, parallel
):
    """The same sequences in the first half of the batch or in the second, the other half without
    targets: the same loss, unless there is dropout."""
    sections = {"parallel": parallel, "training": training}
    batch = packed_batch(small_config("gpt2", **sections))
    half = {name: value.reshape(2, 4, -1)[0] for name, value in batch.items()}
    nothing = half | {"targets": np.full_like(half["targets"], -1)}

    def join(*parts):
        return {
            name: np.stack([part[name] for part in parts]).reshape(batch[name].shape)
            for name in half
        }

    loss = dropout_loss(model={"hidden_dropout": rate}, **sections)
    first, second = loss(0, join(half, nothing)), loss(0, join(nothing, half))
    assert (first == second) == (rate == 0)
