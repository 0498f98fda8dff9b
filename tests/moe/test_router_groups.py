"""Group-limited routing against loops over tokens and groups."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.config.schema import ModelConfig, MoEConfig
from mxjax.models.parts import Part
from mxjax.moe.router import Router

T, H, E, G, K = 40, 16, 12, 4, 4
RNG = np.random.default_rng(0)
X = RNG.standard_normal((1, T, H)).astype(np.float32)
WEIGHT = RNG.standard_normal((H, E)).astype(np.float32)
BIAS = (0.3 * RNG.standard_normal(E)).astype(np.float32)
V2 = MoEConfig(
    num_experts=E,
    router_topk=K,
    router_pre_softmax=True,
    routed_scaling_factor=16.0,
    num_groups=G,
    group_topk=2,
    group_score="max",
)
V3 = MoEConfig(
    num_experts=E,
    router_topk=K,
    score_function="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    num_groups=G,
    group_topk=2,
)


def route(moe, bias):
    """Weight of every expert for every token."""
    part = Part(lambda rngs: Router(ModelConfig(hidden_size=H), moe, rngs))
    router = part.bind({"weight": jnp.asarray(WEIGHT)})
    experts_TK, weights_TK, _ = router(jnp.asarray(X), np.ones((1, T), bool), bias)
    dense = np.zeros((T, E))
    np.put_along_axis(dense, np.asarray(experts_TK), np.asarray(weights_TK), axis=1)
    return dense


def choose(row, group_value, groups_kept):
    """The K best experts of the groups with the highest `group_value`."""
    size = E // G
    values = [group_value(row[g * size : (g + 1) * size]) for g in range(G)]
    kept = sorted(range(G), key=lambda g: -values[g])[:groups_kept]
    candidates = [e for g in kept for e in range(g * size, (g + 1) * size)]
    return sorted(candidates, key=lambda e: -row[e])[:K]


def test_deepseek_v2_compares_groups_by_their_best_expert():
    """group_limited_greedy: softmax over all experts, no normalisation of the chosen."""
    logits = X[0].astype(np.float64) @ WEIGHT
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    want = np.zeros((T, E))
    for t, row in enumerate(scores):
        chosen = choose(row, max, groups_kept=2)
        want[t, chosen] = 16 * row[chosen]
    np.testing.assert_allclose(route(V2, np.zeros(E, np.float32)), want, rtol=1e-5)


def test_deepseek_v3_compares_groups_by_the_sum_of_their_two_best():
    """noaux_tc: sigmoid; the bias takes part in both choices, not in the weights."""
    scores = 1 / (1 + np.exp(-X[0].astype(np.float64) @ WEIGHT))
    want = np.zeros((T, E))
    for t, row in enumerate(scores):
        chosen = choose(row + BIAS, lambda values: sum(sorted(values)[-2:]), groups_kept=2)
        want[t, chosen] = 2.5 * row[chosen] / row[chosen].sum()
    np.testing.assert_allclose(route(V3, BIAS), want, rtol=1e-5)


@pytest.mark.parametrize("moe", [V2, V3], ids=["v2", "v3"])
def test_all_groups_are_no_limit(moe):
    free = dataclasses.replace(moe, num_groups=None, group_topk=None, group_score="sum")
    everything = dataclasses.replace(moe, group_topk=G)
    np.testing.assert_array_equal(route(everything, BIAS), route(free, BIAS))
    assert np.any(route(moe, BIAS) != route(free, BIAS))
