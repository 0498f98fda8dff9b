"""Attention within documents by Mosaic kernels: what they compute, and when they do.

Results are compared with plain attention in fp32 of the same bf16 values; what is between them is
the rounding of weights, of gradients of scores and of results to bf16, relative to the norm of all.
"""

import contextlib
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mxjax.kernels import attention_mosaic_gradient, implementation
from mxjax.kernels.attention import always_tiled, causal_attention, stand_in
from mxjax.kernels.attention_block import (
    MASKED,
    BlockOptions,
    attention_block,
    attention_block_gradient,
)
from mxjax.kernels.attention_choice import choose_attention
from mxjax.kernels.implementation import ImplementationError, interpreted
from mxjax.pipeline.graph import trace
from mxjax.pipeline.split import split_layer
from mxjax.remat.layers import LayerPolicy
from mxjax.remat.policy import rematerialise
from mxjax.remat.residuals import residuals_of

ROUNDING = 4e-3
"""Relative to the norm of all: that of bf16 is at most 2^-8, and half of it on average."""


@pytest.fixture
def hopper(monkeypatch):
    """What is traced is traced as for an H200, with kernels that do not run here."""
    device = SimpleNamespace(device_kind="NVIDIA H200", num_cores=132)
    monkeypatch.setattr(implementation, "_device", lambda: device)


def sample(q_tokens, k_tokens, N, G, D, E, B=1):
    """bf16 queries, keys, values and gradient of the output."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (q_tokens, N, D), (k_tokens, G, D), (k_tokens, G, E), (q_tokens, N, E)
    return [
        jax.random.normal(key, (B, *shape), jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def ids_of(*lengths):
    """Ids [1, tokens] of documents, given as (id, tokens)."""
    return jnp.asarray(np.repeat(*np.transpose(lengths))[None], jnp.int32)


def in_fp32(arrays):
    return [x.astype(jnp.float32) for x in arrays]


def assert_near(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) < ROUNDING * np.linalg.norm(want)


def with_gradients(q, k, v, d_out, **options):
    out, pullback = jax.vjp(partial(causal_attention, **options), q, k, v)
    return out, *pullback(d_out)


# An interpreted kernel takes seconds: each case covers several things.


def test_documents_and_padding():
    """Documents that end inside of blocks, one of one token. Gradients of the keys of a group of
    heads are summed in parts. `auto` takes the kernels."""
    arrays = sample(256, 256, 2, 1, 64, 64)
    ids = ids_of((1, 200), (2, 1), (3, 45), (0, 10))
    want = with_gradients(*in_fp32(arrays), segment_ids_BS=ids, implementation="xla")
    with interpreted():
        assert attention_mosaic_gradient._parts_of_a_group(num_tiles=2, heads=2) == 2
        got = jax.jit(partial(with_gradients, segment_ids_BS=ids))(*arrays)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.bfloat16
        assert_near(a, b)


def test_one_document_with_the_heads_of_latent_attention():
    """Values narrower than keys, and a scale of its own."""
    arrays = sample(256, 256, 1, 1, 192, 128)
    want = with_gradients(*in_fp32(arrays), implementation="xla", scale=0.1)
    with interpreted():
        got = jax.jit(partial(with_gradients, implementation="mosaic", scale=0.1))(*arrays)
    for a, b in zip(got, want, strict=True):
        assert_near(a, b)


@pytest.mark.parametrize(
    ("causal", "groups", "q_ids", "k_ids"),
    [
        (True, 2, ids_of((2, 50), (4, 58), (9, 20)), ids_of((1, 20), (2, 30), (4, 206))),
        (False, 1, ids_of((9, 128), (4, 118), (5, 10)), ids_of((2, 30), (4, 98))),
    ],
    ids=["causal", "not causal"],
)
def test_a_block_of_a_longer_row(monkeypatch, causal, groups, q_ids, k_ids):
    """Queries of other documents than keys, and of another number. Some in a tile, or all of it,
    see nothing: the output is 0 and the log-sum-exp weighs nothing. Some keys are seen by none. The
    two or four heads of a group are summed in two parts."""
    monkeypatch.setattr(attention_mosaic_gradient, "_parts_of_a_group", lambda *_: 2)
    arrays = sample(q_ids.shape[1], k_ids.shape[1], 4, groups, 64, 64)

    def run(named, q, k, v, d_out):
        block = q, k, v, (q_ids, k_ids), None
        options = {"causal": causal, "options": BlockOptions(0.125, implementation=named)}
        out, lse = attention_block(*block, **options)
        # The rest of each row has the log-sum-exp 2, and 0 as its output.
        row_lse = jnp.logaddexp(lse, 2.0)
        row_out = out * jnp.exp(lse - row_lse).transpose(0, 2, 1)[..., None]
        return lse, out, *attention_block_gradient(*block, row_out, row_lse, d_out, **options)

    want_lse, *want = run("xla", *in_fp32(arrays))
    with interpreted():
        lse, *got = jax.jit(partial(run, "mosaic"))(*arrays)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.float32
        assert_near(a, b)
    blind = np.flatnonzero(np.isin(q_ids[0], (5, 9)))
    assert np.all(np.asarray(lse)[..., blind] == np.float32(MASKED))
    out, d_q, d_k, d_v = (np.asarray(x) for x in got)
    assert not np.any(out[:, blind])
    assert not np.any(d_q[:, blind])
    unseen = np.flatnonzero(~np.isin(k_ids[0], q_ids[0]))
    assert len(unseen)
    assert not np.any(d_k[:, unseen])
    assert not np.any(d_v[:, unseen])


# What is traced, and not run

B, S, N, G, D, E, H = 2, 1024, 4, 2, 128, 64, 40
FORWARD = [f"bfloat16[{B},{S},{N},{E}]", f"float32[{B},{N},{S}]"]
GRADIENT_OF_QUERIES = [f"bfloat16[{B},{S},{N},{D}]"]
named = partial(causal_attention, implementation="mosaic")


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def types(batch=B, tokens=S, key_width=D, value_width=E, dtype=jnp.bfloat16):
    shapes = (N, key_width), (G, key_width), (G, value_width)
    return [array(batch, tokens, *shape, dtype=dtype) for shape in shapes]


IDS = array(B, S, dtype=jnp.int32)
WEIGHTS = array(N, E, H)


def kernels_of(function, *arguments):
    """(name, types of results) of the Mosaic kernels that it runs."""
    graph, _ = trace(lambda *a: function(*a), *arguments)  # a new one: JAX knows what it traced
    return [
        (
            re.search(r"\w*_kernel|<lambda>", str(operation.eqn))[0],
            [graph.avals[value].str_short() for value in operation.outputs],
        )
        for operation in graph.operations
        if operation.name == "mpmd_map"
    ]


def both(q, k, v, ids=None, attention=named):
    out, pullback = jax.vjp(lambda *a: attention(*a, segment_ids_BS=ids), q, k, v)
    return out, pullback(out)


@pytest.mark.parametrize(("batch", "parts"), [(B, 2), (32, 1)])
def test_heads_of_a_group_are_summed_in_parts_where_gpus_would_be_idle(hopper, batch, parts):
    """Of 32 sequences there are 512 tiles of keys for 132 SMs, of 2 there are 32."""
    keys, values = (f"bfloat16[{batch},{S},{G * parts},{width}]" for width in (D, E))
    *_, last = kernels_of(both, *types(batch), array(batch, S, dtype=jnp.int32))
    assert last == ("attention_key_gradient_kernel", [keys, values])


def layer(weights, q, k, v, ids=None):
    """Attention and the output matrix, whose gradient needs attention's output too."""
    return (jnp.einsum("bsne,neh->bsh", named(q, k, v, segment_ids_BS=ids), weights),)


OUT = ("attention_out", (B, S, N, E), "bfloat16")
LSE = ("attention_log_sum_exp", (B, N, S), "float32")
SAVED, AWAY, NONE = (
    LayerPolicy("names", **{key: frozenset(["attention_out"])} if key else {})
    for key in ("save", "offload", None)
)
PLANS = pytest.mark.parametrize("planned", [contextlib.nullcontext, stand_in, always_tiled])


@PLANS
@pytest.mark.parametrize("policy", [LayerPolicy(), LayerPolicy("dots"), SAVED, AWAY, NONE])
def test_the_backward_pass_has_the_output_once(hopper, policy, planned):
    """As wide as values, and one figure for each row: whatever keeps them, in runs and in plans."""
    run = rematerialise(layer, policy, gathers_weights=False, in_scan=True)
    with planned():
        found = residuals_of(run, WEIGHTS, *types(), IDS)
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

    names = [name for name, _ in kernels_of(gradients, WEIGHTS, *types(), IDS)]
    assert names == ["document_attention_kernel"] * times + [
        "attention_query_gradient_kernel",
        "attention_key_gradient_kernel",
    ]


def test_a_pipeline_computes_attention_in_f_and_its_gradient_in_b(hopper):
    splits = []

    def look(weights, x, ids):
        def one(weights, x, ids):
            wide = jnp.concatenate([x, x[..., : D - E]], axis=-1)
            out = named(wide, wide, x, segment_ids_BS=ids)
            return jnp.einsum("bsne,nef->bsnf", out, weights), jnp.float32(0), ()

        splits.append(split_layer(one, weights, x, ids, {"attention_out"}))
        return 0

    jax.eval_shape(look, array(N, E, E), array(B, S, N, E), IDS)
    (split,) = splits
    kept = zip(split.names, split.residuals, strict=False)
    found = [(name, value.shape, value.dtype.name) for name, value in kept]
    x_itself = (None, (B, S, N, E), "bfloat16")
    assert sorted(found, key=str) == sorted([x_itself, OUT, LSE], key=str)
    calls = {
        name: sum(operation.name == "mpmd_map" for operation in program.operations)
        for name, program in split.programs.items()
    }
    assert calls == {"F": 1, "B": 2, "W": 0, "BW": 2}


def test_plans_from_programs_have_the_kernels_that_run(hopper):
    """But not in blocks of attention, which have the plain form there."""
    runs = kernels_of(both, *types(), IDS)
    assert runs[:2] == [
        ("document_attention_kernel", FORWARD),
        ("attention_query_gradient_kernel", GRADIENT_OF_QUERIES),
    ]
    with stand_in():
        assert kernels_of(both, *types(), IDS) == runs

    def block(q, k, v, ids):
        options = BlockOptions(1.0, implementation="mosaic")
        return attention_block(q, k, v, (ids, ids), None, causal=False, options=options)

    assert kernels_of(block, *types(), IDS) == runs[:1]
    with stand_in():
        assert not kernels_of(block, *types(), IDS)


def test_plans_from_shapes_have_neither_kernels_nor_all_scores(hopper):
    with always_tiled():
        graph, _ = trace(both, *types(), IDS)
    assert "mpmd_map" not in {operation.name for operation in graph.operations}
    sizes = [value.size for value in graph.avals if hasattr(value, "size")]
    assert max(sizes) < B * N * S * S


def test_gradients_of_what_all_ranks_hold_alike_are_summed(hopper):
    """Inside a `shard_map` that checks types: keys and values that do not vary between ranks."""
    mesh = jax.sharding.AbstractMesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    split, alike = PartitionSpec(None, None, "tp"), PartitionSpec()
    mapped = jax.shard_map(
        both,
        mesh=mesh,
        in_specs=(split, alike, alike, alike),
        out_specs=(split, (split, alike, alike)),
    )
    text = str(jax.make_jaxpr(mapped)(*types(), IDS))
    assert "document_attention_kernel" in text
    assert text.count("psum_invariant") == 2


def test_auto_takes_the_kernels_for_documents_and_where_bits_must_not_change(hopper):
    """Else cuDNN, where that is."""

    def choose(documents, deterministic=False):
        flags = {"documents": documents, "dropout": False, "deterministic": deterministic}
        flags["scale"] = 1.0
        return choose_attention("auto", *types(), **flags)

    assert choose(documents=True) == ("mosaic", {})
    assert choose(documents=False, deterministic=True) == ("mosaic", {})
    assert choose(documents=False) == ("xla", {"cudnn": "no NVIDIA GPU"})
    with stand_in():
        assert choose(documents=False) == ("cudnn", {})
    names = [
        name for name, _ in kernels_of(partial(both, attention=causal_attention), *types(), IDS)
    ]
    assert names[0] == "document_attention_kernel"
    assert not kernels_of(partial(both, attention=causal_attention), *types())


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (types(dtype=jnp.float32), "computes in bfloat16, not float32"),
        (types(dtype=jnp.float16), "computes in bfloat16, not float16"),
        (types(tokens=192), "of 192 tokens is no multiple of 128"),
        (types(key_width=96), "heads of width 96 and 64: it takes multiples of 64"),
        (types(value_width=96), "heads of width 128 and 96: it takes multiples of 64"),
        (types(key_width=256), "heads of width 256 and 64: .* up to 192"),
        (types(key_width=192, value_width=192), "heads of width 192 and 192: .* up to 128"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_what_the_kernels_cannot_run(hopper, arrays, message):
    """Is an error if they are named, and takes another form with `auto`; so do blocks."""
    ids = array(*arrays[0].shape[:2], dtype=jnp.int32)
    with pytest.raises(ImplementationError, match=f"mosaic cannot run here: .*{message}.*use auto"):
        jax.eval_shape(named, *arrays)
    assert not kernels_of(partial(both, attention=causal_attention), *arrays, ids)

    def block(implementation, q, k, v, ids):
        options = BlockOptions(1.0, implementation=implementation)
        return attention_block(q, k, v, (ids, ids), None, causal=True, options=options)

    with pytest.raises(ImplementationError, match=message):
        jax.eval_shape(partial(block, "mosaic"), *arrays, ids)
    assert not kernels_of(partial(block, "auto"), *arrays, ids)


def test_dropout_is_not_for_the_kernels(hopper):
    dropping = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}
    with pytest.raises(
        ImplementationError, match="mosaic cannot run here: it applies no attention dropout"
    ):
        jax.eval_shape(partial(named, **dropping), *types())
    auto = partial(causal_attention, **dropping)
    assert not kernels_of(partial(both, attention=auto), *types(), IDS)
    # Nothing is dropped without a key.
    assert kernels_of(partial(named, dropout_rate=0.1), *types())


@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_a_scale_that_is_not_positive_is_not_for_the_kernels(hopper, scale):
    """The largest score would not be the largest scaled one."""
    with pytest.raises(ImplementationError, match=f"a positive number as scale, not {scale}"):
        jax.eval_shape(partial(named, scale=scale), *types())
    auto = partial(causal_attention, scale=scale)
    assert not kernels_of(partial(both, attention=auto), *types(), IDS)


def test_keys_of_another_dtype_are_not_for_the_kernels(hopper):
    q, _, v = types()
    with pytest.raises(ImplementationError, match="computes in bfloat16, not float32"):
        jax.eval_shape(named, q, types(dtype=jnp.float32)[1], v)


def test_other_devices_are_not_for_the_kernels():
    with pytest.raises(ImplementationError, match="for NVIDIA Hopper GPUs and this is 'cpu'"):
        jax.eval_shape(named, *types())
    assert not kernels_of(partial(both, attention=causal_attention), *types(), IDS)
