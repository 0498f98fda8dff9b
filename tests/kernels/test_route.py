"""Routing against loops over tokens and experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from mxjax.kernels.implementation import ImplementationError, interpreted
from mxjax.kernels.route import RoutingRule, route

T, E, K = 70, 32, 3
MIXTRAL = RoutingRule(K, "softmax", pre_softmax=False, normalise=False, scaling=1.0)
QWEN3 = dataclasses.replace(MIXTRAL, pre_softmax=True, normalise=True)
V2 = dataclasses.replace(
    MIXTRAL, pre_softmax=True, scaling=16.0, num_groups=4, group_topk=2, group_best=1
)
V3 = RoutingRule(4, "sigmoid", False, True, 2.5, num_groups=4, group_topk=2, group_best=2)
RULES = {"mixtral": MIXTRAL, "qwen3": QWEN3, "deepseek_v2": V2, "deepseek_v3": V3}


def problem():
    """Logits with many that are equal, a bias, and some tokens that go nowhere."""
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(T, E)) * 4).round() / 4
    bias = rng.normal(size=E).round() / 8
    return logits.astype(np.float32), bias.astype(np.float32), rng.random(T) < 0.8


def scores_of(logits, rule):
    if rule.score_function == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    powers = np.exp(logits - logits.max())
    return powers / powers.sum() if rule.pre_softmax else logits


def best(values, number):
    return sorted(range(len(values)), key=lambda i: -values[i])[:number]  # stable: first of equals


def loops(logits, bias, valid, rule):
    experts, weights = np.full((T, rule.topk), -1), np.zeros((T, rule.topk))
    ranks, counts = np.zeros((T, rule.topk), int), np.zeros(E, int)
    for t in np.flatnonzero(valid):
        scores = scores_of(logits[t], rule)
        compared = (scores + bias).astype(np.float32)
        if rule.num_groups:
            groups = compared.reshape(rule.num_groups, -1)
            sums = [np.sort(group)[-rule.group_best :].sum() for group in groups]
            for g in set(range(rule.num_groups)) - set(best(sums, rule.group_topk)):
                groups[g] = -np.inf
        experts[t] = best(compared, rule.topk)
        chosen = scores[experts[t]]
        if rule.score_function == "softmax" and not rule.pre_softmax:
            chosen = np.exp(chosen) / np.exp(chosen).sum()
        elif rule.normalise:
            chosen = chosen / chosen.sum()
        weights[t] = chosen * rule.scaling
        ranks[t] = counts[experts[t]]
        counts[experts[t]] += 1
    return experts, weights, ranks, counts


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize("name", RULES)
def test_experts_weights_ranks_and_counts(name, implementation):
    """And the gradient of the weights, for which the chosen experts are fixed; twice the same."""
    rule, (logits, bias, valid) = RULES[name], problem()
    d_weights = np.random.default_rng(1).normal(size=(T, rule.topk)).astype(np.float32)

    def run(logits, bias, valid, d_weights):
        def weights(logits):
            routed = route(logits, bias, valid, rule, implementation=implementation)
            return routed.weights_TK, routed

        _, pullback, routed = jax.vjp(weights, logits, has_aux=True)
        return routed, pullback(d_weights)[0]

    alike = PartitionSpec()
    mapped = jax.shard_map(
        run,
        mesh=Mesh(np.array(jax.devices()[:1]), ("ranks",)),
        in_specs=(PartitionSpec("ranks"), alike, PartitionSpec("ranks"), PartitionSpec("ranks")),
        out_specs=PartitionSpec("ranks"),
    )
    with interpreted():
        run = jax.jit(mapped)
        routed, d_logits = run(logits, bias, valid, d_weights)
        again = run(logits, bias, valid, d_weights)
    jax.tree.map(np.testing.assert_array_equal, again, (routed, d_logits))
    experts, weights, ranks, counts = loops(logits, bias, valid, rule)
    np.testing.assert_array_equal(routed.experts_TK, experts)
    np.testing.assert_allclose(routed.weights_TK, weights, rtol=1e-5)
    np.testing.assert_array_equal(routed.ranks_TK[valid], ranks[valid])
    np.testing.assert_array_equal(routed.counts_E, counts)

    def chosen(logits):
        one_hot = jax.nn.one_hot(experts, E)
        z = jnp.sum(one_hot * logits[:, None], -1)
        if rule.score_function == "sigmoid":
            scores = jax.nn.sigmoid(z)
        else:
            over = logits if rule.pre_softmax else z
            scores = jnp.exp(z - jax.nn.logsumexp(over, axis=-1, keepdims=True))
        if rule.normalise:
            scores = scores / jnp.sum(scores, -1, keepdims=True)
        return jnp.sum(jnp.where(valid[:, None], scores * rule.scaling * d_weights, 0))

    np.testing.assert_allclose(d_logits, jax.grad(chosen)(jnp.asarray(logits)), atol=1e-5)


@pytest.mark.parametrize(
    ("experts", "rule", "message"),
    [(257, MIXTRAL, "up to 256 experts, not 257"), (32, V3, "32 experts in 8 groups")],
)
def test_what_the_kernel_cannot_run_is_refused(experts, rule, message):
    rule = dataclasses.replace(rule, num_groups=rule.num_groups and 8)
    with interpreted(), pytest.raises(ImplementationError, match=message):
        route(
            jnp.zeros((4, experts)), jnp.zeros(experts), jnp.ones(4, bool), rule,
            implementation="mosaic",
        )  # fmt: skip
