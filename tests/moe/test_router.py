"""Routing choices, weights and statistics against numpy; losses against the papers' formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.config import ModelConfig, MoEConfig
from mxjax.models.parts import Part
from mxjax.moe.balance import load_factor, router_loss, updated_bias
from mxjax.moe.router import Router
from mxjax.remat.residuals import residuals_of

B, S, H, E, K = 2, 6, 16, 8, 3
MODEL = ModelConfig(hidden_size=H)
BASE = MoEConfig(num_experts=E, router_topk=K)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((B, S, H)).astype(np.float32)
WEIGHT = RNG.standard_normal((H, E)).astype(np.float32)
VALID = np.ones((B, S), bool)
NO_BIAS = np.zeros(E, np.float32)


def route(moe, valid=VALID, bias=NO_BIAS):
    part = Part(lambda rngs: Router(MODEL, moe, rngs))
    return part.bind({"weight": jnp.asarray(WEIGHT)})(jnp.asarray(X), valid, bias)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def expected(moe, bias=NO_BIAS):
    """Experts (as sets) and weight of each expert, token by token, in float64."""
    logits = X.reshape(-1, H).astype(np.float64) @ WEIGHT
    scores = 1 / (1 + np.exp(-logits)) if moe.score_function == "sigmoid" else logits
    if moe.score_function == "softmax" and moe.router_pre_softmax:
        scores = softmax(logits)
    weights = np.zeros_like(logits)
    for t, row in enumerate(scores):
        chosen = np.argsort(-(row + bias))[:K]
        w = row[chosen]
        if moe.score_function == "softmax" and not moe.router_pre_softmax:
            w = softmax(w)
        elif moe.norm_topk_prob:
            w = w / w.sum()
        weights[t, chosen] = w * moe.routed_scaling_factor
    return weights


def as_dense(experts_TK, weights_TK):
    dense = np.zeros((B * S, E))
    for t, (experts, weights) in enumerate(zip(experts_TK, weights_TK, strict=True)):
        for e, w in zip(experts, weights, strict=True):
            if e >= 0:
                dense[t, e] += w
    return dense


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"router_pre_softmax": True},
        {"router_pre_softmax": True, "norm_topk_prob": True},
        {"score_function": "sigmoid"},
        {"score_function": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("biased", [False, True])
def test_choice_and_weights(options, biased):
    """A balancing bias changes who is chosen, never the weight of the chosen."""
    moe = dataclasses.replace(BASE, **options)
    bias = (2 * RNG.standard_normal(E)).astype(np.float32) if biased else NO_BIAS
    experts_TK, weights_TK, _ = route(moe, bias=bias)
    want = expected(moe, bias)
    np.testing.assert_allclose(as_dense(experts_TK, weights_TK), want, rtol=1e-5, atol=1e-6)


def test_bf16_tokens_meet_the_weights_in_fp32():
    """A router of one's own gets them so, too; the built-in one keeps no cast tokens."""
    seen = []

    class Own(Router):
        def _logits(self, x_TH):
            seen.append(x_TH.dtype)
            return x_TH @ self.weight[...].astype(x_TH.dtype)

    x = jnp.asarray(X, jnp.bfloat16)
    weights = []
    for kind in (Router, Own):
        part = Part(lambda rngs, kind=kind: kind(MODEL, BASE, rngs))

        def run(x, weight, part=part):
            return part.bind({"weight": weight})(x, VALID, NO_BIAS)[1]

        arguments = x, jnp.asarray(WEIGHT)
        weights.append(run(*arguments))
        kept = [r.shape for r in residuals_of(run, *arguments) if r.dtype == jnp.float32]
        assert ((B * S, H) in kept) == (kind is Own)
    assert seen
    assert {jnp.dtype(dtype) for dtype in seen} == {jnp.dtype(jnp.float32)}
    np.testing.assert_array_equal(*weights)


def test_padding_goes_nowhere_and_counts_nowhere():
    valid = VALID.copy()
    valid[0, 4:] = False
    experts_TK, weights_TK, stats = route(BASE, valid)
    gone = ~valid.reshape(-1)
    assert np.all(np.asarray(experts_TK)[gone] == -1)
    assert np.all(np.asarray(weights_TK)[gone] == 0)
    np.testing.assert_array_equal(jnp.sum(stats.counts_BE, axis=1), [4 * K, 6 * K])
    np.testing.assert_allclose(jnp.sum(stats.score_sums_BE, axis=1), [4, 6], rtol=1e-6)


def test_force_balanced_gives_each_expert_the_same():
    experts_TK, _, stats = route(dataclasses.replace(BASE, force_balanced=True, router_topk=4))
    np.testing.assert_array_equal(jnp.sum(stats.counts_BE, axis=0), B * S * 4 / E)
    assert all(len(set(row)) == 4 for row in np.asarray(experts_TK).tolist())


def losses(moe, stats):
    """`router_loss` of two equal layers on one device."""
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), stats)
    return router_loss(stacked, moe, (), ())


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_losses_equal_the_formulas(score_function):
    """Switch aux loss (with Megatron's 1 / k), DeepSeek-V3's sequence-wise one, ST-MoE's z-loss."""
    base = dataclasses.replace(BASE, score_function=score_function)
    valid = VALID.copy()
    valid[1, 5] = False
    experts_TK, _, stats = route(base, valid)
    logits = X.reshape(-1, H).astype(np.float64) @ WEIGHT
    scores = softmax(logits) if score_function == "softmax" else 1 / (1 + np.exp(-logits))
    probs = (scores / scores.sum(-1, keepdims=True)).reshape(B, S, E) * valid[..., None]
    chosen = (np.asarray(experts_TK)[..., None] == np.arange(E)).sum(1).reshape(B, S, E)
    T = valid.sum()
    aux = E / (K * T * T) * np.sum(chosen.sum((0, 1)) * probs.sum((0, 1)))
    lengths = valid.sum(1)
    per_sequence = E / (K * lengths**2) * np.sum(chosen.sum(1) * probs.sum(1), axis=-1)
    sequence = np.sum(per_sequence * lengths) / T
    z = np.sum(np.log(np.exp(logits).sum(-1)) ** 2 * valid.reshape(-1)) / T
    for name, want in [("aux_loss", aux), ("seq_aux_loss", sequence), ("z_loss", z)]:
        loss, counts_LE = losses(dataclasses.replace(base, **{f"{name}_coeff": 0.5}), stats)
        np.testing.assert_allclose(loss, 2 * 0.5 * want, rtol=1e-5)
    np.testing.assert_array_equal(counts_LE[0], chosen.sum((0, 1)))


def test_perfect_balance_has_aux_loss_one():
    """Uniform scores and equal counts give exactly the coefficient."""
    moe = dataclasses.replace(BASE, force_balanced=True, router_topk=4, aux_loss_coeff=1.0)
    part = Part(lambda rngs: Router(MODEL, moe, rngs))
    router = part.bind({"weight": jnp.zeros((H, E))})
    _, _, stats = router(jnp.asarray(X), VALID, NO_BIAS)
    loss, counts_LE = losses(moe, stats)
    np.testing.assert_allclose(loss, 2.0, rtol=1e-6)
    assert float(load_factor(counts_LE)) == 1.0


def test_bias_rises_for_starved_experts_and_falls_for_busy_ones():
    counts_LE = jnp.array([[10.0, 0.0, 5.0, 5.0]])
    moved = updated_bias(jnp.zeros((1, 4)), counts_LE, 0.001)
    np.testing.assert_allclose(moved, [[-0.001, 0.001, 0, 0]])
    assert float(load_factor(counts_LE)) == 2.0


def test_router_gradient_does_not_pass_through_the_counts():
    moe = dataclasses.replace(BASE, aux_loss_coeff=1.0)
    part = Part(lambda rngs: Router(MODEL, moe, rngs))

    def loss(weight):
        _, _, stats = part.bind({"weight": weight})(jnp.asarray(X), VALID, NO_BIAS)
        return losses(moe, stats)[0]

    gradient = jax.grad(loss)(jnp.asarray(WEIGHT))
    numeric = np.zeros_like(WEIGHT)
    for at in [(0, 0), (3, 5), (15, 7)]:
        shift = np.zeros_like(WEIGHT)
        shift[at] = 1e-2
        numeric = (loss(WEIGHT + shift) - loss(WEIGHT - shift)) / 2e-2
        np.testing.assert_allclose(gradient[at], numeric, rtol=0.05, atol=1e-3)
