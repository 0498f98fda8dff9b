"""The MoE block under every dispatcher and layout, against every expert computed for every token."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mxjax.config import ModelConfig, MoEConfig, ParallelConfig
from mxjax.models.context import LayerContext
from mxjax.models.parts import Part
from mxjax.moe.dispatch import needed_factor, places
from mxjax.moe.dispatch_alltoall import AllToAllDispatcher
from mxjax.moe.layer import MoE
from mxjax.sharding.context_parallel import RING
from mxjax.sharding.mesh import build_mesh
from mxjax.sharding.rules import compute_rules

B, S, H, E, K = 8, 4, 8, 8, 3
MODEL = ModelConfig(hidden_size=H, num_layers=1)
MOE = MoEConfig(num_experts=E, router_topk=K, moe_ffn_hidden_size=6)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((B, S, H)).astype(np.float32)
SPEC = PartitionSpec(("dp", "ep"))


def context(rows):
    return LayerContext(
        positions_BS=jnp.zeros((rows, S), jnp.int32), segment_ids_BS=None,
        valid_Bs=jnp.ones((rows, S), bool), rope=None, key=None, sequence_parallel=False,
        context_parallel=RING, deterministic=False,
    )  # fmt: skip


def parameters():
    params = Part(lambda rngs: MoE(MODEL, MOE, True, math.inf, rngs)).init(jax.random.key(0))
    return jax.tree.map(lambda p: 30 * p, params)


def reference(params, x, bias):
    """Every expert for every token, weighted by zero where it was not chosen."""
    x = x.reshape(-1, H)
    logits = x @ params["router"]["weight"]
    chosen = jax.lax.top_k(logits + bias, K)[1]
    weights = jax.nn.softmax(jnp.take_along_axis(logits, chosen, 1), axis=-1)
    dense = jnp.zeros((x.shape[0], E)).at[jnp.arange(x.shape[0])[:, None], chosen].set(weights)
    up = jnp.einsum("th,ehgf->tegf", x, params["experts"]["up"])
    act = jax.nn.silu(up[:, :, 0]) * up[:, :, 1]
    return jnp.einsum("te,tef,efh->th", dense, act, params["experts"]["down"])


def run(moe, parallel, capacity_factor=math.inf, bias=0.0):
    """(output, needed factor, gradients of sum(output^2)) on the mesh of `parallel`."""
    mesh = build_mesh(parallel, jax.devices()[: parallel.dp * parallel.ep * parallel.tp])
    part = Part(
        lambda rngs: MoE(MODEL, moe, parallel.expert_tensor_parallel, capacity_factor, rngs)
    )
    rules = compute_rules(parallel, MODEL)
    specs = jax.tree.map(lambda info: rules.spec(info.axes), part.infos)
    bias_E = jnp.zeros(E) + bias

    def local(params, x):
        def share(params, x):
            out, _, needed = part.bind(params)(x, context(x.shape[0]), bias_E)
            return jnp.sum(out**2) / jax.lax.axis_size("tp"), (out, needed)

        grads, (out, needed) = jax.grad(share, argnums=(0, 1), has_aux=True)(params, x)
        d_params = jax.tree.map(
            lambda g, s: jax.lax.psum(
                g, tuple(a for a in mesh.axis_names if a not in jax.tree.leaves(tuple(s)))
            ),
            grads[0], specs,
        )  # fmt: skip
        d_x = jax.lax.psum(grads[1], "tp")
        return out, jax.lax.pmax(needed, mesh.axis_names), d_params, d_x

    out_specs = (SPEC, PartitionSpec(), specs, SPEC)
    shard = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, SPEC), out_specs=out_specs, check_vma=False
    )
    out, needed, d_params, d_x = jax.jit(shard)(parameters(), X)
    return np.asarray(out).reshape(-1, H), float(needed), (d_params, d_x)


LAYOUTS = [
    {},
    {"ep": 2},
    {"ep": 4, "dp": 2},
    {"ep": 2, "tp": 2},
    {"ep": 2, "tp": 2, "expert_tensor_parallel": False},
]


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    ("expert_gemm", "layout"),
    [*(("batched", layout) for layout in LAYOUTS), ("grouped", LAYOUTS[3])],
    ids=str,
)
def test_output_and_gradients_equal_the_dense_reference(dispatcher, layout, expert_gemm):
    parallel = ParallelConfig(**{"dp": 1, **layout})
    moe = dataclasses.replace(MOE, dispatcher=dispatcher, expert_gemm=expert_gemm)
    out, _, grads = run(moe, parallel)
    np.testing.assert_allclose(out, reference(parameters(), X, 0.0), rtol=2e-5, atol=2e-6)
    want = jax.grad(lambda p, x: jnp.sum(reference(p, x, 0.0) ** 2), argnums=(0, 1))(
        parameters(), jnp.asarray(X)
    )
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        scale = np.max(np.abs(expected))
        np.testing.assert_allclose(got, expected, atol=2e-5 * scale, rtol=0)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_the_largest_bucket_holds_any_routing(dispatcher):
    """All tokens on the same experts, through a bias: nothing is lost."""
    bias = np.where(np.arange(E) < K, 100.0, 0.0)
    moe = dataclasses.replace(MOE, dispatcher=dispatcher)
    out, needed, _ = run(moe, ParallelConfig(dp=1, ep=4), bias=bias)
    np.testing.assert_allclose(out, reference(parameters(), X, bias), rtol=2e-5, atol=2e-6)
    assert needed == pytest.approx(E / K)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_a_bucket_that_fits_changes_nothing(dispatcher):
    """Buffers smaller than those that hold any routing, but large enough for this one."""
    moe = dataclasses.replace(MOE, dispatcher=dispatcher)
    layout = ParallelConfig(dp=1, ep=2)
    whole, needed, whole_grads = run(moe, layout)
    assert needed < 2.0 < E / K
    out, same, grads = run(moe, layout, capacity_factor=2.0)
    assert same == needed
    np.testing.assert_allclose(out, whole, rtol=1e-6, atol=1e-6)
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(whole_grads), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.max(np.abs(expected)))


def test_a_small_bucket_reports_exactly_what_it_would_have_needed():
    """The need is that of the routing, whatever the bucket, and above the bucket if it overflows."""
    bias = np.where(np.arange(E) < K, 100.0, 0.0)
    for bucket in (1.0, 2.0):
        _, needed, _ = run(MOE, ParallelConfig(dp=1, ep=2), bucket, bias)
        assert needed == pytest.approx(E / K)


def test_experts_that_share_a_buffer_need_no_more_than_their_rank_gets():
    """All tokens on three of the eight experts, which are on the first of two ranks."""
    bias = np.where(np.arange(E) < K, 100.0, 0.0)
    moe = dataclasses.replace(MOE, expert_gemm="grouped", dispatcher="allgather")
    out, needed, _ = run(moe, ParallelConfig(dp=1, ep=2), 2.0, bias)
    assert needed == pytest.approx(2.0)
    np.testing.assert_allclose(out, reference(parameters(), X, bias), rtol=2e-5, atol=2e-6)
    _, needed, _ = run(moe, ParallelConfig(dp=1, ep=2), 1.25, bias)
    assert needed == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("worst", "capacity", "factor", "needed"),
    [(15, 16, 1.0, 1.0), (16, 16, 1.0, 1.0), (17, 16, 1.0, 1.7), (12, 16, 1.5, 1.2)],
)
def test_needed_factor_is_above_the_bucket_exactly_if_the_buffer_overflows(
    worst, capacity, factor, needed
):
    """A buffer is rounded up and may hold a little more than its factor says."""
    counts = jnp.array([3, worst, 0])
    assert float(needed_factor(counts, 10.0, capacity, factor)) == pytest.approx(needed)


def test_buffers_are_whole_tiles_and_never_larger_than_needed():
    assert places(10.0, 1.25, most=100) == 16
    assert places(10.0, 1.6, most=100) == 16
    assert places(10.0, 20.0, most=100) == 100
    assert places(10.0, math.inf, most=100) == 100


def test_each_token_crosses_once_to_a_rank_that_holds_several_of_its_experts():
    """Rows that arrive, counted: the distinct (token, rank) pairs, not the T x K choices."""
    ranks, T = 4, 16
    mesh = build_mesh(ParallelConfig(dp=1, ep=ranks), jax.devices()[:ranks])
    experts = np.stack([RNG.permutation(E)[:K] for _ in range(ranks * T)]).astype(np.int32)
    x = RNG.random((ranks * T, H)).astype(np.float32) + 1
    weights = np.ones((ranks * T, K), np.float32)
    dispatcher = AllToAllDispatcher("ep", E, math.inf)

    def local(x, experts, weights):
        rows, _ = dispatcher.dispatch(x, experts, weights)
        return jnp.any(rows.rows_RH != 0, axis=1), jnp.sum(rows.experts_RK >= 0, axis=1)

    spec = PartitionSpec("ep")
    filled, choices = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )(x, experts, weights)
    pairs = {(t, e // (E // ranks)) for t, row in enumerate(experts) for e in row}
    assert int(np.sum(filled)) == len(pairs) < ranks * T * K
    assert int(np.sum(choices)) == ranks * T * K
