"""Multi-token prediction: the modules against numpy, and what they may see."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mxjax.models.transformer import Transformer
from mxjax.training.gradients import Objective

S = 32


@pytest.fixture(scope="module")
def outputs(small_config, mesh_of, packed_batch, random_weights):
    """(model, batch of [B, S] arrays) -> residual stream after the last layer, that after each
    module, as numpy arrays; without wrappers around layers."""
    mesh = mesh_of(small_config("llama"))

    def run(model, params, bias, batch):
        def local(params, bias, batch):
            ctx = model.context(batch, None)
            x, _ = model.hidden(params, bias, batch["tokens"], ctx, lambda layer, *_: layer)
            normed = model.parts["head"].bind(params["head"]).norm(x)
            tokens = [batch[f"mtp_tokens_{k + 1}"] for k in range(model.model.mtp_num_layers)]
            ahead, _ = model.ahead(params, bias, normed, tokens, ctx, lambda layer, *_: layer)
            return normed, ahead

        spec = PartitionSpec()
        split = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.device_get(jax.jit(split)(params, bias, batch))

    return run


def rms(x, scale):
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-5) * scale


def test_a_module_joins_hidden_state_and_embedding(
    small_config, packed_batch, random_weights, outputs
):
    """DeepSeek-V3, equations 21 to 23. A layer whose matrices are zero passes its input on, so
    that all but the layer can be worked out by hand."""
    config = small_config("llama", model={"mtp_num_layers": 2})
    model = Transformer(config.model, config.moe)
    params, _ = random_weights(model)
    for part in ("attention", "mlp"):
        matrices = params["mtp_layers"]["layer"][part]
        params["mtp_layers"]["layer"][part] = jax.tree.map(np.zeros_like, matrices)
    batch = {name: array[0] for name, array in packed_batch(config).items()}
    hidden, ahead = outputs(model, params, None, batch)
    for k, got in enumerate(ahead):
        w = jax.tree.map(lambda p, k=k: p[k], params["mtp_layers"])
        embedding = params["embedding"]["weight"][batch[f"mtp_tokens_{k + 1}"]]
        joined = np.concatenate(
            [
                rms(embedding, w["embedding_norm"]["scale"]),
                rms(hidden, w["hidden_norm"]["scale"]),
            ],
            axis=-1,
        )
        hidden = rms(joined @ w["projection"], w["norm"]["scale"])
        np.testing.assert_allclose(got, hidden, rtol=1e-4, atol=1e-5)


def test_the_layer_of_a_module_is_like_the_last_one(small_config):
    """With experts if the model's last layer has some, and with a balancing bias of its own."""
    for shape in ("llama", "deepseek_v3"):
        config = small_config(shape, model={"mtp_num_layers": 2})
        model = Transformer(config.model, config.moe)
        last = model.parts[model.layer_groups[-1]].layer_infos
        assert model.parts["mtp_layers"].layer_infos["layer"] == last
    assert model.num_routers == model.num_moe_layers + 2
    assert model.initial_expert_bias().shape == (3, config.moe.num_experts)


def test_a_prediction_sees_no_token_that_it_predicts(
    small_config, packed_batch, random_weights, outputs
):
    """Module k at position i sees tokens up to i + k: changing one changes what is at and after
    i = token - k, and nothing before."""
    config = small_config("deepseek_v3", model={"mtp_num_layers": 2})
    model = Transformer(config.model, config.moe)
    params, bias = random_weights(model)
    tokens = np.arange(S)[None] % 50
    changed = tokens.copy()
    changed[0, 20] = 51

    def run(tokens):
        batch = {
            "tokens": tokens,
            "positions": np.arange(S)[None],
            "segment_ids": np.ones((1, S), int),
            "mtp_tokens_1": np.roll(tokens, -1, axis=1),
            "mtp_tokens_2": np.roll(tokens, -2, axis=1),
        }
        hidden, ahead = outputs(model, params, bias, batch)
        return [hidden, *ahead]

    for k, (before, after) in enumerate(zip(run(tokens), run(changed), strict=True)):
        first = np.flatnonzero(np.any(before[0] != after[0], axis=-1))[0]
        assert first == 20 - k


def test_its_loss_is_the_mean_over_modules_and_weighed(
    small_config, loss_and_gradients, mesh_of, packed_batch, random_weights
):
    """The loss is that of each module alone, averaged. Without targets for the modules all other
    gradients are those of the model without modules."""
    config = small_config("llama", model={"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3})
    objective = Objective(config, mesh_of(config))
    params, _ = random_weights(objective.model)
    run = jax.jit(objective.loss_and_gradients())
    batch, key = packed_batch(config), jax.random.key(1)
    nothing = np.full_like(batch["targets"], -1)
    grads, both = run(params, None, batch, key)
    _, first = run(params, None, batch | {"mtp_targets_2": nothing}, key)
    _, second = run(params, None, batch | {"mtp_targets_1": nothing}, key)
    _, neither_stats = neither = run(
        params, None, batch | {"mtp_targets_1": nothing, "mtp_targets_2": nothing}, key
    )
    np.testing.assert_allclose(both.mtp_loss, first.mtp_loss + second.mtp_loss, rtol=1e-6)
    assert neither_stats.mtp_loss == 0
    assert both.loss == neither_stats.loss
    # Random weights predict nothing: about log(vocabulary), for two modules halved each.
    assert abs(2 * first.mtp_loss - np.log(64)) < 1

    off = dataclasses.replace(config.model, mtp_num_layers=0)
    alone = Objective(dataclasses.replace(config, model=off), objective.mesh)
    plain = {name: value for name, value in params.items() if name != "mtp_layers"}
    expected, stats = jax.jit(alone.loss_and_gradients())(plain, None, packed_batch(config), key)
    assert stats.mtp_loss is None
    for name in plain:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            neither[0][name],
            expected[name],
        )
    assert np.any(grads["embedding"]["weight"] != expected["embedding"]["weight"])
