"""Loss and every gradient are those of one device where `cp` and `sp` split the sequence.

Documents are packed, and their boundaries, drawn at random, heed no boundary of a rank.
"""

import jax
import pytest

from mxjax.training.pipelined import build_objective

TWO = {"num_microbatches": 2}
UNROLLED = {"scan_layers": False}
GATHER = {"cp_method": "allgather"}
SWAP = {"cp_rotation": "alltoall"}
ZERO_3 = {"zero_stage": 3}


@pytest.mark.parametrize(
    ("parallel", "training", "remat"),
    [
        ({"cp": 2}, {}, "none"),
        ({"cp": 2} | GATHER | ZERO_3, UNROLLED, "none"),
        ({"cp": 4} | ZERO_3, {}, "dots"),
        ({"cp": 4, "zero_stage": 2} | GATHER, TWO, "full"),
        ({"cp": 4, "zero_stage": 1} | SWAP, UNROLLED, "full"),
        ({"sp": 2} | ZERO_3, {}, "dots"),
        ({"sp": 4, "tp": 2, "sequence_parallel": False}, {}, "none"),
        ({"cp": 2, "sp": 2} | ZERO_3, {}, "full"),
        ({"dp": 2, "cp": 2, "tp": 2} | ZERO_3, {}, "none"),
        ({"cp": 2, "sp": 2, "tp": 2} | ZERO_3, {}, "none"),
    ],
    ids=str,
)
def test_llama(small_config, assert_parity, parallel, training, remat):
    """There are two key/value groups: with `sp` 4 and `tp` 2 each rank has one of its own."""
    assert_parity(small_config("llama", parallel=parallel, training=training, remat=remat))


def test_gpt2(small_config, assert_parity):
    """Learned positions, and an embedding that is also the head."""
    assert_parity(small_config("gpt2", parallel={"cp": 2, "sp": 2} | ZERO_3))


@pytest.mark.parametrize(
    ("dispatcher", "parallel"),
    [
        ("alltoall", {"cp": 2, "ep": 2} | ZERO_3),
        ("allgather", {"cp": 2, "sp": 2, "tp": 2, "expert_tensor_parallel": False} | GATHER),
        ("allgather", {"sp": 2, "ep": 2} | ZERO_3),
        ("alltoall", {"cp": 4} | ZERO_3),
        ("alltoall", {"cp": 4} | GATHER | ZERO_3),
        ("alltoall", {"cp": 2, "sp": 2} | ZERO_3),
    ],
    ids=str,
)
def test_qwen3_moe(small_config, assert_parity, dispatcher, parallel):
    """The balancing losses are those of whole sequences and of the whole microbatch."""
    moe = {"dispatcher": dispatcher}
    assert_parity(small_config("qwen3_moe", moe=moe, parallel=parallel))


@pytest.mark.parametrize(
    "parallel",
    [
        {"cp": 4} | ZERO_3,
        {"cp": 4} | GATHER | ZERO_3,
        {"sp": 2} | ZERO_3,
        {"cp": 2, "sp": 2} | ZERO_3,
        {"cp": 2, "sp": 2, "tp": 2} | ZERO_3,
    ],
    ids=str,
)
def test_deepseek_v3(small_config, assert_parity, parallel):
    """Values narrower than keys, and targets several tokens ahead, over the borders of ranks. One
    dense layer, and the module that predicts later tokens, which has experts."""
    assert_parity(small_config("deepseek_v3", model={"num_layers": 1}, parallel=parallel))


@pytest.mark.parametrize("remat", ["norm", "dots", "full"])
@pytest.mark.parametrize("parallel", [{"cp": 4}, {"cp": 4} | SWAP, {"cp": 2} | GATHER, {"sp": 2}])
def test_recompute_of_unrolled_layers_is_traced(
    small_config, mesh_of, packed_batch, abstract_params, parallel, remat
):
    """Also of the module that predicts later tokens. JAX's checkpoint takes no layer whose
    derivatives hold a constant array, such as a table of ranks."""
    training = UNROLLED | {"compute_dtype": "bfloat16"}
    config = small_config("deepseek_v3", training=training, parallel=parallel, remat=remat)
    objective = build_objective(config, mesh_of(config))
    params = abstract_params(objective)
    arguments = params, objective.model.initial_expert_bias(), packed_batch(config)
    grads, _ = jax.eval_shape(objective.loss_and_gradients(), *arguments, jax.random.key(0))
    assert jax.tree.structure(grads) == jax.tree.structure(params)
