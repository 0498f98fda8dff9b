"""Every tensor that the models name is in the registry, and policies keep what they say.

All from shapes: layers are traced, not run.
"""

import dataclasses
import functools
import re
from pathlib import Path

import pytest

from mxjax.config.schema import RematConfig
from mxjax.remat.layers import LayerPolicy, policy_of
from mxjax.remat.names import MODULES, NAMES, TIERS, groups_of, names_of
from mxjax.training.gradients import Objective
from mxjax.training.pipelined import build_objective
from mxjax.training.residual_plan import layer_residuals, layer_split

SOFTMAX = {"attention_log_sum_exp"}
"""What `attention_out` stands for besides."""


@pytest.fixture(scope="module")
def kept(small_config, mesh_of):
    """(shape, group, policy) -> names of what a layer keeps, those on the host, and whether it
    keeps anything without a name other than its input."""

    @functools.cache
    def objective_of(shape):
        config = small_config(shape)
        return Objective(config, mesh_of(config))

    def find(shape, group, policy):
        found = layer_residuals(objective_of(shape), group, policy)
        unnamed = [r for r in found if r.name is None and r.argument is None]
        names = {r.name for r in found if not r.on_host} - {None}
        return names - SOFTMAX, {r.name for r in found if r.on_host} - SOFTMAX, unnamed

    return find


def test_each_model_names_what_the_registry_says(small_config, kept):
    """A policy that keeps all names keeps each of them (but for the input, which needs none) and
    nothing else."""
    for shape in ("gpt2", "qwen3_moe", "deepseek_v3", "deepseek_v2_lite"):
        config = small_config(shape)
        for group in groups_of(config):
            everything = set(names_of(config, group)) - {"layer_input"}
            assert everything <= set(NAMES)
            policy = LayerPolicy("names", save=frozenset(everything))
            assert kept(shape, group, policy) == (everything, set(), []), (shape, group)


MOE_LAYER = ("deepseek_v3", "moe_layers")
CHOICES = {
    "norm": RematConfig(policy="norm"),
    "activation": RematConfig(policy="activation"),
    "attention": RematConfig(policy="attention"),
    "mla_up_proj": RematConfig(policy="mla_up_proj"),
    "light": RematConfig(tier="light"),
    "medium": RematConfig(tier="medium"),
    "full tier": RematConfig(tier="full"),
    "full layer": RematConfig(policy="full_layer"),
    "table": RematConfig(
        policy="full", save=("attention",), recompute=("expert_up",), offload=("layer_input",)
    ),
    "tier and table": RematConfig(tier="medium", save=("expert_up",), offload=("norm",)),
}
KEPT = {
    "norm": lambda all_: all_ - set(MODULES["norm"]),
    "activation": lambda all_: all_ - {"expert_act", "shared_expert_act"},
    "attention": lambda all_: all_ - {"attention_out"},
    "mla_up_proj": lambda all_: all_ - {"mla_query", "mla_key", "mla_value"},
    "light": lambda all_: all_ - set(TIERS["light"]),
    "medium": lambda all_: all_ - set(TIERS["light"]) - {"expert_up", "shared_expert_up"},
    "full tier": lambda all_: all_ - set(TIERS["medium"]) - {"dispatched_rows", "permute_plan"},
    "full layer": lambda all_: set(),
    "table": lambda all_: {"attention_out"},
    "tier and table": lambda all_: (
        all_ - set(TIERS["light"]) - {"shared_expert_up"} - set(MODULES["norm"])
    ),
}
ON_HOST = {
    "table": {"layer_input"},
    "tier and table": {"attention_norm", "query_latent_norm", "kv_latent_norm", "mlp_norm"},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_policy_keeps_exactly_the_names_that_it_says(small_config, kept, choice):
    shape, group = MOE_LAYER
    config = dataclasses.replace(small_config(shape), remat=CHOICES[choice])
    everything = set(names_of(config, group)) - {"layer_input"}
    policy = policy_of(config.remat, config, group)
    expected = KEPT[choice](everything), ON_HOST.get(choice, set()), []
    assert kept(shape, group, policy) == expected


def test_the_split_of_a_pipeline_keeps_no_name_that_is_computed_again(small_config, mesh_of):
    """What crosses from F to B, B to W or both. The cut may keep less than a policy, but nothing
    that is dear and recomputed: those results are made anew in B."""
    up_projections = {"mla_query", "mla_key"}  # one product makes keys and values
    dear = {"expert_up", "shared_expert_up"} | up_projections
    for remat, again in (
        (RematConfig(), set()),
        (RematConfig(tier="full"), {"expert_up", "shared_expert_up"}),
        (RematConfig(policy="mla_up_proj"), up_projections),
    ):
        config = small_config(
            "deepseek_v3", parallel={"pp": 2}, training={"num_microbatches": 2}, remat=remat
        )
        split = layer_split(build_objective(config, mesh_of(config)), "moe_layers")
        of_forward = set(split.names[: len(split.residuals)])
        assert of_forward & dear == dear - again
        # What B computes again W may want too: it lives on until then.
        until_weights = set(split.names[len(split.residuals) :])
        assert ("expert_rows" in until_weights) == (remat.tier == "full")


def test_the_documentation_prints_the_registry():
    """One row for each name, in its order."""
    text = Path("docs/memory.md").read_text().partition("## Policies")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    assert rows == [(name, entry.what, entry.where) for name, entry in NAMES.items()]
