"""Each fused op, by each implementation, against a plain formula in fp32 and its gradients."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mxjax.kernels import triton_launch
from mxjax.kernels.dropout import bias_dropout_add
from mxjax.kernels.gelu import gelu
from mxjax.kernels.implementation import ImplementationError, interpreted
from mxjax.kernels.mosaic_stream import SHARED_BYTES
from mxjax.kernels.norm import rms_norm
from mxjax.kernels.norm_mosaic import RowBlocks, stages_that_fit
from mxjax.kernels.permute import permute, plan_permute, unpermute
from mxjax.kernels.rope_mosaic import RopeBlocks, heads_and_stages_that_fit
from mxjax.kernels.swiglu import swiglu
from tests.kernels.fused_ops import OPS, RATE, value_and_gradients

KERNELS = {
    "bias_swiglu": "bfloat16",
    "swiglu_in_registers": "bfloat16",
    "gelu": "float32",
    "bias_gelu_in_registers": "float32",
    "rms_norm": "bfloat16",
    "add_rms_norm": "float32",
    "add_layer_norm": "bfloat16",
    "bias_dropout_add": "bfloat16",
    "rope_halves_partial": "float32",
    "rope_pairs": "bfloat16",
}
"""One of each way through the kernels: interpreting takes seconds. With and without bias, addition,
mean, rest of a head; a row in one and in several parts; without a ring of stages."""

TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-7}


def arguments_of(op, dtype):
    keys = jax.random.split(jax.random.key(0), len(op.shapes))
    pairs = zip(keys, op.shapes, strict=True)
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in pairs)


def by_shard_map(function, op, dtype):
    """Value and gradients on a mesh of one device, where the types are checked as on many."""
    mesh = jax.make_mesh((1,), ("axis",), axis_types=(AxisType.Auto,))
    split, alike = PartitionSpec("axis"), PartitionSpec()
    number = len(op.shapes)
    specs = (split,) * (number - op.weights) + (alike,) * op.weights
    mapped = jax.shard_map(
        lambda *arguments: value_and_gradients(function, arguments),
        mesh=mesh,
        in_specs=specs,
        out_specs=(split, specs),
    )
    return jax.jit(mapped)(*arguments_of(op, dtype))


def check(got, op, dtype):
    rounded = arguments_of(op, dtype)
    exact = tuple(x.astype(jnp.float32) for x in rounded)
    want = value_and_gradients(op.formula, exact)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == dtype
        largest = float(jnp.max(jnp.abs(other)))
        tolerance = TOLERANCE[dtype] * largest
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", OPS)
def test_xla_equals_the_formula(name):
    """Forward and every gradient, recomputed as by `remat`."""
    op, dtype = OPS[name], "float32" if KERNELS.get(name) == "bfloat16" else "bfloat16"
    run = jax.checkpoint(partial(op.run, implementation="xla"))
    check(by_shard_map(run, op, dtype), op, dtype)


@pytest.mark.parametrize("name", KERNELS)
def test_mosaic_equals_the_formula_without_races(name):
    """Forward and every gradient, interpreted."""
    op, dtype = OPS[name], KERNELS[name]
    with interpreted():
        got = by_shard_map(partial(op.run, implementation="mosaic", blocks=op.small), op, dtype)
    check(got, op, dtype)


def test_implementations_drop_the_same_elements():
    """And a share of them that the rate says."""
    x, key = jnp.ones((6, 256)), jax.random.key(3)
    drop = partial(bias_dropout_add, x, None, jnp.zeros_like(x), RATE, key)
    with interpreted():
        kernel = jax.jit(partial(drop, implementation="mosaic"))()
    np.testing.assert_array_equal(kernel, drop(implementation="xla"))
    many = jnp.ones((512, 256))
    kept = bias_dropout_add(many, None, 0 * many, RATE, key) > 0
    assert abs(float(jnp.mean(kept)) - (1 - RATE)) < 0.005
    # Neither neighbours nor other keys drop alike.
    both = 1 - 2 * RATE + RATE**2
    assert abs(float(jnp.mean(kept[:, 1:] & kept[:, :-1])) - both) < 0.005
    assert abs(float(jnp.mean(kept[1:] & kept[:-1])) - both) < 0.005
    others = bias_dropout_add(many, None, 0 * many, RATE, jax.random.key(4)) > 0
    assert abs(float(jnp.mean(kept & others)) - both) < 0.005


def test_a_named_implementation_that_cannot_run_is_refused():
    up, x = jnp.ones((3, 2, 136)), jnp.ones((3, 136))
    with pytest.raises(ImplementationError, match=r"swiglu: .*'mosaic'.*Hopper GPUs.*'cpu'.*'xla'"):
        swiglu(up, implementation="mosaic")
    with pytest.raises(ImplementationError, match=r"'triton'.*there is none; gelu has xla, mosaic"):
        gelu(x, implementation="triton")
    with interpreted(), pytest.raises(ImplementationError, match="width 136 is no multiple of 128"):
        rms_norm(x, x[0], 1e-5, implementation="mosaic")


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    """Other ops, other devices, and where the package that brings it is not there."""
    x, key = jnp.ones((3, 136)), jax.random.key(0)
    plan = plan_permute(jnp.zeros((3, 1), jnp.int32), num_groups=1, capacity=3)
    calls = {
        "swiglu": lambda **named: swiglu(jnp.ones((3, 2, 136)), **named),
        "bias_dropout_add": lambda **named: bias_dropout_add(x, None, x, RATE, key, **named),
        "permute": lambda **named: permute(x, plan, **named),
        "unpermute": lambda **named: unpermute(x[None], jnp.ones((3, 1)), plan, **named),
    }
    reasons = {"for NVIDIA GPUs and this is 'cpu'": None, "jax-triton is not installed": "NVIDIA"}
    for reason, device in reasons.items():
        if device:
            monkeypatch.setattr(triton_launch, "device_kind", lambda device=device: device)
            monkeypatch.setitem(sys.modules, "jax_triton", None)
        for op, call in calls.items():
            with pytest.raises(ImplementationError, match=f"{op}: .*'triton'.*{reason}"):
                call(implementation="triton")


def test_blocks_measured_at_one_width_fit_another():
    """Fewer steps in flight, fewer heads of a step, where the shared memory would not do."""
    measured = RowBlocks(stages=2, per_multiprocessor=2)
    for width, stages in ((4096, 2), (12288, 1), (16384, 1)):  # add + LayerNorm in bf16
        slot, weights = 4 * 2 * width, 2 * 2 * width
        assert stages_that_fit(measured, slot, weights) == stages
        assert stages * slot + weights <= SHARED_BYTES
    measured = RopeBlocks(rows=32, heads=2, stages=2)
    assert heads_and_stages_that_fit(measured, 8, 2 * 128, 64) == (2, 2)
    assert heads_and_stages_that_fit(measured, 8, 4 * 256, 128) == (1, 2)
    assert heads_and_stages_that_fit(measured, 8, 2 * 768, 256) == (1, 1)
