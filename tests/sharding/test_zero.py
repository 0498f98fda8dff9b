"""Where weights are gathered and gradients reduced, and in which precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mxjax.config import ModelConfig, ParallelConfig
from mxjax.sharding.mesh import AXES, build_mesh
from mxjax.sharding.rules import ParamInfo, compute_rules, stored_rules
from mxjax.sharding.zero import ZeroPlan

INFOS = {
    "matrix": ParamInfo((8, 4), jnp.dtype("float32"), ("hidden", "ffn")),
    "expert": ParamInfo((2, 8), jnp.dtype("float32"), ("expert", "expert_hidden")),
    "router": ParamInfo((8, 2), jnp.dtype("float32"), ("hidden", None), keep_precision=True),
    "bias": ParamInfo((4,), jnp.dtype("float32"), ("ffn",)),
}
PARAMS = {
    name: np.random.default_rng(i).normal(size=info.shape).astype(np.float32)
    for i, (name, info) in enumerate(INFOS.items())
}


def plan_and_mesh(zero_stage, reduce_dtype="float32", **sizes):
    parallel = ParallelConfig(**{"dp": 2, "ep": 2, "tp": 2} | sizes, zero_stage=zero_stage)
    plan = ZeroPlan(
        stored=stored_rules(parallel, ModelConfig()),
        compute=compute_rules(parallel, ModelConfig()),
        compute_dtype=jnp.dtype("bfloat16"),
        reduce_dtype=jnp.dtype(reduce_dtype),
    )
    num_devices = parallel.dp * parallel.ep * parallel.tp
    return plan, build_mesh(parallel, jax.devices()[:num_devices])


def specs(rules):
    return {name: rules.spec(info.axes) for name, info in INFOS.items()}


def run(function, mesh, in_rules, out_rules):
    """`function` of `PARAMS` in a `shard_map`, with input and output placed by these rules."""
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(specs(in_rules),),
        out_specs=specs(out_rules),
        check_vma=False,
    )
    return jax.jit(mapped)(PARAMS)


def test_each_parameter_is_gathered_and_summed_over_the_right_axes():
    """Gathered over the data-like axes (experts: without ep); summed where copies are equal."""
    plan, _ = plan_and_mesh(zero_stage=1)
    data, expert_data = ("dp", "ep", "cp", "sp"), ("dp", "cp", "sp")
    leaves = {name: plan.leaf(info) for name, info in INFOS.items()}
    gathered = {name: (leaf.gather_axes, leaf.gather_dim) for name, leaf in leaves.items()}
    assert gathered == {
        "matrix": (data, 0),
        "expert": (expert_data, 1),
        "router": (data, 0),
        "bias": ((), 0),
    }
    summed = {name: leaf.sum_axes for name, leaf in leaves.items()}
    assert summed == {
        "matrix": ("pp",),
        "expert": ("pp", "tp"),
        "router": ("pp", "tp"),
        "bias": ("pp", "dp", "ep", "cp", "sp"),
    }


def test_stage_0_gathers_nothing_and_sums_over_all_copies():
    plan, _ = plan_and_mesh(zero_stage=0)
    matrix = plan.leaf(INFOS["matrix"])
    assert matrix.gather_axes == ()
    assert matrix.sum_axes == ("pp", "dp", "ep", "cp", "sp")
    assert plan.leaf(INFOS["expert"]).sum_axes == ("pp", "dp", "cp", "sp", "tp")


def test_gathered_weights_are_whole_and_in_compute_precision():
    """The router alone keeps the precision that it is stored in."""
    plan, mesh = plan_and_mesh(zero_stage=3)
    whole = run(lambda params: plan.gather(params, INFOS), mesh, plan.stored, plan.compute)
    for name, value in whole.items():
        expected = PARAMS[name] if name == "router" else jnp.asarray(PARAMS[name], jnp.bfloat16)
        assert value.dtype == expected.dtype, name
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("way", ["through gather", "scatter_gradients"])
def test_gradients_are_summed_over_ranks_and_split_as_stored(way):
    """Rank r (all axes) has the gradient r + 1 everywhere."""
    plan, mesh = plan_and_mesh(zero_stage=3)

    def local(params):
        rank = jax.lax.axis_index(AXES) + 1
        whole, pullback = jax.vjp(lambda p: plan.gather(p, INFOS), params)
        grads = jax.tree.map(lambda value: jnp.full_like(value, rank), whole)
        if way == "through gather":
            (grads,) = pullback(grads)
        else:
            grads = plan.scatter_gradients(grads, INFOS)
        return plan.sum_gradients(grads, INFOS)

    summed = run(local, mesh, plan.stored, plan.stored)
    ranks = 1 + np.arange(8).reshape(2, 2, 2)  # dp, ep, tp
    by_tp, by_ep = ranks.sum((0, 1)), ranks.sum((0, 2))
    expected = {
        "matrix": np.broadcast_to(np.repeat(by_tp, 2), (8, 4)),
        "expert": np.broadcast_to(by_ep[:, None], (2, 8)),
        "router": np.full((8, 2), ranks.sum()),
        "bias": np.repeat(by_tp, 2),
    }
    for name, value in summed.items():
        assert value.dtype == jnp.float32, name
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize(("reduce_dtype", "total"), [("float32", 259.0), ("bfloat16", 260.0)])
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_reduction_is_in_the_configured_precision(zero_stage, reduce_dtype, total):
    """256 + 1 + 1 + 1 is 259, which bf16 does not have."""
    plan, mesh = plan_and_mesh(zero_stage, reduce_dtype, dp=4, ep=1, tp=1)

    def local(params):
        grad = jnp.where(jax.lax.axis_index("dp") == 0, 256.0, 1.0)
        whole, pullback = jax.vjp(lambda p: plan.gather(p, INFOS), params)
        grads = jax.tree.map(lambda value: jnp.full_like(value, grad), whole)
        grads = pullback(grads)[0] if zero_stage == 3 else plan.scatter_gradients(grads, INFOS)
        return plan.sum_gradients(grads, INFOS)

    for name, value in run(local, mesh, plan.stored, plan.stored).items():
        np.testing.assert_array_equal(np.asarray(value, np.float32), total, err_msg=name)


def test_one_device_neither_gathers_nor_reduces():
    plan, mesh = plan_and_mesh(zero_stage=3, dp=1, ep=1, tp=1)

    def local(params):
        whole, pullback = jax.vjp(lambda p: plan.gather(p, INFOS), params)
        return plan.sum_gradients(pullback(whole)[0], INFOS)

    whole = PartitionSpec()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    jaxpr = str(jax.make_jaxpr(mapped)(PARAMS))
    assert not any(name in jaxpr for name in ("all_gather", "reduce_scatter", "psum"))
