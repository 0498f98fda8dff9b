"""The Triton kernels on a GPU: against plain formulas in fp32, and the same bits twenty times.

Needs jax-triton with a Triton that fits it, see docs/kernels.md.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.kernels.dropout import bias_dropout_add
from tests.gpu.test_kernels_gpu import assert_moves_rows_as_xla, assert_near, same_bits
from tests.kernels.fused_ops import OPS, RATE, value_and_gradients

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", [1408, 2500])
@pytest.mark.parametrize("name", ["swiglu", "bias_swiglu", "dropout_add", "bias_dropout_add"])
def test_fused_op(name, width, dtype):
    """Forward and gradients, of an odd number of rows."""
    op = OPS[name]
    shapes = [(1023, *s[1:-1], width) if s[0] == 3 else (*s[:-1], width) for s in op.shapes]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arguments = [
        jax.random.normal(k, s, jnp.dtype(dtype)) for k, s in zip(keys, shapes, strict=True)
    ]
    run = partial(op.run, implementation="triton")
    got = same_bits(lambda *a: value_and_gradients(run, a), *arguments)
    exact = tuple(x.astype(jnp.float32) for x in arguments)
    want = jax.jit(lambda *a: value_and_gradients(op.formula, a))(*exact)
    assert_near(got, want, 2**-7 if dtype == "bfloat16" else 2e-5)


def test_the_same_elements_are_dropped():
    x, key = jnp.ones((4097, 1408)), jax.random.key(3)
    drop = partial(bias_dropout_add, x, None, jnp.zeros_like(x), RATE, key)
    kernel, xla = (jax.jit(partial(drop, implementation=name))() for name in ("triton", "xla"))
    np.testing.assert_array_equal(kernel, xla)


@pytest.mark.parametrize("sizes", [(4096, 64, 6, 2048), (2048, 8, 2, 1100)], ids=str)
def test_permute_and_unpermute(sizes):
    assert_moves_rows_as_xla("triton", *sizes)
