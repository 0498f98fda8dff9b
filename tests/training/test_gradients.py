"""Loss and every gradient are those of one device under any layout: dense models.

`test_gradients_moe.py` has the models with experts.
"""

import pytest

TWO = {"num_microbatches": 2}
UNROLLED = {"scan_layers": False}


@pytest.mark.parametrize(
    ("parallel", "training"),
    [
        ({"tp": 2}, {}),
        ({"tp": 2, "sequence_parallel": False}, UNROLLED),
        ({"tp": 4}, {}),
        ({"tp": 4, "sequence_parallel": False}, {}),
        ({"dp": 2, "zero_stage": 0}, {}),
        ({"dp": 2, "zero_stage": 1}, TWO),
        ({"dp": 2, "zero_stage": 2}, {}),
        ({"dp": 2, "zero_stage": 2}, TWO | UNROLLED),
        ({"dp": 2, "zero_stage": 3}, {}),
        ({"dp": 2, "zero_stage": 3}, TWO),
        ({"dp": 4, "tp": 2, "zero_stage": 3}, UNROLLED),
        ({"dp": 2, "tp": 4, "zero_stage": 1}, {}),
    ],
    ids=str,
)
def test_llama(small_config, assert_parity, parallel, training):
    """With four `tp` ranks there are fewer key/value groups (two) than ranks."""
    assert_parity(small_config("llama", parallel=parallel, training=training))


@pytest.mark.parametrize(
    ("parallel", "training"),
    [
        ({"tp": 2}, {}),
        ({"tp": 4, "sequence_parallel": False}, {}),
        ({"dp": 2, "zero_stage": 3}, TWO | UNROLLED),
        ({"dp": 2, "tp": 2, "zero_stage": 1}, TWO),
        ({"dp": 2, "tp": 2, "zero_stage": 3}, {}),
    ],
    ids=str,
)
def test_gpt2(small_config, assert_parity, parallel, training):
    """LayerNorm, biases, learned positions, and an embedding that is also the head."""
    assert_parity(small_config("gpt2", parallel=parallel, training=training))
