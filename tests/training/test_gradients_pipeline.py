"""Loss and every gradient are those of one device under pipeline stages, with every other axis.

Each schedule by itself is in `tests/pipeline/test_executor.py`, with a model that compiles faster.
"""

import pytest

from mxjax.config.schema import RematConfig, RematRule
from mxjax.pipeline import stagewise
from mxjax.pipeline.split import split_layer

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
CASES = {
    "dropout, fewer microbatches than stages, tied embedding": (
        "gpt2", {"num_layers": 4, **DROPOUT}, {"pp": 4},
        {"schedule": "1f1b"}, {"num_microbatches": 2},
        RematConfig(policy="norm", rules=(RematRule(stages="3", policy="full"),)),
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
        RematConfig(rules=(RematRule(stages="0,2", policy="full"),)),
    ),
    "tp, three empty places": (
        "deepseek", {"num_layers": 5}, {"pp": 4, "tp": 2},
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


TOLERANCES = {"1f1b": 1e-6, "dualpipev": 1e-6, "zbh1": 2e-6}
"""Of cases with policies for layers. That of ZBH1 has axes besides, over which sums have another
order: from the same layout without policies it differs by less than 5e-7."""


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(small_config, assert_parity, name):
    shape, model, parallel, pipeline, training, remat = CASES[name]
    config = small_config(
        shape,
        model=model,
        parallel=parallel,
        pipeline=pipeline,
        training=training,
        remat=remat,
    )
    policies = isinstance(remat, RematConfig)
    assert_parity(config, TOLERANCES[pipeline["schedule"]] if policies else 2e-5)


@pytest.mark.parametrize(
    ("parallel", "schedule"),
    [({"pp": 2, "ep": 2}, "zbh1"), ({"pp": 2, "dp": 2, "zero_stage": 2}, "dualpipev")],
    ids=["zbh1", "ZeRO-2, which reduces gradients before they are summed"],
)
def test_grouped_experts_add_to_the_sums(
    small_config, assert_parity, monkeypatch, parallel, schedule
):
    splits = []

    def remembered(*arguments, **options):
        splits.append(split_layer(*arguments, **options))
        return splits[-1]

    monkeypatch.setattr(stagewise, "split_layer", remembered)
    config = small_config(
        "mixtral",
        model={"num_layers": 4},
        moe={"expert_gemm": "grouped"},
        parallel=parallel,
        pipeline={"schedule": schedule, "executor": "stagewise"},
        training={"num_microbatches": 4, "global_batch_size": 8},
    )
    assert_parity(config)
    assert [len(split.adding) for split in splits] == [2], "both matrices of the experts"
