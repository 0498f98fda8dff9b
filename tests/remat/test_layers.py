"""Which layer gets which policy, and what is refused with what words."""

import pytest

from mxjax.config import ConfigError, load_settings
from mxjax.remat.layers import KEEP_ALL, layer_policies, numbers, runs
from mxjax.remat.names import names_of

MOE = {
    "model": {"num_layers": 6, "mtp_num_layers": 1},
    "moe": {"num_experts": 4, "first_k_dense": 2},
}
PIPELINE = {
    "parallel": {"pp": 3, "zero_stage": 0},
    "pipeline": {"schedule": "1f1b"},
    "training": {"num_microbatches": 4, "global_batch_size": 16},
}


def load(remat, **sections):
    return load_settings({**MOE, **sections, "remat": remat}, "a test", [], lambda parallel: 3)


def recomputed(config):
    """Names that each layer computes again; None: it keeps whatever autodiff wants."""
    groups = ["dense_layers"] * 2 + ["moe_layers"] * 4 + ["mtp_layers"]
    return [
        None
        if policy == KEEP_ALL
        else set(names_of(config, group)) - policy.save - policy.offload - {"layer_input"}
        for policy, group in zip(layer_policies(config), groups, strict=True)
    ]


def test_tiers_are_for_moe_layers_and_the_last_rule_that_matches_wins():
    config = load(
        {
            "tier": "light",
            "rules": [
                {"layers": "3-4", "policy": "norm"},
                {"layers": "4", "recompute": ["attention", "expert_up"]},
                {"group": "mtp_layers"},
            ],
        },
        parallel={"dp": 3, "zero_stage": 0},
        training={"global_batch_size": 6},
    )
    light = {"router_logits", "expert_rows", "expert_act"}
    norms = {"attention_norm", "mlp_norm"}
    assert recomputed(config) == [
        None, None, light, norms, {"attention_out", "expert_up"}, light, None
    ]  # fmt: skip
    # Layers of equal policies that follow each other run in one loop.
    assert runs(layer_policies(config)[:6]) == [
        range(2), range(2, 3), range(3, 4), range(4, 5), range(5, 6)
    ]  # fmt: skip


def test_a_pipeline_offloads_in_the_first_half_of_its_stages():
    """The others keep it on the device; a rule has the last word."""
    stagewise = {**PIPELINE, "pipeline": {"schedule": "1f1b", "executor": "stagewise"}}
    remat = {"policy": "full", "offload": ["attention"]}
    found = layer_policies(load(remat, **stagewise))
    assert [(set(policy.save), set(policy.offload)) for policy in found] == [
        *[(set(), {"attention_out"})] * 4, *[({"attention_out"}, set())] * 3
    ]  # fmt: skip
    remat["rules"] = [{"stages": "2", "policy": "full", "offload": ["attention"]}]
    assert all(policy.offload for policy in layer_policies(load(remat, **stagewise)))


def test_rules_go_by_pipeline_stage():
    config = load({"rules": [{"stages": "0,2", "policy": "full"}]}, **PIPELINE)
    kept = [policy.kind for policy in layer_policies(config)]
    assert kept == ["names"] * 2 + ["all"] * 2 + ["names"] * 3  # mtp is on the last stage
    assert not any(policy.save for policy in layer_policies(config))


def test_ranges():
    assert [n for some in numbers("0, 2-4,9") for n in some] == [0, 2, 3, 4, 9]
    assert numbers("0-3000000000") == [range(3_000_000_001)], "without a list of them"


@pytest.mark.parametrize(
    ("remat", "sections", "path", "words"),
    [
        (
            {"recompute": ["expert_uo"]}, {"parallel": {"dp": 3}}, "remat.recompute",
            "expert_uo is no tensor of dense_layers or moe_layers or mtp_layers of this model",
        ),
        (
            {"rules": [{"group": "dense_layers", "save": ["expert_up"]}]}, {}, "remat.rules",
            "tensors: attention_norm, attention_out, attention_residual, key, layer_input, mlp_act",
        ),
        (
            {"rules": [{"layers": "0", "save": ["expert_up"]}]}, {}, "remat.rules",
            "expert_up is no tensor of dense_layers of this model",
        ),
        ({"tier": "light"}, {"moe": {"num_experts": 0}}, "remat.tier", "is for MoE layers"),
        ({"policy": "mla_up_proj"}, {}, "remat.policy", "which dense_layers or moe_layers"),
        ({"policy": "dots", "save": ["query"]}, {}, "remat.policy", "cannot be combined with save"),
        ({"save": ["norm"], "offload": ["mlp_norm"]}, {}, "remat.offload", "is in save too"),
        ({"recompute": ["layer_input"]}, {}, "remat.recompute", "computed again from"),
        ({"rules": [{"layers": "4-x"}]}, {}, "remat.rules", "'4-x' is neither a number nor"),
        (
            {"rules": [{"stages": "3"}]}, PIPELINE, "remat.rules",
            "is for no layer: stages are 0-2, layers 0-6 (multi-token prediction last)",
        ),
        ({"offload": ["mlp_norm"]}, PIPELINE, "remat.offload", "pipeline.executor to stagewise"),
        (
            {"offload": ["mlp_norm"]}, {"training": {"scan_layers": False}}, "remat.offload",
            "set training.scan_layers to true",
        ),
        ({"rules": [{"polcy": "full"}]}, {}, "remat.rules[0].polcy", "remat.rules.policy?"),
        ({"memory_budget": "80G", "mode": "save_memory"}, {}, "remat.memory_budget", "80GiB"),
        ({"memory_budget": "80GiB"}, {}, "remat.memory_budget", "remat.mode: manual"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_way_out(remat, sections, path, words):
    with pytest.raises(ConfigError) as refused:
        load(remat, **sections)
    assert any(p.path == path and words in p.message for p in refused.value.problems)
