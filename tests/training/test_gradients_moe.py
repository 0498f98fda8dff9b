"""Loss and every gradient are those of one device under any layout: models with experts.

The models have a shared expert, all router losses and a balancing bias. Router losses are those of
a microbatch, so the one device runs the same number of microbatches.
"""

import jax
import numpy as np
import pytest

from mxjax.training.gradients import Objective

TWO = {"num_microbatches": 2}
UNROLLED = {"scan_layers": False}
FOLDED = {"expert_tensor_parallel": False}
REPLICATED_STREAM = {"sequence_parallel": False}


@pytest.mark.parametrize(
    ("parallel", "training"),
    [
        ({"dp": 2, "ep": 2, "zero_stage": 0}, {}),
        ({"tp": 2} | REPLICATED_STREAM, {}),
        ({"ep": 4, "zero_stage": 1}, TWO),
        ({"dp": 2, "ep": 2, "tp": 2, "zero_stage": 2}, TWO),
        ({"dp": 2, "ep": 2, "tp": 2, "zero_stage": 3}, {}),
        ({"ep": 2, "tp": 2} | FOLDED, {}),
        ({"ep": 2, "tp": 2, "zero_stage": 3} | FOLDED | REPLICATED_STREAM, {}),
    ],
    ids=str,
)
def test_alltoall(small_config, assert_parity, parallel, training):
    assert_parity(small_config("mixtral", parallel=parallel, training=training))


@pytest.mark.parametrize(
    ("parallel", "training"),
    [
        ({"ep": 4, "zero_stage": 3}, TWO),
        ({"dp": 2, "ep": 2, "tp": 2, "zero_stage": 3}, UNROLLED),
        ({"ep": 2, "tp": 4, "zero_stage": 1} | REPLICATED_STREAM, {}),
        ({"ep": 2, "tp": 2} | FOLDED, {}),
        ({"ep": 2, "tp": 2} | FOLDED | REPLICATED_STREAM, {}),
    ],
    ids=str,
)
def test_allgather(small_config, assert_parity, parallel, training):
    moe = {"dispatcher": "allgather"}
    assert_parity(small_config("mixtral", moe=moe, parallel=parallel, training=training))


@pytest.mark.parametrize(
    ("dispatcher", "parallel"),
    [
        ("alltoall", {"ep": 2, "tp": 2} | FOLDED),
        ("allgather", {"dp": 2, "ep": 2, "zero_stage": 1}),
    ],
    ids=str,
)
def test_deepseek(small_config, assert_parity, dispatcher, parallel):
    """Sigmoid scores, and a dense layer before the one with experts."""
    assert_parity(small_config("deepseek", moe={"dispatcher": dispatcher}, parallel=parallel))


def test_grouped_experts(small_config, assert_parity):
    """Against batched ones on the one device."""
    parallel = {"dp": 2, "ep": 2, "tp": 2, "zero_stage": 3}
    moe = {"expert_gemm": "grouped"}
    assert_parity(small_config("deepseek", moe=moe, parallel=parallel, training=UNROLLED))


def test_evaluation_reports_the_loss_that_training_does(
    small_config, mesh_of, packed_batch, random_weights, loss_and_gradients
):
    """Without dropout. All figures, over two microbatches, and every layer's output is finite."""
    config = small_config("mixtral", training=TWO)
    objective = Objective(config, mesh_of(config))
    params, bias = random_weights(objective.model)
    evaluate = jax.jit(objective.evaluate())
    stats, finite = evaluate(params, bias, packed_batch(config), jax.random.key(0))
    _, expected = loss_and_gradients(config)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), stats, expected)
    np.testing.assert_array_equal(finite["moe_layers"], [True, True])
