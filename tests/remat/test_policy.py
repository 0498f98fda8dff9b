"""Recomputing changes what is kept, never what is computed, and XLA does not undo it."""

import collections
import re

import jax
import numpy as np
import pytest

from mxjax.config.schema import RematConfig, RematRule
from mxjax.kernels.norm import add_rms_norm
from mxjax.training.gradients import Objective

ZERO_3 = {"dp": 2, "zero_stage": 3}


@pytest.fixture(scope="module")
def compiled(small_config, mesh_of, packed_batch, abstract_params):
    """Loss and gradients of the Llama-like model of two layers, compiled."""

    def compile_(policy, scan_layers, parallel):
        training = {"scan_layers": scan_layers}
        config = small_config("llama", parallel=parallel, training=training, remat=policy)
        objective = Objective(config, mesh_of(config))
        params = abstract_params(objective)
        function = jax.jit(objective.loss_and_gradients())
        return function.lower(params, None, packed_batch(config), jax.random.key(0)).compile()

    return compile_


def test_weights_pass_a_barrier_only_where_they_are_gathered(
    small_config, mesh_of, packed_batch, abstract_params
):
    """A barrier would make kernels read copies of an unrolled layer's weights."""
    mlp_up = "tensor<32x2x48xf32>"
    for parallel, there in (({}, False), (ZERO_3, True)):
        training = {"scan_layers": False}
        config = small_config("llama", parallel=parallel, training=training, remat="norm")
        objective = Objective(config, mesh_of(config))
        function = jax.jit(objective.loss_and_gradients())
        arguments = abstract_params(objective), None, packed_batch(config), jax.random.key(0)
        program = function.lower(*arguments).as_text()
        barriers = [line for line in program.splitlines() if "optimization_barrier" in line]
        assert any("tensor<" in line for line in barriers)
        weights = mlp_up if not there else mlp_up.replace("32x", "16x")
        assert any(weights in line for line in barriers) == there, barriers


@pytest.mark.parametrize(
    ("policy", "fused"), [("none", True), ("norm", False), ("full", True), ("activation", True)]
)
def test_a_norm_that_is_made_again_of_a_kept_sum_is_apart_from_the_sum(
    small_config, mesh_of, packed_batch, abstract_params, monkeypatch, policy, fused
):
    """A kernel for both would need its summands again, and with them a matrix product."""
    calls = []

    def after_addition(x, residual, *weights, **options):
        calls.append(x.shape)
        return add_rms_norm(x, residual, *weights, **options)

    monkeypatch.setattr("mxjax.models.norm.add_rms_norm", after_addition)
    config = small_config("llama", training={"scan_layers": False}, remat=policy)
    objective = Objective(config, mesh_of(config))
    arguments = abstract_params(objective), None, packed_batch(config), jax.random.key(0)
    jax.eval_shape(objective.loss_and_gradients(), *arguments)
    assert bool(calls) == fused


def count(program):
    """Instructions by kind in the optimised program; a scanned layer is there once."""
    kinds = re.findall(r"= \S+ (dot|all-gather|reduce-scatter)\(", program.as_text())
    return collections.Counter(kinds)


DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
POLICIES = {
    "dots": RematConfig(policy="dots"),
    "tiers and modules": RematConfig(
        policy="attention",
        rules=(
            RematRule(layers="0", policy="norm", recompute=("activation", "mla_up_proj")),
            RematRule(layers="1", tier="medium"),
            RematRule(layers="2-3", tier="light", offload=("layer_input", "expert_up")),
        ),
    ),
    "full": RematConfig(
        policy="full", rules=(RematRule(group="moe_layers", tier="full", policy="attention"),)
    ),
}


@pytest.mark.parametrize(
    ("shape", "model", "parallel", "scan_layers", "policy"),
    [
        ("llama", {}, ZERO_3, True, "dots"),
        ("deepseek_v3", {"num_layers": 4, **DROPOUT}, {"ep": 2}, True, "tiers and modules"),
        ("deepseek_v3", {"num_layers": 3, **DROPOUT}, {}, False, "full"),
    ],
    ids=str,
)
def test_loss_and_gradients_do_not_depend_on_the_policy(
    small_config, loss_and_gradients, shape, model, parallel, scan_layers, policy
):
    def run(remat, scan):
        training = {"scan_layers": scan}
        config = small_config(shape, model=model, parallel=parallel, training=training, remat=remat)
        return loss_and_gradients(config)

    keep, recompute = run(RematConfig(), True), run(POLICIES[policy], scan_layers)
    for got, expected in zip(jax.tree.leaves(recompute), jax.tree.leaves(keep), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.max(np.abs(expected)))


@pytest.mark.parametrize("scan_layers", [True, False])
def test_products_that_are_computed_again(compiled, scan_layers):
    """Of the 7 products of a layer, `dots` repeats that of queries and keys, whose result grows
    with the square of the sequence, and `full` all but the last, whose result nobody needs."""
    programs = {name: compiled(name, scan_layers, {}) for name in ("none", "dots", "full")}
    copies = 1 if scan_layers else 2
    # Forward and two backward for each product of layers and head; the embedding's gradient.
    expected = copies * 3 * 7 + 3 + 1
    products = {name: count(program)["dot"] for name, program in programs.items()}
    assert products == {
        "none": expected,
        "dots": expected + copies,
        "full": expected + copies * 6,
    }
    memory = {name: p.memory_analysis().temp_size_in_bytes for name, p in programs.items()}
    assert max(memory["dots"], memory["full"]) < 0.6 * memory["none"]


@pytest.mark.parametrize("scan_layers", [True, False])
def test_zero_3_gathers_each_matrix_again_in_the_backward_pass(compiled, scan_layers):
    """Gathered weights do not outlive the layer, even when everything else is kept."""
    copies = 1 if scan_layers else 2
    counts = count(compiled("none", scan_layers, ZERO_3))
    # 5 matrices and 2 norms of a layer; embedding, head and last norm stay gathered. Of the norms'
    # scales the backward pass may keep a broadcast copy, which is as small.
    once, matrices = 3 + copies * 7, copies * 5
    assert once + matrices <= counts["all-gather"] <= once + copies * 7
    assert counts["reduce-scatter"] == once
