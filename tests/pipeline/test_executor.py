"""Every schedule through the executor: gradients of a small model equal those of plain autodiff."""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from mxjax.pipeline.executor import Pipeline
from mxjax.pipeline.layout import StageLayout
from mxjax.pipeline.schedules import forward_only, make_schedule
from mxjax.pipeline.stacks import Stacks
from mxjax.pipeline.ticks import compile_ticks

H, T, VOCAB = 8, 6, 11


@dataclass
class Toy:
    """Two kinds of layers with a loss term each; tokens [M, T]."""

    tokens: jax.Array
    num_wide: int
    kinds: tuple[str, ...] = ("wide", "narrow")

    def stream(self):
        return jax.ShapeDtypeStruct((T, H), jnp.float32)

    def context(self, microbatch):
        return self.tokens[microbatch].astype(jnp.float32)[:, None] / VOCAB

    def side(self, kind, ctx, index):
        return ctx, index

    def layer(self, kind, weights, x, side):
        ctx, index = side
        normed = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-3) + 0.1 * index * ctx
        hidden = normed @ weights["up"]
        hidden = jnp.tanh(hidden) if kind == "wide" else jax.nn.silu(hidden)
        y = x + hidden @ weights["down"] * weights["scale"]
        return y, 0.01 * jnp.sum(hidden**2), jnp.sum(hidden)

    def embed(self, outer, microbatch):
        return outer["table"][self.tokens[microbatch]]

    def head(self, outer, x, microbatch):
        logits = jax.nn.log_softmax(x @ outer["table"].T)
        loss = -jnp.mean(jnp.take_along_axis(logits, self.tokens[microbatch][:, None], 1))
        return loss, loss

    def empty_statistics(self):
        return jnp.zeros(()), jnp.zeros((64,))

    def add_layer(self, stats, kind, index, objective, of_layer):
        loss, layers = stats
        return loss + objective, layers.at[index].add(of_layer)

    def add_head(self, stats, microbatch, of_head):
        return stats[0] + of_head, stats[1]

    def reduce(self, kind, grads):
        return grads


def parameters(num_wide, num_narrow):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape, scale=0.4), jnp.float32)

    def layer(width):
        return {"up": normal(H, width), "down": normal(width, H), "scale": normal(H)}

    layers = [layer(12) for _ in range(num_wide)] + [layer(5) for _ in range(num_narrow)]
    return layers, {"table": normal(VOCAB, H)}


def plain(toy, layers, outer):
    """Loss, sums per layer, and gradients, without a pipeline."""

    def objective(layers, outer):
        stats = toy.empty_statistics()
        for m in range(toy.tokens.shape[0]):
            x, ctx = toy.embed(outer, m), toy.context(m)
            for i, weights in enumerate(layers):
                kind = toy.kinds[i >= toy.num_wide]
                x, extra, of_layer = toy.layer(kind, weights, x, toy.side(kind, ctx, i))
                stats = toy.add_layer(stats, kind, i, extra, of_layer)
            stats = toy.add_head(stats, m, toy.head(outer, x, m)[1])
        return stats[0], stats

    (_, stats), grads = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(layers, outer)
    return stats, grads


def pipelined(toy, table, layers, outer, unrolled, evaluate=False):
    """The same through the executor, gradients put back into the order of the layers."""
    P = table.schedule.num_ranks
    where = {kind: table.stacks.places(kind) for kind in toy.kinds}
    first = {"wide": 0, "narrow": toy.num_wide}
    examples = {"wide": layers[0], "narrow": layers[-1]}
    stacked = {}
    for kind in toy.kinds:
        if len(where[kind]):
            empty = jax.tree.map(jnp.zeros_like, examples[kind])
            picked = [empty if n < 0 else layers[first[kind] + n] for n in where[kind]]
            stacked[kind] = jax.tree.map(lambda *a: jnp.stack(a), *picked)
    mesh = Mesh(np.asarray(jax.devices()[:P]), ("pp",))

    def run(stacked, outer):
        weights = stacked
        if unrolled:
            weights = {
                kind: [jax.tree.map(lambda a, i=i: a[i], tree) for i in range(tree["up"].shape[0])]
                for kind, tree in stacked.items()
            }
        pipeline = Pipeline(toy, table, weights, outer)
        if evaluate:
            return jax.lax.psum(pipeline.evaluate(), "pp")
        grads, d_outer, stats = pipeline.train()
        if unrolled:
            grads = {k: jax.tree.map(lambda *a: jnp.stack(a), *g) for k, g in grads.items()}
        return jax.lax.psum(stats, "pp"), grads, jax.lax.psum(d_outer, "pp")

    spec, whole = PartitionSpec("pp"), PartitionSpec()
    out = whole if evaluate else (whole, spec, whole)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(spec, whole), out_specs=out, check_vma=False)
    result = jax.jit(mapped)(stacked, outer)
    if evaluate:
        return result
    stats, grads, d_outer = result
    in_order = [None] * len(layers)
    for kind in toy.kinds:
        for row, number in enumerate(where[kind]):
            layer = jax.tree.map(lambda a, row=row: a[row], grads[kind])
            if number < 0:
                assert all(not jnp.any(leaf) for leaf in jax.tree.leaves(layer))
            else:
                in_order[first[kind] + number] = layer
    return stats, (in_order, d_outer)


def assert_close(found, expected):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        error = np.max(np.abs(np.asarray(a) - np.asarray(b))) / np.max(np.abs(np.asarray(b)))
        assert error < 1e-5, (path, error)


def toy_model(M, num_wide):
    tokens = np.random.default_rng(1).integers(0, VOCAB, (M, T)).astype(np.int32)
    return Toy(jnp.asarray(tokens), num_wide)


def stacks_of(schedule, stage_layers):
    ends = np.cumsum([0, *map(sum, stage_layers)])
    layers = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))
    placement = "v" if schedule.stage_to_rank[-1] == 0 and schedule.num_ranks > 1 else "loop"
    empty = (0,) * schedule.num_stages
    layout = StageLayout(
        schedule.num_ranks, schedule.num_chunks, placement, layers, ((),) * len(layers), empty
    )
    wide, narrow = (sum(counts[k] for counts in stage_layers) for k in range(2))
    return Stacks(layout, {"wide": wide, "narrow": narrow})


CASES = {
    "gpipe": ("gpipe", 2, 4, {}, [(2, 0), (1, 1)]),
    "1f1b": ("1f1b", 4, 6, {}, [(2, 0), (1, 0), (0, 1), (0, 2)]),
    "1f1b with few microbatches": ("1f1b", 4, 2, {}, [(1, 0), (1, 0), (0, 1), (0, 1)]),
    "1f1b split": ("1f1b", 2, 4, {"cells": "split"}, [(1, 1), (0, 2)]),
    "1f1b joint": ("1f1b", 2, 4, {"cells": "joint"}, [(2, 0), (2, 0)]),
    "interleaved": ("interleaved", 2, 4, {"num_chunks": 2}, [(1, 0), (1, 0), (0, 0), (0, 1)]),
    "interleaved joint": (
        "interleaved", 2, 4, {"num_chunks": 2, "cells": "joint"}, [(1, 0), (1, 1), (0, 2), (0, 1)],
    ),
    "zbh1": ("zbh1", 4, 6, {}, [(1, 0), (1, 1), (0, 2), (0, 1)]),
    "zbv": ("zbv", 2, 4, {}, [(1, 0), (1, 0), (0, 1), (0, 1)]),
    "dualpipev": ("dualpipev", 2, 4, {}, [(2, 0), (1, 1), (0, 2), (0, 1)]),
    "dualpipev on 4": ("dualpipev", 4, 9, {}, [(1, 0)] * 3 + [(1, 1)] + [(0, 1)] * 3 + [(0, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("unrolled", [True, False], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_plain_autodiff(case, unrolled):
    name, P, M, options, stage_layers = CASES[case]
    schedule = make_schedule(name, P, M, **options)
    table = compile_ticks(schedule, stacks_of(schedule, stage_layers), deferred=unrolled)
    num_wide = sum(counts[0] for counts in stage_layers)
    layers, outer = parameters(num_wide, sum(counts[1] for counts in stage_layers))
    toy = toy_model(M, num_wide)
    stats, grads = pipelined(toy, table, layers, outer, unrolled)
    expected_stats, expected = plain(toy, layers, outer)
    assert_close(stats, expected_stats)
    assert_close(grads, expected)


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_a_forward_pass_alone_reports_the_same(placement):
    stage_layers = [(1, 0), (1, 1), (0, 1), (0, 2)]
    schedule = forward_only(2, 3, 2, placement)
    table = compile_ticks(schedule, stacks_of(schedule, stage_layers))
    layers, outer = parameters(2, 4)
    toy = toy_model(3, 2)
    stats = pipelined(toy, table, layers, outer, unrolled=False, evaluate=True)
    assert_close(stats, plain(toy, layers, outer)[0])
