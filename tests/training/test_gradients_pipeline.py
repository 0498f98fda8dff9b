"""Loss and every gradient are those of one device under pipeline stages, with every other axis.

Each schedule by itself is in `tests/pipeline/test_executor.py`, with a model that compiles faster.
"""

import pytest

from mxjax.config.schema import RematConfig, RematRule

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
CASES = {
    "dropout, fewer microbatches than stages, tied embedding": (
        "gpt2", {"num_layers": 4, **DROPOUT}, {"pp": 4},
        {"schedule": "1f1b"}, {"num_microbatches": 2},
        RematConfig(policy="norm", rules=(RematRule(stages="0", policy="full"),
                                          RematRule(stages="3", policy="attention"))),
    ),
    "ep, dp, latent attention, prediction of later tokens; tiers that differ within a stage": (
        "deepseek_v3", {"num_layers": 3}, {"pp": 2, "ep": 2, "dp": 2, "zero_stage": 2},
        {"schedule": "zbh1", "layout": "Et|ttmL"}, {"num_microbatches": 2},
        RematConfig(policy="mla_up_proj", tier="medium",
                    rules=(RematRule(layers="1", tier="full"), RematRule(layers="2", tier="light"))),
    ),
    "two chunks a rank, stages with policies of their own": (
        "llama", {"num_layers": 4, **DROPOUT}, {"pp": 2},
        {"schedule": "dualpipev"}, {"num_microbatches": 4},
        RematConfig(rules=(RematRule(stages="0", policy="full"), RematRule(stages="2", policy="norm"))),
    ),
    "tp, three empty places": (
        "deepseek_v3", {"num_layers": 5}, {"pp": 4, "tp": 2},
        {"schedule": "interleaved", "empty_layers": "auto"}, {"num_microbatches": 4}, "none",
    ),
    "cp": (
        "qwen3_moe", {"num_layers": 2}, {"pp": 2, "cp": 2, "cp_rotation": "alltoall"},
        {"schedule": "zbh1"}, {"num_microbatches": 2}, "dots",
    ),
    "ZeRO-3, unrolled and uneven": (
        "deepseek", {"num_layers": 3}, {"pp": 2, "dp": 2, "zero_stage": 3},
        {"schedule": "zbh1", "layout": "Et|ttL"}, {"num_microbatches": 2, "scan_layers": False}, "none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(small_config, assert_parity, name):
    shape, model, parallel, pipeline, training, remat = CASES[name]
    assert_parity(
        small_config(
            shape,
            model=model,
            parallel=parallel,
            pipeline=pipeline,
            training=training,
            remat=remat,
        )
    )
