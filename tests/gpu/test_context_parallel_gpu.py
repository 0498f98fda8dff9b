"""Attention over a split sequence by kernels: `pytest -m gpu` on one GPU, `-m multigpu` on two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mxjax.config import ParallelConfig
from mxjax.kernels.attention import causal_attention
from mxjax.kernels.attention_block import (
    MASKED,
    BlockOptions,
    attention_block,
    attention_block_gradient,
)
from mxjax.sharding.context_parallel import RING, ContextParallel, attend, sequence_order
from mxjax.sharding.mesh import SEQUENCE_AXES, build_mesh

B, S, N, D = 2, 512, 8, 128


def relative_error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def sample(groups, value_width=D):
    """bf16 queries, keys, values and gradient of the output, and segment ids."""
    keys = jax.random.split(jax.random.key(0), 4)
    widths = ((N, D), (groups, D), (groups, value_width), (N, value_width))
    arrays = [
        jax.random.normal(key, (B, S, *width), jnp.bfloat16)
        for key, width in zip(keys, widths, strict=True)
    ]
    ids = np.sort(np.random.default_rng(0).integers(1, 6, (B, S)), axis=1)
    return arrays, jnp.asarray(ids, jnp.int32)


def in_fp32(function):
    """`function` of the same values in fp32, with exact products."""

    def run(*arrays):
        wide = [x.astype(jnp.float32) for x in arrays]
        with jax.default_matmul_precision("highest"):
            return jax.jit(function)(*wide)

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("kernel", "value_width"), [("cudnn", 96), ("mosaic", 64)])
def test_a_block_equals_the_reference(kernel, value_width, groups, causal, packed):
    """bf16 against fp32 within bf16 rounding: output, log-sum-exp, and the gradients as one of two
    blocks of a row. Some queries see no key."""
    (q, k, v, d_out), ids = sample(groups, value_width)
    q_ids = ids.at[:, -50:].set(9) if packed and not causal else ids
    segment_ids = (q_ids, ids) if packed else None

    def run(implementation, q, k, v, d_out):
        options = BlockOptions(D**-0.5, implementation=implementation)
        inputs = (q, k, v, segment_ids, None)
        out, lse = attention_block(*inputs, causal=causal, options=options)
        # Another block with the log-sum-exp 2, and 0 as its output.
        row_lse = jnp.logaddexp(lse, 2.0)
        share = jnp.exp(lse - row_lse).transpose(0, 2, 1)[..., None]
        results = ((out * share).astype(q.dtype), row_lse, d_out)
        grads = attention_block_gradient(*inputs, *results, causal=causal, options=options)
        return out, lse, *grads

    want = in_fp32(functools.partial(run, "xla"))(q, k, v, d_out)
    got = jax.jit(functools.partial(run, kernel))(q, k, v, d_out)
    for a, b in zip(got, want, strict=True):
        assert np.all(np.isfinite(a))
        assert relative_error(a, b) < 1e-2
    if packed and not causal:
        assert np.all(np.asarray(got[1])[:, :, -50:] == np.float32(MASKED))
        assert not np.any(np.asarray(got[0])[:, -50:])


@pytest.mark.multigpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        ({"cp": 2}, RING),
        ({"cp": 2}, ContextParallel("ring", "alltoall")),
        ({"cp": 2}, ContextParallel("allgather")),
        ({"sp": 2}, RING),
    ],
    ids=str,
)
def test_two_gpus_attend_as_one(layout, choice, dtype):
    """bf16, with kernels, and fp32, without: output and gradients against one GPU in fp32."""
    arrays, ids = sample(groups=4)
    order = sequence_order(S, layout.get("cp", 1))

    def outputs_and_gradients(attention, q, k, v, d_out):
        out, pullback = jax.vjp(attention, q, k, v)
        return out, *pullback(d_out)

    def local(ids, *arrays):
        attention = functools.partial(attend, segment_ids_Bs=ids, context_parallel=choice)
        return outputs_and_gradients(attention, *arrays)

    def whole(*arrays):
        attention = functools.partial(causal_attention, segment_ids_BS=ids, implementation="xla")
        return outputs_and_gradients(attention, *arrays)

    want = in_fp32(whole)(*arrays)
    spec = PartitionSpec(None, SEQUENCE_AXES)
    mesh = build_mesh(ParallelConfig(dp=1, **layout), jax.devices()[:2])
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    inputs = [np.asarray(x)[:, order] for x in (ids, *(x.astype(dtype) for x in arrays))]
    with jax.default_matmul_precision("highest"):
        got = jax.jit(run)(*inputs)
    for a, b in zip(got, want, strict=True):
        a = np.asarray(a.astype(jnp.float32))[:, np.argsort(order)]
        assert relative_error(a, b) < (1e-2 if dtype == jnp.bfloat16 else 1e-5)
