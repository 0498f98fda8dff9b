"""Attention against loops in float64, and which implementation runs."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.kernels.attention import always_tiled, causal_attention, stand_in
from mxjax.kernels.attention_cudnn import cudnn
from mxjax.kernels.implementation import ImplementationError
from mxjax.remat.layers import LayerPolicy
from mxjax.remat.policy import rematerialise
from mxjax.remat.residuals import residuals_of

B, S, N, D = 2, 9, 4, 8


def reference(q, k, v, segments):
    """One query at a time."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    group_size = q.shape[2] // k.shape[2]
    for b, s, n in np.ndindex(q.shape[:3]):
        seen = [t for t in range(s + 1) if segments[b, t] == segments[b, s]]
        scores = k[b, seen, n // group_size] @ q[b, s, n] / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        out[b, s, n] = weights @ v[b, seen, n // group_size] / weights.sum()
    return out


def sample(groups, heads=N):
    rng = np.random.default_rng(groups)
    q = rng.normal(size=(B, S, heads, D)).astype(np.float32)
    k, v = rng.normal(size=(2, B, S, groups, D)).astype(np.float32)
    segments = np.sort(rng.integers(1, 4, (B, S)), axis=1).astype(np.int32)
    segments[1, -3:] = 0  # padding
    return q, k, v, segments


@pytest.mark.parametrize("groups", [4, 2, 1], ids=["multi-head", "grouped", "multi-query"])
@pytest.mark.parametrize("packed", [True, False])
def test_xla_equals_loops(groups, packed):
    q, k, v, segments = sample(groups)
    got = causal_attention(q, k, v, segment_ids_BS=segments if packed else None)
    expected = reference(q, k, v, segments if packed else np.ones((B, S)))
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


def test_xla_gradient_equals_finite_differences():
    """Of the loops, in random directions."""
    q, k, v, segments = sample(groups=2)
    rng = np.random.default_rng(1)
    weight = rng.normal(size=q.shape)

    def loss(q, k, v):
        return jnp.sum(weight * causal_attention(q, k, v, segment_ids_BS=segments))

    grads = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    for i in range(3):
        direction = rng.normal(size=(q, k, v)[i].shape)
        values = []
        for sign in (1, -1):
            moved = [
                x + (sign * 1e-5 * direction if j == i else 0) for j, x in enumerate((q, k, v))
            ]
            values.append(np.sum(weight * reference(*moved, segments)))
        slope = (values[0] - values[1]) / 2e-5
        np.testing.assert_allclose(np.sum(grads[i] * direction), slope, rtol=1e-4)


def test_dropout_keeps_the_expectation_and_follows_its_key():
    q, k, v, segments = sample(groups=2)

    def attend(key, rate=0.4):
        return causal_attention(
            q, k, v, segment_ids_BS=segments, dropout_rate=rate, dropout_key=key
        )

    exact = attend(None)
    first, other = attend(jax.random.key(0)), attend(jax.random.key(1))
    assert jnp.array_equal(first, attend(jax.random.key(0)))
    assert not jnp.allclose(first, other)
    assert jnp.array_equal(attend(jax.random.key(0), rate=0.0), exact)
    many = jax.vmap(attend)(jax.random.split(jax.random.key(2), 4000))
    deviation = np.std(many, axis=0) / np.sqrt(4000)
    assert np.max(np.abs(np.mean(many, axis=0) - exact) / (deviation + 1e-6)) < 5


@pytest.fixture
def gpu(monkeypatch):
    """As on a machine with an NVIDIA GPU; returns the calls that reach cuDNN."""
    calls = []

    def forward(q, k, v, bias, **options):
        calls.append((bias, options))
        return q

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(cudnn, "dot_product_attention", forward)
    return calls


def test_cudnn_on_cpu_is_an_error():
    q, k, v, _ = sample(groups=2)
    message = r"attention_implementation: cudnn .* no NVIDIA GPU"
    with pytest.raises(ImplementationError, match=message):
        causal_attention(q, k, v, implementation="cudnn")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "dropout", "message"),
    [
        (jnp.float32, 8, 0.0, "16 bits, not float32"),
        (jnp.bfloat16, 12, 0.0, "head_dim 12"),
        (jnp.bfloat16, 264, 0.0, "head_dim 264"),
        (jnp.bfloat16, 8, 0.1, "attention dropout"),
    ],
)
def test_cudnn_that_cannot_run_is_an_error(gpu, dtype, head_dim, dropout, message):
    x = jnp.zeros((1, 4, 2, head_dim), dtype)
    options = {"dropout_rate": dropout, "dropout_key": jax.random.key(0)}
    with pytest.raises(ImplementationError, match=message):
        causal_attention(x, x, x, implementation="cudnn", **options)
    causal_attention(x, x, x, **options)
    assert not gpu, "`auto` took cuDNN"


def test_auto_takes_cudnn_where_it_can_run(gpu):
    x = jnp.zeros((1, 4, 2, 8), jnp.bfloat16)
    segments = jnp.asarray([[1, 1, 2, 2]])
    causal_attention(x, x, x, segment_ids_BS=segments)
    causal_attention(x, x, x)
    (bias, _), (none, _) = gpu
    assert all(options["mask_type"] == cudnn.MaskType.CAUSAL for _, options in gpu)
    assert none is None
    same = np.kron(np.eye(2), np.ones((2, 2))).astype(bool)
    np.testing.assert_array_equal(bias == 0, same[None, None])
    assert np.max(bias[~same[None, None]]) < -1e9


def test_the_stand_in_for_plans_has_the_sizes_of_cudnns_call():
    """Results and gradients of the same types, scores nowhere; with segments, one mask."""
    S, G, D, E = 256, 2, 24, 16
    q, k, v = (
        jax.ShapeDtypeStruct((B, S, heads, width), jnp.bfloat16)
        for heads, width in ((N, D), (G, D), (G, E))
    )
    ids = jax.ShapeDtypeStruct((B, S), jnp.int32)

    def both(q, k, v, ids):
        out, pullback = jax.vjp(partial(causal_attention, segment_ids_BS=ids), q, k, v)
        return out, pullback(out)

    def largest(ids):
        with stand_in():
            jaxpr = jax.make_jaxpr(both)(q, k, v, ids)
        types = [aval.str_short() for aval in jaxpr.out_avals]
        assert types == [aval.str_short() for aval in jax.make_jaxpr(both)(q, k, v, ids).out_avals]
        return max(out.aval.size for eqn in jaxpr.eqns for out in eqn.outvars)

    assert largest(None) == B * S * N * D
    assert largest(ids) == B * S * S
    # Where the run would not take cuDNN the plan has what it takes.
    with stand_in():
        plain = jax.eval_shape(partial(causal_attention, implementation="cudnn"), q, k, v)
        jaxpr = jax.make_jaxpr(partial(causal_attention, implementation="xla"))(q, k, v)
    assert plain.shape == (B, S, N, E)
    assert max(out.aval.size for eqn in jaxpr.eqns for out in eqn.outvars) >= B * N * S * S


@pytest.mark.parametrize("planned", [stand_in, always_tiled])
@pytest.mark.parametrize("kept", [True, False])
def test_plans_keep_of_attention_what_the_policy_keeps_of_cudnns_results(planned, kept):
    """As wide as values, and one figure for each row."""
    q, k = (jax.ShapeDtypeStruct((B, 64, heads, 24), jnp.bfloat16) for heads in (N, 2))
    v = jax.ShapeDtypeStruct((B, 64, 2, 16), jnp.bfloat16)
    names = frozenset(["attention_out"] if kept else [])
    attention = rematerialise(
        partial(causal_attention, implementation="cudnn"),
        LayerPolicy("names", save=names),
        gathers_weights=False,
        in_scan=True,
    )
    with planned():
        residuals = residuals_of(attention, q, k, v)
    made = sorted((math.prod(r.shape), r.dtype.name) for r in residuals if r.argument is None)
    assert made == ([(B * 64 * N, "float32"), (B * 64 * N * 16, "bfloat16")] if kept else [])


def test_an_implementation_that_does_not_exist_is_an_error():
    q, k, v, _ = sample(groups=2)
    with pytest.raises(ImplementationError, match="flash is none of auto, cudnn, mosaic, xla"):
        causal_attention(q, k, v, implementation="flash")


@pytest.mark.parametrize(
    ("queries", "keys", "values", "ids"),
    [
        ((1, 8, 3, 8), (1, 8, 2, 8), (1, 8, 2, 8), None),
        ((1, 8, 4, 8), (1, 8, 2, 8), (1, 4, 2, 8), None),
        ((2, 8, 4, 8), (1, 8, 2, 8), (1, 8, 2, 8), None),
        ((1, 8, 4, 8), (1, 8, 2, 8), (1, 8, 2, 8), (1, 4)),
    ],
    ids=["heads", "values", "batch", "ids"],
)
def test_shapes_that_do_not_fit_are_an_error(queries, keys, values, ids):
    """Whatever would run: kernels would read what is not theirs."""
    arrays = (jnp.zeros(shape) for shape in (queries, keys, values))
    segments = None if ids is None else jnp.zeros(ids, jnp.int32)
    with pytest.raises(ValueError, match="do not fit together"):
        causal_attention(*arrays, segment_ids_BS=segments)
