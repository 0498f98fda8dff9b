"""Ten optimizer steps give the same losses under every layout."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from mxjax.config.schema import OptimizerConfig
from mxjax.training.programs import Programs

NUM_STEPS = 10


@pytest.fixture(scope="module")
def curve(small_config, mesh_of, packed_batch):
    """Layout -> (losses, gradient norms, final balancing bias) of a Mixtral-like model trained from
    its initial weights, on one batch, so that there is something to learn."""

    def run(parallel):
        config = small_config(
            "mixtral",
            moe={"expert_bias_update_rate": 1e-2},
            parallel=parallel,
            training={"num_steps": NUM_STEPS},
        )
        optimizer = OptimizerConfig(lr=1e-2, warmup_steps=3, clip_grad=0.5)
        config = dataclasses.replace(config, optimizer=optimizer)
        programs = Programs(config, mesh_of(config))
        state, step = programs.create_state(), programs.step(math.inf)
        batch = jax.device_put(packed_batch(config), programs.batch_sharding)
        losses, norms = [], []
        for _ in range(NUM_STEPS):
            state, result = step(state, batch)
            losses.append(float(result.loss))
            norms.append(float(result.grad_norm))
        programs.close()
        assert int(state.step) == NUM_STEPS
        return losses, norms, np.asarray(state.expert_bias)

    return run


@pytest.fixture(scope="module")
def alone(curve):
    return curve({})


@pytest.mark.parametrize(
    "parallel",
    [{"dp": 2, "zero_stage": 1}, {"dp": 2, "ep": 2, "tp": 2, "zero_stage": 3}],
    ids=str,
)
def test_losses_are_those_of_one_device(curve, alone, parallel):
    """With clipping by the global norm, warm-up, and a balancing bias moved by global counts."""
    losses, norms, bias = curve(parallel)
    np.testing.assert_allclose(losses, alone[0], rtol=2e-6)
    np.testing.assert_allclose(norms, alone[1], rtol=1e-5)
    np.testing.assert_array_equal(bias, alone[2])
    assert losses[-1] < 0.8 * losses[0]
    assert max(norms) > 0.5, "nothing was clipped"
    assert np.any(bias)
