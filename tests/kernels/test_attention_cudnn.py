"""Attention by cuDNN as far as it goes without a GPU: what reaches it, and what comes of that."""

import contextlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mxjax.kernels.attention import causal_attention, stand_in
from mxjax.kernels.attention_block import BlockOptions, attention_block, attention_block_gradient
from mxjax.kernels.attention_cudnn import cudnn
from mxjax.kernels.implementation import ImplementationError
from mxjax.pipeline.graph import trace
from mxjax.pipeline.split import split_layer
from mxjax.remat.layers import LayerPolicy
from mxjax.remat.policy import rematerialise
from mxjax.remat.residuals import residuals_of

B, S, N, G, D, E, H = 2, 16, 4, 2, 24, 16, 40
named = partial(causal_attention, implementation="cudnn")


@pytest.fixture
def hopper(monkeypatch):
    """What is traced is traced as for an H200."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)


@pytest.fixture
def computed(hopper, monkeypatch):
    """In the place of cuDNN, plain attention; returns the widths of keys and values of its calls."""
    widths = []

    def documents(bias):
        """Each token's document by the first token that it may see."""
        ids = jnp.argmax(bias[:, 0] == 0, axis=-1)
        return ids, ids

    def forward(q, k, v, bias, *, scale, mask_type, return_residual):
        widths.append((k.shape[-1], v.shape[-1]))
        ids = None if bias is None else documents(bias)
        causal, options = mask_type == cudnn.MaskType.CAUSAL, BlockOptions(scale, 0.0, "xla")
        out, lse = attention_block(q, k, v, ids, None, causal=causal, options=options)
        out = out.astype(q.dtype)
        return (out, lse) if return_residual else out

    class Backward:
        @staticmethod
        def bind(q, k, v, bias, *rest, scale, mask_type, **_):
            widths.append((k.shape[-1], v.shape[-1]))
            lse, out, d_out = rest[-3:]
            assert out.shape == d_out.shape == (*q.shape[:3], v.shape[-1])
            ids = documents(bias) if bias.size else None
            causal, options = mask_type == cudnn.MaskType.CAUSAL, BlockOptions(scale, 0.0, "xla")
            grads = attention_block_gradient(
                q, k, v, ids, None, out, lse, d_out, causal=causal, options=options
            )
            return [g.astype(q.dtype) for g in grads]

    monkeypatch.setattr(cudnn, "dot_product_attention", forward)
    monkeypatch.setattr(cudnn, "_dot_product_attention_bwd_p_wrapper", Backward)
    return widths


def sample(value_width=E):
    """bf16 queries, keys, values and gradient of the output, and ids of documents."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (N, D), (G, D), (G, value_width), (N, value_width)
    arrays = [
        jax.random.normal(key, (B, S, *shape), jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]
    ids = np.sort(np.random.default_rng(0).integers(1, 4, (B, S)), axis=1)
    return arrays, jnp.asarray(ids, jnp.int32)


def types(key_width=D, value_width=E):
    shapes = (N, key_width), (G, key_width), (G, value_width)
    return [jax.ShapeDtypeStruct((B, S, *shape), jnp.bfloat16) for shape in shapes]


IDS = jax.ShapeDtypeStruct((B, S), jnp.int32)


def with_gradients(attention, q, k, v, ids=None):
    """The output, and the gradients that belong to it as its own."""
    out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, segment_ids_BS=ids), q, k, v)
    return out, *pullback(out)


def calls_of(function, *arguments):
    """(call of cuDNN, types of its operands, of its results) of the program for a GPU."""
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    found = re.findall(r"@__cudnn\$(\w+)\(.*?\}.*? : \((.*?)\) -> \((.*?)\)", lowered.as_text())
    return [
        (name, *(re.findall(r"tensor<(.*?)>", part) for part in (operands, results)))
        for name, operands, results in found
    ]


@pytest.mark.parametrize(
    ("value_width", "packed", "version", "given"),
    [(E, False, 91000, E), (E, False, 90900, D), (12, False, 91000, D), (E, True, 91000, D)],
    ids=["narrow", "old cuDNN", "odd width", "documents"],
)
def test_output_and_gradients(computed, monkeypatch, value_width, packed, version, given):
    """They do not depend on how wide the values are that cuDNN is given: as they are, where it can
    have them so, else as wide as keys. It is called once for each pass."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: version)
    (q, k, v, d_out), ids = sample(value_width)
    ids = ids if packed else None

    def run(implementation):
        attention = partial(causal_attention, segment_ids_BS=ids, implementation=implementation)
        out, pullback = jax.vjp(attention, q, k, v)
        return out, *pullback(d_out)

    for got, want in zip(run("cudnn"), run("xla"), strict=True):
        assert got.dtype == want.dtype == jnp.bfloat16
        difference = np.asarray(got, np.float32) - np.asarray(want, np.float32)
        assert np.linalg.norm(difference) < 1e-2 * np.linalg.norm(np.asarray(want, np.float32))
    assert computed == [(D, given)] * 2


def test_what_is_not_differentiated_makes_no_log_sum_exp(hopper):
    (call,) = calls_of(named, *types())
    assert call[2] == [f"{B}x{N}x{S}x{E}xbf16", "0xui8"]


def test_the_values_of_latent_attention_reach_cudnn_as_they_are(hopper):
    q, k, v = types(192, 128)
    forward, backward = calls_of(partial(with_gradients, named), q, k, v)
    wide, keys, values = f"{B}x{S}x{N}x192xbf16", f"{B}x{S}x{G}x192xbf16", f"{B}x{S}x{G}x128xbf16"
    out, lse = f"{B}x{S}x{N}x128xbf16", f"{B}x{N}x{S}xf32"
    # Of results it has heads before the sequence.
    by_head = [f"{B}x{n}x{S}x{w}xbf16" for n, w in ((N, 192), (G, 192), (G, 128), (N, 128))]
    assert forward == ("fmhaSoftmax", [wide, keys, values], [by_head[3], lse, "0xui8"])
    operands = [wide, keys, values, lse, out, out]
    assert backward == ("fmhaSoftmaxBackward", operands, [*by_head[:3], "0xui8"])


def test_with_documents_cudnn_gets_a_bias_and_wide_values(hopper):
    forward, backward = calls_of(partial(with_gradients, named), *types(192, 128), IDS)
    wide, bias = f"{B}x{S}x{G}x192xbf16", f"{B}x1x{S}x{S}xbf16"
    names = "fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"
    assert (forward[0], backward[0]) == names
    for call in (forward, backward):
        assert call[1][1:3] == [wide, wide]
        assert bias in call[1]


@pytest.mark.parametrize("packed", [False, True])
def test_the_stand_in_of_plans_reads_and_makes_what_cudnn_does(hopper, packed):
    """And, in the backward pass, has the gradient of the queries in fp32 besides."""

    def calls(planned):
        def both(*arguments):  # a new one each time: JAX remembers what it traced
            return with_gradients(named, *arguments)

        with planned():
            graph, _ = trace(both, *types(), *([IDS] if packed else []))
        found = []
        for op in graph.operations:
            if op.name == "mpmd_map" or op.name.startswith("dot_product_attention"):
                sides = ([graph.avals[v] for v in side] for side in (op.inputs, op.outputs))
                found.append([[a.str_short() for a in side if a.size] for side in sides])
        return found

    forward, (operands, results) = calls(contextlib.nullcontext)
    assert len(operands) == 6 + packed
    scratch = f"float32[{B},{S},{N},{D}]"
    assert calls(stand_in) == [forward, [operands, [*results, scratch]]]


def layer(weights, q, k, v, ids=None):
    """Attention and the output matrix, whose gradient needs attention's output too."""
    return (jnp.einsum("bsne,neh->bsh", named(q, k, v, segment_ids_BS=ids), weights),)


WEIGHTS = jax.ShapeDtypeStruct((N, E, H), jnp.bfloat16)
OUT = ("attention_out", (B, S, N, E), "bfloat16")
LSE = ("attention_log_sum_exp", (B, N, S), "float32")
SAVED, AWAY, NONE = (
    LayerPolicy("names", **{key: frozenset(["attention_out"])} if key else {})
    for key in ("save", "offload", None)
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("planned", [contextlib.nullcontext, stand_in])
@pytest.mark.parametrize("policy", [LayerPolicy(), LayerPolicy("dots"), SAVED, AWAY, NONE])
def test_the_backward_pass_has_the_output_once(hopper, policy, planned, packed):
    """As wide as values, and one figure for each row: whatever keeps them, and whether cuDNN is
    called or planned for. They are kept on the host if so named, and made again if not."""
    arguments = WEIGHTS, *types(), *([IDS] if packed else [])
    run = rematerialise(layer, policy, gathers_weights=False, in_scan=True)
    with planned():
        found = residuals_of(run, *arguments)
    made = [residual for residual in found if residual.argument is None]
    of_attention = [] if policy == NONE else [LSE, OUT]
    assert sorted((r.name, r.shape, r.dtype.name) for r in made) == of_attention
    assert {r.on_host for r in made} <= {policy == AWAY}


@pytest.mark.parametrize(("policy", "times"), [(SAVED, 1), (NONE, 2)])
def test_attention_is_computed_again_if_its_output_is_not_kept(hopper, policy, times):
    run = rematerialise(layer, policy, gathers_weights=False, in_scan=True)

    def gradients(*arguments):
        (y,), pullback = jax.vjp(run, *arguments)
        return pullback((y,))

    calls = [call[0] for call in calls_of(gradients, WEIGHTS, *types())]
    assert calls.count("fmhaSoftmax") == times
    assert calls.count("fmhaSoftmaxBackward") == 1


def test_a_pipeline_computes_attention_in_f_and_its_gradient_in_b(hopper):
    """What passes from one to the other has attention's names; the output is there once, for the
    gradients of attention and of the output matrix."""
    splits = []

    def look(weights, x, ids):
        def one(weights, x, ids):
            wide = jnp.concatenate([x, x[..., : D - E]], axis=-1)
            out = named(wide, wide, x, segment_ids_BS=ids)
            return jnp.einsum("bsne,nef->bsnf", out, weights), jnp.float32(0), ()

        splits.append(split_layer(one, weights, x, ids, {"attention_out"}))
        return 0

    x = jax.ShapeDtypeStruct((B, S, N, E), jnp.bfloat16)
    jax.eval_shape(look, jax.ShapeDtypeStruct((N, E, E), jnp.bfloat16), x, IDS)
    (split,) = splits
    kept = zip(split.names, split.residuals, split.on_host, strict=False)
    found = [(name, value.shape, value.dtype.name, away) for name, value, away in kept]
    x_itself = (None, x.shape, "bfloat16", False)
    assert sorted(found, key=str) == sorted([x_itself, (*OUT, True), (*LSE, False)], key=str)
    calls = {
        name: [op.name for op in program.operations if op.name.startswith("dot_product_attention")]
        for name, program in split.programs.items()
    }
    forward, backward = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
    assert calls == {"F": [forward], "B": [backward], "W": [], "BW": [backward]}


@pytest.mark.parametrize("planned", [contextlib.nullcontext, stand_in])
def test_gradients_of_what_all_ranks_hold_alike_are_summed(hopper, planned):
    """Inside a `shard_map` that checks types: keys and values that do not vary between ranks."""
    mesh = jax.sharding.AbstractMesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    split, alike = PartitionSpec(None, None, "tp"), PartitionSpec()
    specs = split, alike, alike
    mapped = jax.shard_map(
        partial(with_gradients, named), mesh=mesh, in_specs=specs, out_specs=(split, *specs)
    )
    with planned():
        text = str(jax.make_jaxpr(mapped)(*types()))
    assert ("dot_product_attention" in text) == (planned is not stand_in)
    assert text.count("psum_invariant") == 2


def test_values_wider_than_keys_are_not_for_cudnn(hopper):
    """`auto` takes the plain form."""
    q, k, v = types(value_width=D + 8)
    with pytest.raises(ImplementationError, match=r"cudnn .* values would be wider \(32\)"):
        jax.eval_shape(named, q, k, v)
    assert jax.eval_shape(causal_attention, q, k, v).shape == (B, S, N, D + 8)


def test_documents_in_an_odd_sequence_are_not_for_cudnn(hopper):
    x, ids = jnp.zeros((B, S - 1, N, D), jnp.bfloat16), jnp.zeros((B, S - 1), jnp.int32)
    with pytest.raises(ImplementationError, match=r"cudnn .* even number of queries"):
        named(x, x, x, segment_ids_BS=ids)
