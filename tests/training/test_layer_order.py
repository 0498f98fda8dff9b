"""States between the order of the model and the places of pipeline ranks, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mxjax.training.layer_order import LayerOrder
from mxjax.training.pipelined import build_objective
from mxjax.training.state import TrainState

ZERO_1 = {"dp": 2, "zero_stage": 1}
CASES = {
    "V with an empty place": (
        "deepseek", 3, {"pp": 2, "tp": 2, **ZERO_1},
        {"schedule": "dualpipev", "empty_layers": "auto"},
    ),
    # The scales of query and key norms have 6 values, which 4 ranks cannot share.
    "interleaved and uneven": (
        "qwen3", 9, {"pp": 4, "tp": 2}, {"schedule": "interleaved", "layout": "Et|tt|t|t|t||t|ttL"},
    ),
    "uneven on one chunk": ("qwen3", 3, {"pp": 2, **ZERO_1}, {"schedule": "1f1b", "layout": "Et|ttL"}),
}  # fmt: skip


@pytest.fixture(params=CASES)
def objective(request, small_config, mesh_of):
    shape, layers, parallel, pipeline = CASES[request.param]
    config = small_config(
        shape,
        model={"num_layers": layers},
        parallel=parallel,
        pipeline=pipeline,
        training={"num_microbatches": 8, "global_batch_size": 16},
    )
    return build_objective(config, mesh_of(config))


def abstract_state(objective, abstract_params):
    """Parameters, a moment, and a small array of which each rank has all."""
    params = abstract_params(objective)
    everywhere = NamedSharding(objective.mesh, PartitionSpec())

    def whole(shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    factors = {
        kind: {"factor": whole((len(objective.stacks.places(kind)), 3))}
        for kind in objective.stacks.kinds
    }
    return TrainState(
        step=whole((), jnp.int32),
        params=params,
        opt_state={"mu": params, "factors": factors},
        expert_bias=None,
        halted=whole((), bool),
    )


def draw(abstract):
    rng = np.random.default_rng(0)

    def one(leaf):
        if leaf.dtype != jnp.float32:
            return jax.device_put(np.ones(leaf.shape, leaf.dtype), leaf.sharding)
        bits = rng.integers(0, 2**32, leaf.shape, np.uint32)  # NaN and infinity among them
        return jax.device_put(bits.view(np.float32), leaf.sharding)

    return jax.tree.map(one, abstract)


def bits(array):
    return np.asarray(array).view(np.uint8 if array.dtype == bool else np.uint32)


def test_layers_go_to_their_places_and_come_back(objective, abstract_params):
    here = abstract_state(objective, abstract_params)
    order = LayerOrder(objective, here)
    state = draw(order.abstract_state)
    drawn = jax.tree.map(bits, state)
    spread = order.from_model(state)
    for (path, found), expected, like in zip(
        jax.tree_util.tree_leaves_with_path(spread),
        jax.tree.leaves(drawn),
        jax.tree.leaves(here),
        strict=True,
    ):
        assert (found.shape, found.dtype) == (like.shape, like.dtype)
        assert found.sharding.is_equivalent_to(like.sharding, found.ndim)
        names = [getattr(key, "key", None) for key in path]
        kind = next((kind for kind in objective.stacks.kinds if kind in names), None)
        if kind is None:
            np.testing.assert_array_equal(bits(found), expected)
            continue
        for place, layer in enumerate(objective.stacks.places(kind)):
            wanted = expected[layer] if layer >= 0 else 0
            np.testing.assert_array_equal(
                bits(found)[place], np.broadcast_to(wanted, found.shape[1:])
            )
    back = order.to_model(spread)
    for found, expected, like in zip(
        jax.tree.leaves(back),
        jax.tree.leaves(drawn),
        jax.tree.leaves(order.abstract_state),
        strict=True,
    ):
        assert found.sharding.is_equivalent_to(like.sharding, found.ndim)
        np.testing.assert_array_equal(bits(found), expected)
    assert any(leaf.is_deleted() is False for leaf in jax.tree.leaves(spread))


def test_checkpoints_hold_each_layer_once_and_no_rank_all_of_them(objective, abstract_params):
    """In the order of the model arrays have as many rows as the kind has layers, and are cut over
    the pipeline ranks along another dim wherever one divides."""
    here = abstract_state(objective, abstract_params)
    there = LayerOrder(objective, here).abstract_state
    for kind, number in objective.stacks.kinds.items():
        for before, after in zip(
            jax.tree.leaves(here.params[kind]), jax.tree.leaves(there.params[kind]), strict=True
        ):
            assert after.shape == (number, *before.shape[1:])
            local = before.sharding.shard_shape(before.shape)[1:]
            ranks = objective.mesh.shape["pp"]
            held = np.prod(after.sharding.shard_shape(after.shape)[1:])
            divides = any(size % ranks == 0 for size in local)
            if objective.stacks.places(kind).tolist() != list(range(number)):
                assert held == np.prod(local) // (ranks if divides else 1)


def test_the_order_of_the_model_is_left_alone(small_config, mesh_of, abstract_params):
    """With even stages of one chunk nothing moves."""
    config = small_config("llama", parallel={"pp": 2}, training={"num_microbatches": 2})
    objective = build_objective(config, mesh_of(config))
    here = abstract_state(objective, abstract_params)
    order = LayerOrder(objective, here)
    assert jax.tree.leaves(order.abstract_state) == jax.tree.leaves(here)


def test_a_second_save_compiles_nothing(small_config, mesh_of, abstract_params, caplog):
    config = small_config(
        "llama",
        model={"num_layers": 3},
        parallel={"pp": 2},
        pipeline={"layout": "Et|ttL"},
        training={"num_microbatches": 2},
    )
    objective = build_objective(config, mesh_of(config))
    here = abstract_state(objective, abstract_params)
    order, state = LayerOrder(objective, here), draw(here)
    order.to_model(state)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        order.to_model(state)
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
