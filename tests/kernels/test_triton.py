"""The Triton kernels against plain formulas, interpreted, and compiled for a GPU.

Needs jax-triton with a Triton that fits it, see docs/kernels.md; no GPU and no PyTorch.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.kernels.permute import permute, unpermute
from tests.kernels.fused_ops import OPS
from tests.kernels.test_fused_ops import by_shard_map, check
from tests.kernels.test_permute import K, T, equal_places, groups, tiled_places
from tests.kernels.triton_interpreted import interpreted

pytestmark = pytest.mark.triton


@pytest.fixture(autouse=True, scope="module")
def in_the_interpreter():
    """With blocks so small that there are several in each dim, the last ones not full."""
    with interpreted(), pytest.MonkeyPatch.context() as patch:
        for module in ("swiglu_triton", "dropout_triton", "permute_triton"):
            patch.setattr(f"mxjax.kernels.{module}.BLOCK", 64)
        for module in ("swiglu_triton", "dropout_triton"):
            patch.setattr(f"mxjax.kernels.{module}.SUMMED_ROWS", 2)
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["swiglu", "bias_swiglu", "dropout_add", "bias_dropout_add"])
def test_elementwise_op_equals_the_formula(name, dtype):
    """Forward and every gradient, with the mask that all implementations draw."""
    op = OPS[name]
    check(by_shard_map(partial(op.run, implementation="triton"), op, dtype), op, dtype)


@pytest.mark.parametrize(("places", "size"), [(equal_places, 3), (tiled_places, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_permute_and_unpermute_are_those_of_xla(places, size, dtype):
    """Values and gradients, of a width that is no multiple of anything; some choices have no place,
    a group has no rows, and what is behind the last group matters to nobody."""
    plan, starts = places(groups(size, empty_group=2), size)
    rng, H = np.random.default_rng(size), 100
    x, y, g_out = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((T, H), (*plan.source.shape, H), (T, H))
    )
    weights = jnp.asarray(rng.random((T, K)), jnp.float32)

    def with_gradients(implementation):
        named = {"implementation": implementation}
        rows, pull_rows = jax.vjp(lambda x: permute(x, plan, **named), x)
        out, pull_out = jax.vjp(lambda y, w: unpermute(y, w, plan, **named), y, weights)
        total = unpermute(y, None, plan, **named)
        d_y, d_weights = pull_out(g_out)
        in_use = [a.reshape(-1, H)[: starts[-1]] for a in (rows, d_y)]
        return *in_use, out, total, d_weights, *pull_rows(y)

    got, want = (jax.jit(partial(with_gradients, name))() for name in ("triton", "xla"))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        tolerance = 1e-5 if dtype == "float32" else 2**-7
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


def test_kernels_compile_for_h200(programs_for_h200, monkeypatch):
    """Forward and backward, recomputed, on two GPUs, types checked."""
    monkeypatch.delenv("TRITON_INTERPRET")  # the process for itself would interpret, too
    for name, program in programs_for_h200("triton").items():
        assert "triton_kernel_call" in program, name
        assert "multimem" not in program, name
