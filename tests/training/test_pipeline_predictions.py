"""Predictions and the search for NaN with pipeline stages: as on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from mxjax.config.schema import PipelineConfig
from mxjax.models.transformer import Transformer
from mxjax.training.diagnose import where_nonfinite
from mxjax.training.pipelined import build_objective
from mxjax.training.predict import predictor
from mxjax.training.programs import Programs
from mxjax.training.sample import greedy_sample
from mxjax.training.state import TrainState

SEQ = 64


@pytest.fixture(scope="module")
def config(small_config):
    """Three layers, one dense, in a V of four stages: one place is empty."""
    return small_config(
        "deepseek",
        model={"num_layers": 3},
        parallel={"pp": 2, "tp": 2},
        pipeline={"schedule": "dualpipev", "empty_layers": "auto"},
        training={"num_microbatches": 4, "global_batch_size": 8, "seq_length": SEQ},
    )


@pytest.fixture(scope="module")
def state_of(random_weights):
    """Objective -> state with the same weights in any layout; `change` may alter them first."""

    def make(objective, change=lambda params: None):
        params, bias = random_weights(Transformer(objective.config.model, objective.config.moe))
        change(params)

        def place(part, leaf, spec):
            if part.places is not None:
                empty = np.zeros_like(leaf[0])
                leaf = np.stack([leaf[n] if n >= 0 else empty for n in part.places])
            return jax.device_put(leaf, NamedSharding(objective.mesh, spec))

        placed = {
            name: jax.tree.map(
                lambda leaf, spec, part=part: place(part, leaf, spec),
                params[name],
                objective.param_specs[name],
            )
            for name, part in objective.model.parts.items()
        }
        return TrainState(jnp.int32(0), placed, (), jnp.asarray(bias), jnp.asarray(False))

    return make


def test_logits_and_samples_equal_those_of_one_device(config, small_config, mesh_of, state_of):
    alone = dataclasses.replace(
        config, parallel=small_config("llama").parallel, pipeline=PipelineConfig()
    )
    tokens = (
        np.random.default_rng(0).integers(0, config.model.vocab_size, (2, SEQ)).astype(np.int32)
    )
    logits, samples = [], []
    for each in (config, alone):
        objective = build_objective(each, mesh_of(each))
        state = state_of(objective)
        predict = jax.jit(predictor(objective, "logits", SEQ))
        logits.append(np.asarray(predict(state.params, state.expert_bias, tokens)))
        samples.append(greedy_sample(objective, state, tokens[0, :5].tolist(), SEQ - 5, SEQ))
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-5)
    assert samples[0] == samples[1]
    assert len(set(samples[0])) > 1


def test_a_broken_layer_is_named_by_its_place_in_the_model(config, mesh_of, state_of, packed_batch):
    """Rank 0 has the first and the last layer, and the empty place lies between them."""
    programs = Programs(config, mesh_of(config))

    def where(kind, row, value):
        def poison(params):
            params[kind]["attention"]["out"][row] = value

        state = state_of(programs.objective, poison)
        return where_nonfinite(programs, float("inf"), state, packed_batch(config))

    for row in range(2):
        name = f"parameter moe_layers.attention.out of layer {1 + row}"
        assert where("moe_layers", row, np.nan) == name
        assert where("moe_layers", row, 3e38) == f"output of layer {1 + row}"
    assert where("dense_layers", 0, 3e38) == "output of layer 0"
    programs.close()
