"""Moments in bf16, and the copy of the weights in bf16 that each step leaves for the next."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mxjax.ckpt.store import CheckpointStore
from mxjax.config.schema import CheckpointConfig, OptimizerConfig
from mxjax.kernels.random_bits import round_stochastically
from mxjax.sharding.rules import ParamInfo
from mxjax.training.optimizer import build_optimizer, update_moments
from mxjax.training.programs import Programs

NUM_STEPS, SAVED = 20, 7


@pytest.fixture(scope="module")
def programs_with(small_config, mesh_of):
    """Dtype of the moments -> programs of a small model on one device."""

    def build(dtype):
        sizes = {"num_layers": 1, "num_query_groups": 8}
        training = {"num_steps": NUM_STEPS, "compute_dtype": "bfloat16"}
        config = small_config("llama", model=sizes, training=training)
        optimizer = OptimizerConfig(lr=1e-2, warmup_steps=3, moments_dtype=dtype)
        config = dataclasses.replace(config, optimizer=optimizer)
        return Programs(config, mesh_of(config))

    return build


def test_learning_is_that_of_fp32_moments_and_goes_on_bit_for_bit(
    tmp_path, programs_with, packed_batch, bits_of
):
    """With half the bytes, over a checkpoint."""
    store = CheckpointStore(tmp_path, CheckpointConfig(save_interval=1, async_save=False))

    def train(programs, state, saved_after=None):
        step = programs.step(math.inf)
        batch = jax.device_put(packed_batch(programs.config), programs.batch_sharding)
        losses = []
        while int(state.step) < NUM_STEPS:
            state, result = step(state, batch)
            losses.append(float(result.loss))
            if int(state.step) == saved_after:
                store.save(saved_after, state, {})
        return state, np.array(losses)

    programs = programs_with("bfloat16")
    whole, losses = train(programs, programs.create_state(), SAVED)
    resumed, later = train(programs, store.restore(programs.abstract_state)[0])
    np.testing.assert_array_equal(later, losses[SAVED:])
    jax.tree.map(np.testing.assert_array_equal, bits_of(resumed), bits_of(whole))

    fp32 = programs_with("float32")
    exact, expected = train(fp32, fp32.create_state())
    np.testing.assert_allclose(losses, expected, rtol=5e-3)
    assert expected[-1] < expected[0] - 1
    assert not np.array_equal(losses, expected)
    halves, wholes = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
        for state in (whole, exact)
    )
    assert 2 * halves == wholes


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_moments_fall_without_gradient_as_fast_as_in_fp32(beta2):
    """Rounded to the nearest, a second moment would stay at 1 with `beta2` 0.999."""
    config = OptimizerConfig(beta2=beta2, moments_dtype="bfloat16")
    optimizer, num_steps = build_optimizer(config, {}), 300
    params = {"w": jnp.ones((64, 64))}
    state = jax.tree.map(
        lambda leaf: jnp.ones_like(leaf) if leaf.ndim else leaf, optimizer.init(params)
    )

    def one(state, step):
        return update_moments(optimizer, {"w": jnp.zeros((64, 64))}, state, params, step)[1], None

    state, _ = jax.lax.scan(one, state, jnp.arange(num_steps))
    (adam, _), _ = state
    assert adam.nu["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(jnp.mean(adam.nu["w"], dtype=jnp.float32), beta2**300, rtol=0.02)
    np.testing.assert_allclose(jnp.mean(adam.mu["w"], dtype=jnp.float32), 0.9**300, rtol=0.2)


def test_rounding_has_the_right_mean_and_is_the_same_however_an_array_is_split():
    x = jnp.linspace(-3, 3, 4096 * 8).reshape(8, 32, 128)
    words = jnp.uint32(5), jnp.uint32(7)
    rounded = jax.jit(round_stochastically)(x, *words)
    exact = rounded.astype(jnp.float32)
    assert jnp.all(jnp.abs(exact - x) <= jnp.abs(x) * 2**-7)
    assert abs(float(jnp.mean((exact - x) / x))) < 5e-5  # a standard error of 1e-5
    np.testing.assert_array_equal(round_stochastically(exact, *words), rounded)

    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", None, "b")))
    np.testing.assert_array_equal(jax.jit(round_stochastically)(split, *words), rounded)


def test_of_the_state_only_moments_are_in_bf16():
    """Muon keeps the coefficients of its iteration there, too."""
    params = {"dense_layers": {"up": jnp.ones((4, 4))}, "head": {"norm": jnp.ones(4)}}
    infos = {
        "dense_layers": {"up": ParamInfo((4, 4), jnp.float32, ("hidden", "ffn"))},
        "head": {"norm": ParamInfo((4,), jnp.float32, ("hidden",))},
    }
    for name in ("adamw", "sgd", "muon"):
        config = OptimizerConfig(name=name, moments_dtype="bfloat16")
        state = build_optimizer(config, infos).init(params)
        by_dtype = {jnp.bfloat16: set(), jnp.float32: set()}
        for leaf in jax.tree.leaves(state):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                by_dtype[leaf.dtype.type].add(leaf.shape)
        assert by_dtype[jnp.bfloat16] == {(4, 4), (4,)}, name
        assert by_dtype[jnp.float32] <= {(3,)}, name
