"""Kernels are traced once for all calls of the same types, and lowered once in a program."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from mxjax.kernels import implementation
from mxjax.kernels.attention import always_tiled
from mxjax.kernels.implementation import interpreted, traced_once


@pytest.fixture
def kernel():
    """A function, and how often it was traced."""
    traces = []

    @traced_once("factor")
    def scaled(x, bias, factor):
        traces.append(factor)
        return factor * x if bias is None else factor * x + bias

    return scaled, traces


def test_unrolled_layers_share_a_trace_and_a_lowering(kernel):
    scaled, traces = kernel

    def layers(x):
        for _ in range(3):
            x = scaled(x, None, factor=2)
        return x

    program = jax.jit(layers).lower(jnp.ones(4)).as_text()
    assert traces == [2]
    assert program.count("stablehlo.multiply") == 1
    assert program.count("call @") == 3
    assert jax.jit(layers)(jnp.ones(4)).tolist() == [8.0] * 4


def test_other_types_and_other_static_arguments_do_not(kernel):
    scaled, traces = kernel
    calls = (
        (jnp.ones(4), None, 2),
        (jnp.ones(4), None, 3),
        (jnp.ones(5), None, 2),
        (jnp.ones(4, jnp.bfloat16), None, 2),
        (jnp.ones(4), jnp.ones(4), 2),
    )
    for call in (*calls, *calls):
        scaled(*call)
    assert traces == [2, 3, 2, 2, 2]


@pytest.mark.parametrize("change", ["interpreted", "plan", "device"])
def test_what_a_trace_depends_on_besides_does_not(kernel, change, monkeypatch):
    """A kernel traced for a plan, say, is one that does nothing."""
    scaled, traces = kernel
    call = partial(scaled, jnp.ones(4), None, 2)
    call()
    if change == "device":
        monkeypatch.setattr(implementation, "device_kind", lambda: "another")
        call()
    else:
        with interpreted() if change == "interpreted" else always_tiled():
            call()
    assert len(traces) == 2
    monkeypatch.undo()
    call()
    assert len(traces) == 2
