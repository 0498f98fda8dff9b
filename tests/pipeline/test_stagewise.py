"""The executor with one program per cell: the gradients are those of plain autodiff."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mxjax.pipeline.schedules import make_schedule
from mxjax.pipeline.stagewise import Stagewise, _Program
from tests.pipeline.toy_model import Toy, assert_close, parameters, plain, stacks_of, toy_model


def arguments(toy, stacks, layers, outer):
    """The model's inputs, weights by place, and other weights, on each rank."""
    P = stacks.layout.num_ranks
    mesh = Mesh(np.asarray(jax.devices()[:P]), ("pp",))
    sharding = NamedSharding(mesh, PartitionSpec(("pp",)))
    held = {}
    for kind, row in numbers_of(toy, stacks).items():
        example = layers[0 if kind == "wide" else -1]
        zeros = jax.tree.map(jnp.zeros_like, example)
        places = [[layers[n] if n >= 0 else zeros for n in ranks] for ranks in row.T]
        held[kind] = [jax.tree.map(lambda *a: jnp.stack(a), *place) for place in places]
    copies = [jax.tree.map(lambda a: jnp.stack([a] * P), tree) for tree in (toy.tokens, outer)]
    return mesh, jax.device_put((copies[0], held, copies[1]), sharding)


def numbers_of(toy, stacks):
    """Kind -> [rank, place] of the numbers of layers in the model, -1: none."""
    P = stacks.layout.num_ranks
    wide, narrow = (stacks.places(kind).reshape(P, -1) for kind in toy.kinds)
    return {"wide": wide, "narrow": np.where(narrow < 0, -1, narrow + toy.num_wide)}


class Watched(Stagewise):
    """`left`: kind of layer, number of columns and memory of what has been between programs, all
    of which a CPU has computed before the next program."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.left = set()

    def _run(self, run, rank, cell, streams):
        super()._run(run, rank, cell, streams)
        for of_stage in (*run.residuals.values(), *run.kept.values()):
            for layer, values in of_stage.items():
                for value in values:
                    assert value.is_ready()
                    memory = value.sharding.memory_kind
                    self.left.add((layer.partition("/")[0], value.shape[-1], memory))


@pytest.mark.parametrize(
    ("name", "stage_layers"),
    [("zbh1", [(1, 1), (0, 2)]), ("dualpipev", [(1, 0), (1, 0), (0, 1), (0, 0)])],
)
def test_gradients_equal_those_of_plain_autodiff(name, stage_layers):
    """With wide layers that offload. What they leave is in the host's memory between programs: B
    and W are given it there."""
    schedule = make_schedule(name, 2, 4)
    stacks = stacks_of(schedule, stage_layers)
    num_wide = sum(counts[0] for counts in stage_layers)
    layers, outer = parameters(num_wide, sum(counts[1] for counts in stage_layers))
    toy = toy_model(4, num_wide)
    mesh, given = arguments(toy, stacks, layers, outer)
    run = Watched(lambda t: Toy(t, num_wide, offload=("hidden",)), schedule, stacks, mesh)
    grads, d_outer, stats = run.train(*given)
    hidden = {entry for entry in run.left if entry[1] == 12}
    assert hidden == {("wide", 12, "pinned_host")}
    assert {memory for _, _, memory in run.left - hidden} == {"device"}

    expected_stats, (expected, expected_outer) = plain(toy, layers, outer)
    assert_close(jax.tree.map(lambda a: a.sum(0), stats), expected_stats)
    assert_close(jax.tree.map(lambda a: a.sum(0), d_outer), expected_outer)
    for kind, table in numbers_of(toy, stacks).items():
        for (rank, place), n in np.ndenumerate(table):
            found = jax.tree.map(lambda a, rank=rank: a[rank], grads[kind][place])
            if n >= 0:
                assert_close(found, expected[n])
            else:
                assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(found))


def test_an_error_of_one_stage_ends_the_step():
    """The other ranks wait for its results."""

    class Broken(Toy):
        def head(self, outer, x, microbatch):
            raise RuntimeError("no head")

    schedule = make_schedule("1f1b", 2, 2)
    stacks = stacks_of(schedule, [(1, 0), (1, 0)])
    layers, outer = parameters(2, 0)
    mesh, given = arguments(toy_model(2, 2), stacks, layers, outer)
    run = Stagewise(lambda tokens: Broken(tokens, 2), schedule, stacks, mesh)
    with pytest.raises(RuntimeError, match="no head"):
        run.train(*given)


def test_first_runs_are_not_at_the_same_time():
    """Later ones may be."""
    lock, running, most = Lock(), [], {"first": 0, "later": 0}

    def program(n):
        calls = []

        def run(x):
            phase = "later" if calls else "first"
            calls.append(x)
            running.append(n)
            time.sleep(0.05)
            most[phase] = max(most[phase], len(running))
            running.remove(n)
            return x

        lowered = SimpleNamespace(compile=lambda: run)
        return _Program(SimpleNamespace(lower=lambda x: lowered), lock)

    programs = [program(n) for n in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            assert list(threads.map(lambda p: p(7), programs)) == [7, 7, 7]
    assert most["first"] == 1
    assert most["later"] > 1
