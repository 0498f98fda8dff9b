"""The executor with one program per cell: the gradients are those of plain autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mxjax.pipeline.schedules import make_schedule
from mxjax.pipeline.stagewise import Stagewise
from tests.pipeline.toy_model import Toy, assert_close, parameters, plain, stacks_of, toy_model


@pytest.mark.parametrize(
    ("name", "stage_layers"),
    [("zbh1", [(1, 1), (0, 2)]), ("dualpipev", [(1, 0), (1, 0), (0, 1), (0, 0)])],
)
def test_gradients_equal_those_of_plain_autodiff(name, stage_layers):
    P, M = 2, 4
    schedule = make_schedule(name, P, M)
    stacks = stacks_of(schedule, stage_layers)
    num_wide = sum(counts[0] for counts in stage_layers)
    layers, outer = parameters(num_wide, sum(counts[1] for counts in stage_layers))
    toy = toy_model(M, num_wide)
    mesh = Mesh(np.asarray(jax.devices()[:P]), ("pp",))
    sharding = NamedSharding(mesh, PartitionSpec(("pp",)))

    def put(tree):
        return jax.device_put(tree, sharding)

    numbers = {  # [rank, place] of layers in the model, -1: none
        "wide": stacks.places("wide").reshape(P, -1),
        "narrow": stacks.places("narrow").reshape(P, -1),
    }
    numbers["narrow"] = np.where(numbers["narrow"] < 0, -1, numbers["narrow"] + num_wide)
    held = {}
    for kind, example in (("wide", layers[0]), ("narrow", layers[-1])):
        zeros = jax.tree.map(jnp.zeros_like, example)
        held[kind] = [
            put(
                jax.tree.map(
                    lambda *a: jnp.stack(a), *[layers[n] if n >= 0 else zeros for n in row]
                )
            )
            for row in numbers[kind].T
        ]
    copies = [put(jax.tree.map(lambda a: jnp.stack([a] * P), t)) for t in (toy.tokens, outer)]
    run = Stagewise(lambda tokens: Toy(tokens, num_wide), schedule, stacks, mesh)
    grads, d_outer, stats = run.train(copies[0], held, copies[1])

    expected_stats, (expected, expected_outer) = plain(toy, layers, outer)
    assert_close(jax.tree.map(lambda a: a.sum(0), stats), expected_stats)
    assert_close(jax.tree.map(lambda a: a.sum(0), d_outer), expected_outer)
    for kind, table in numbers.items():
        for (rank, place), n in np.ndenumerate(table):
            found = jax.tree.map(lambda a, rank=rank: a[rank], grads[kind][place])
            if n >= 0:
                assert_close(found, expected[n])
            else:
                assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(found))
