"""Every schedule through the executor: gradients of a small model equal those of plain autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from mxjax.pipeline.executor import Pipeline
from mxjax.pipeline.schedules import forward_only, make_schedule
from mxjax.pipeline.simulate import Costs
from mxjax.pipeline.ticks import compile_ticks
from mxjax.pipeline.zero_bubble import search_zero_bubble
from tests.pipeline.toy_model import assert_close, parameters, plain, stacks_of, toy_model


def program(toy, table, layers, outer, unrolled, evaluate=False):
    """The executor's program, and its arguments."""
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
    return jax.jit(mapped), (stacked, outer)


def pipelined(toy, table, layers, outer, unrolled):
    """Statistics, and gradients put back into the order of the layers."""
    run, arguments = program(toy, table, layers, outer, unrolled)
    stats, grads, d_outer = run(*arguments)
    where = {kind: table.stacks.places(kind) for kind in toy.kinds}
    first = {"wide": 0, "narrow": toy.num_wide}
    in_order = [None] * len(layers)
    for kind in toy.kinds:
        for row, number in enumerate(where[kind]):
            layer = jax.tree.map(lambda a, row=row: a[row], grads[kind])
            if number < 0:
                assert all(not jnp.any(leaf) for leaf in jax.tree.leaves(layer))
            else:
                in_order[first[kind] + number] = layer
    return stats, (in_order, d_outer)


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
    "zbh1, searched": ("searched", 2, 5, {"max_activations": 4}, [(2, 0), (0, 2)]),
    "zbh1, searched, one microbatch at a time": (
        "searched", 2, 3, {"max_activations": 1}, [(2, 0), (0, 2)],
    ),
    "zbv": ("zbv", 2, 4, {}, [(1, 0), (1, 0), (0, 1), (0, 1)]),
    "dualpipev": ("dualpipev", 2, 4, {}, [(2, 0), (1, 1), (0, 2), (0, 1)]),
    "dualpipev on 8 ranks, three empty places": (
        "dualpipev", 8, 16, {}, [(0, 0), *[(1, 0)] * 4, *[(0, 1)] * 9, (0, 0), (0, 0)],
    ),
}  # fmt: skip


UNROLLED = ("gpipe", "1f1b split", "zbh1", "dualpipev")
"""Which have a straight program for the layers of a stage; the others, and one of these, loop."""


@pytest.mark.parametrize(
    ("case", "unrolled"), [(case, case in UNROLLED) for case in CASES] + [("dualpipev", False)]
)
def test_gradients_equal_those_of_plain_autodiff(case, unrolled):
    name, P, M, options, stage_layers = CASES[case]
    if name == "searched":
        schedule = search_zero_bubble(P, M, Costs(1, 1.3, 1.1), **options)
    else:
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
    run, arguments = program(toy, table, layers, outer, unrolled=False, evaluate=True)
    assert_close(run(*arguments), plain(toy, layers, outer)[0])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zbh1", "zbv", "dualpipev"])
def test_memory_and_program_do_not_grow_with_microbatches_but_for_memory_in_gpipe(name):
    chunks = 2 if name in ("interleaved", "zbv", "dualpipev") else 1
    stage_layers = [(1, 0)] * (4 * chunks)
    layers, outer = parameters(len(stage_layers), 0, width=512)
    temporary, instructions = [], []
    for M in (8, 32):
        schedule = make_schedule(name, 4, M, chunks)
        table = compile_ticks(schedule, stacks_of(schedule, stage_layers))
        run, arguments = program(toy_model(M, 8), table, layers, outer, unrolled=False)
        compiled = run.lower(*arguments).compile({"xla_backend_optimization_level": 0})
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
        instructions.append(compiled.as_text().count(" = "))
    # What does grow is the table, one row a tick.
    assert (temporary[1] > 1.5 * temporary[0]) == (name == "gpipe"), temporary
    assert name == "gpipe" or temporary[1] < 1.1 * temporary[0], temporary
    assert instructions[1] <= 1.01 * instructions[0], instructions
