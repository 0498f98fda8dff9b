"""Loss and every gradient are those of one device under any layout: Qwen3 and DeepSeek models.

DeepSeek's have latent attention with YaRN, group-limited routing (V3), a dense layer and then one
with experts; V3's have a module of multi-token prediction with experts, too. More layouts with `cp`
and `sp` are in `test_gradients_context.py`.
"""

import pytest

TWO = {"num_microbatches": 2}
UNROLLED = {"scan_layers": False}
FOLDED = {"expert_tensor_parallel": False}
REPLICATED_STREAM = {"sequence_parallel": False}
ALL = {"dp": 2, "ep": 2, "tp": 2}
CONTEXT = {"dp": 2, "cp": 2, "tp": 2, "zero_stage": 3}


@pytest.mark.parametrize(
    ("shape", "parallel", "training"),
    [
        ("qwen3", {"dp": 2, "tp": 4, "zero_stage": 3}, {}),
        ("qwen3_moe", ALL | {"zero_stage": 3}, {}),
        ("qwen3_moe", {"ep": 2, "tp": 2, "zero_stage": 3} | FOLDED, UNROLLED),
        ("qwen3_moe", CONTEXT, {}),
    ],
    ids=str,
)
def test_qwen3(small_config, assert_parity, shape, parallel, training):
    """Norms over heads; with four `tp` ranks there are fewer key/value groups than ranks."""
    assert_parity(small_config(shape, parallel=parallel, training=training))


@pytest.mark.parametrize(
    ("parallel", "training", "remat"),
    [
        (ALL | {"zero_stage": 3}, UNROLLED, "full"),
        ({"ep": 2, "tp": 2, "zero_stage": 1}, UNROLLED, "none"),
        ({"ep": 2, "tp": 2, "zero_stage": 2} | FOLDED | REPLICATED_STREAM, {}, "dots"),
        (CONTEXT, UNROLLED, "none"),
    ],
    ids=str,
)
def test_deepseek_v3(small_config, assert_parity, parallel, training, remat):
    """One dense layer, and the module of multi-token prediction, which has experts."""
    model = {"num_layers": 1}
    assert_parity(
        small_config("deepseek_v3", model=model, parallel=parallel, training=training, remat=remat)
    )


def test_two_modules_of_multi_token_prediction(small_config, assert_parity):
    """In a dense model, over two microbatches with different numbers of targets."""
    parallel = {"dp": 2, "tp": 2, "zero_stage": 3}
    model, training = {"num_layers": 1, "mtp_num_layers": 2}, TWO | UNROLLED
    assert_parity(small_config("llama", model=model, parallel=parallel, training=training))


@pytest.mark.parametrize(
    "parallel",
    [ALL | {"zero_stage": 3}, {"ep": 2, "cp": 2, "sp": 2, "zero_stage": 1}],
    ids=str,
)
def test_deepseek_v2_lite(small_config, assert_parity, parallel):
    """Queries without a latent of their own."""
    assert_parity(small_config("deepseek_v2_lite", parallel=parallel))
