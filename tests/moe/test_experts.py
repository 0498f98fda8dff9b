"""Experts whose routing weights scale their activation: the gradients are those of the plain
formula, which weighs what the experts made, and what they made is not kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mxjax.config import ModelConfig, MoEConfig
from mxjax.config.schema import KernelsConfig
from mxjax.kernels import implementation
from mxjax.kernels.permute import permute, plan_permute, unpermute
from mxjax.models.parts import Part, layer_of
from mxjax.models.transformer import Transformer
from mxjax.moe.experts import Experts
from mxjax.remat.layers import policy_of
from mxjax.remat.names import TIERS
from mxjax.remat.residuals import residuals_of
from mxjax.training.gradients import Objective
from mxjax.training.residual_plan import layer_residuals
from tests.conftest import relative_error

R, K, E, H, F = 24, 2, 4, 8, 6


def part_of(**changes):
    config = MoEConfig(num_experts=E, router_topk=K, moe_ffn_hidden_size=F, **changes)
    activation = "gelu" if changes["expert_gemm"] == "grouped" else "swiglu"
    model = ModelConfig(hidden_size=H, num_layers=1, activation=activation)
    return Part(lambda rngs: Experts(model, config, rngs))


def arguments(part):
    """Weights of the experts, rows, their experts (some absent) and routing weights."""
    rng = np.random.default_rng(0)
    experts = np.stack([rng.permutation(E)[:K] for _ in range(R)]).astype(np.int32)
    experts[rng.random((R, K)) < 0.2] = -1
    params = jax.tree.map(lambda p: 30 * p, part.init(jax.random.key(0)))
    rows, weights = rng.standard_normal((R, H)), rng.random((R, K))
    return params, jnp.float32(rows), jnp.asarray(experts), jnp.float32(weights)


def plain(params, rows, experts, weights, placed, gated):
    """Every expert for every row, its result weighted by zero where the row has no place there."""
    dense = jnp.zeros((R, E)).at[jnp.arange(R)[:, None], experts].add(weights * placed)
    up = jnp.einsum("rh,ehbf->rebf", rows, params["up"])
    act = jax.nn.silu(up[:, :, 0]) * up[:, :, 1] if gated else jax.nn.gelu(up[:, :, 0])
    return jnp.einsum("re,reh->rh", dense, jnp.einsum("ref,efh->reh", act, params["down"]))


def test_auto_groups_where_kernels_of_grouped_products_run(monkeypatch):
    model = ModelConfig(hidden_size=128, num_layers=1, activation="swiglu")
    moe = MoEConfig(num_experts=E, router_topk=K, moe_ffn_hidden_size=64)

    def grouped(dtype, **changes):
        part = Part(lambda rngs: Experts(model, dataclasses.replace(moe, **changes), rngs))
        params = part.init(jax.random.key(0))
        return part.bind(jax.tree.map(lambda p: p.astype(dtype), params)).grouped

    assert not grouped(jnp.bfloat16)
    monkeypatch.setattr(implementation, "device_kind", lambda: "NVIDIA H200")
    assert grouped(jnp.bfloat16)
    assert not grouped(jnp.float32)
    assert not grouped(jnp.bfloat16, moe_ffn_hidden_size=40)
    assert not grouped(jnp.bfloat16, expert_gemm="batched")
    with implementation.selected(KernelsConfig(implementation="xla")):
        assert not grouped(jnp.bfloat16)


@pytest.mark.parametrize(("expert_gemm", "capacity"), [("batched", 7), ("grouped", 32)])
def test_gradients_equal_those_of_weighted_results(expert_gemm, capacity):
    """With absent choices and empty places, and with rows that found no place, whose weights get
    a gradient of zero."""
    part = part_of(expert_gemm=expert_gemm)
    params, rows, experts, weights = arguments(part)
    earlier = np.cumsum(np.eye(E + 1)[np.asarray(experts)].sum(1), axis=0)
    rank = np.take_along_axis(earlier, np.asarray(experts), axis=1) - 1
    placed = np.asarray(experts) >= 0
    if expert_gemm == "batched":
        assert np.any(rank[placed] >= capacity)
        placed &= rank < capacity

    def run(params, rows, weights):
        return part.bind(params)(rows, experts, weights, capacity)[0]

    def reference(params, rows, weights):
        gated = expert_gemm == "batched"
        return plain(params, rows, experts, weights, placed, gated)

    def with_gradients(function):
        out, pullback = jax.vjp(function, params, rows, weights)
        return out, *pullback(jnp.cos(jnp.arange(R * H, dtype=jnp.float32)).reshape(R, H))

    got, expected = (jax.jit(lambda f=f: with_gradients(f))() for f in (run, reference))
    assert max(jax.tree.leaves(jax.tree.map(relative_error, got, expected))) <= 1e-6
    np.testing.assert_array_equal(got[-1][~placed], 0)
    assert np.all(got[-1][placed] != 0)


def _weighted_results(self, rows_RH, experts_RK, weights_RK, capacity):
    """`Experts._batched`, with weights on the results."""
    plan = plan_permute(experts_RK, self.num_experts, capacity)
    up = self._branches(jnp.einsum("ech,ehf->ecf", permute(rows_RH, plan), self._up_weights()))
    y = jnp.einsum("ecf,efh->ech", jax.nn.silu(up[..., 0, :]) * up[..., 1, :], self.down[...])
    return unpermute(y, weights_RK, plan), plan.counts_G


def test_gradients_of_a_layer_with_dropout_are_the_same(
    monkeypatch, small_config, mesh_of, packed_batch, random_weights
):
    config = small_config("mixtral", model={"hidden_dropout": 0.2, "attention_dropout": 0.2})
    mesh, model = mesh_of(config), Transformer(config.model, config.moe)
    params, bias_LE = random_weights(model)
    arrays = {name: array[0] for name, array in packed_batch(config).items()}
    x = np.random.default_rng(0).standard_normal((8, 32, 32)).astype(np.float32)

    def local(params, x):
        ctx = model.context(arrays, jax.random.key(1))

        def run(params, x):
            y, aux = model.parts["moe_layers"].bind(params)(x, ctx, jnp.int32(0), bias_LE[0])
            return jnp.sum(jnp.sin(y)) + aux.moe.router.z_sum

        return jax.value_and_grad(run, argnums=(0, 1))(params, x)

    def gradients():
        every = PartitionSpec()
        mapped = jax.shard_map(
            lambda *given: local(*given), mesh=mesh, in_specs=every, out_specs=every,
            check_vma=False,
        )  # fmt: skip
        return jax.device_get(jax.jit(mapped)(layer_of(params["moe_layers"], 0), x))

    got = gradients()
    monkeypatch.setattr(Experts, "_batched", _weighted_results)
    expected = gradients()
    errors = jax.tree.map(relative_error, got, expected)
    assert 0 < max(jax.tree.leaves(errors)) <= 1e-6


@pytest.mark.parametrize("expert_gemm", ["batched", "grouped"])
def test_autodiff_keeps_neither_results_nor_a_second_activation(expert_gemm):
    """Without any policy: of what is as wide as the model the rows, of what is as wide as an expert
    the activation's input and its weighted output."""
    part = part_of(expert_gemm=expert_gemm)
    params, rows, experts, weights = arguments(part)

    def run(params, rows, weights):
        return part.bind(params)(rows, experts, weights, 32)[0]

    first = len(jax.tree.leaves(params))
    kept = [r for r in residuals_of(run, params, rows, weights) if first in r.depends_on]
    assert sorted(r.shape[-1] for r in kept if r.shape[-1] in (F, H)) == [F, F, H]


@pytest.mark.parametrize("tier", [None, *TIERS])
def test_no_tier_keeps_what_the_experts_made(small_config, mesh_of, tier):
    """Rows of the experts' buffers, as wide as the model, are those that they get."""
    config = small_config("mixtral", training={"global_batch_size": 4})
    objective = Objective(config, mesh_of(config))
    policy = policy_of(dataclasses.replace(config.remat, tier=tier), config, "moe_layers")
    kept = layer_residuals(objective, "moe_layers", policy)
    experts, hidden = config.moe.num_experts, config.model.hidden_size
    results = [r for r in kept if r.shape[:1] == (experts,) and r.shape[-1] == hidden]
    assert [r.name for r in results] == (["expert_rows"] if tier is None else [])
