"""One step by itself, with gradients given instead of computed: what is kept and what is not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.config.schema import Config, MoEConfig, OptimizerConfig, TrainingConfig
from mxjax.sharding.rules import ParamInfo
from mxjax.training.gradients import BatchStatistics
from mxjax.training.optimizer import build_optimizer, learning_rate
from mxjax.training.state import TrainState
from mxjax.training.step import build_step

BUCKET = 1.5
SHAPES = {"matrix": (3, 4), "norm_scale": (4,)}
CONFIG = Config(
    training=TrainingConfig(num_steps=10, global_batch_size=1),
    moe=MoEConfig(num_experts=2, router_topk=1, expert_bias_update_rate=0.1),
    optimizer=OptimizerConfig(lr=0.1, min_lr=0.01, warmup_steps=2),
)
INFOS = {
    name: ParamInfo(shape, jnp.float32, (None,) * len(shape)) for name, shape in SHAPES.items()
}


class GivenGradients:
    """Stands for an `Objective`: the batch itself says what gradients and loss come out."""

    def loss_and_gradients(self):
        def given(params, expert_bias, batch, key):
            counts_LE = jnp.array([[3.0, 1.0]])
            stats = BatchStatistics(
                loss=batch["loss"],
                router_loss=jnp.zeros(()),
                z_loss=jnp.zeros(()),
                num_targets=jnp.float32(7),
                counts_LE=counts_LE,
                needed_capacity=batch["needed"],
            )
            return batch["grads"], stats

        return given

    def copies(self, params):
        return dict.fromkeys(params)


def make_batch(seed=0, loss=2.0, needed=1.0, **broken):
    rng = np.random.default_rng(seed)
    grads = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    for name, value in broken.items():
        grads[name].flat[0] = value
    return {"grads": grads, "loss": np.float32(loss), "needed": np.float32(needed)}


def make_state(config=CONFIG):
    rng = np.random.default_rng(99)
    dtype = jnp.dtype(config.training.param_dtype)
    params = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=build_optimizer(config.optimizer, INFOS).init(params),
        expert_bias=jnp.zeros((1, 2)),
        halted=jnp.zeros((), bool),
    )


def make_step(config=CONFIG):
    optimizer = build_optimizer(config.optimizer, INFOS)
    step = build_step(config, GivenGradients(), optimizer, BUCKET)
    return jax.jit(lambda state, batch: step(state, batch, dict.fromkeys(SHAPES))[:2])


@pytest.fixture(scope="module")
def step():
    return make_step()


@pytest.fixture
def assert_untouched(bits_of):
    """(state, state before) -> asserts that all that training learns is the same bit for bit."""

    def check(after, before):
        for name in ("params", "opt_state", "expert_bias"):
            pair = (bits_of(getattr(state, name)) for state in (after, before))
            jax.tree.map(np.testing.assert_array_equal, *pair)

    return check


def with_training(**changes):
    return dataclasses.replace(CONFIG, training=dataclasses.replace(CONFIG.training, **changes))


def numpy_adamw(params, batches, config, num_steps):
    """Plain AdamW (Loshchilov & Hutter) with clipping by the global norm; yields the norms too."""
    optimizer = config.optimizer
    rate = learning_rate(optimizer, num_steps)
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    v = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    norms = []
    for t, batch in enumerate(batches, start=1):
        grads = {name: grad.astype(np.float64) for name, grad in batch["grads"].items()}
        norms.append(np.sqrt(sum(np.sum(grad**2) for grad in grads.values())))
        scale = min(1.0, optimizer.clip_grad / norms[-1])
        for name, grad in grads.items():
            grad = grad * scale
            m[name] = optimizer.beta1 * m[name] + (1 - optimizer.beta1) * grad
            v[name] = optimizer.beta2 * v[name] + (1 - optimizer.beta2) * grad**2
            m_hat = m[name] / (1 - optimizer.beta1**t)
            v_hat = v[name] / (1 - optimizer.beta2**t)
            decay = 0.0 if "norm" in name else optimizer.weight_decay
            update = m_hat / (np.sqrt(v_hat) + optimizer.eps) + decay * params[name]
            params[name] = params[name] - float(rate(t - 1)) * update
    return params, norms


@pytest.mark.parametrize("clip", [0.5, 100.0], ids=["clipped", "not_clipped"])
def test_three_steps_of_adamw_are_those_of_plain_numpy(clip):
    optimizer = dataclasses.replace(CONFIG.optimizer, clip_grad=clip, weight_decay=0.3)
    config = dataclasses.replace(CONFIG, optimizer=optimizer)
    step, state = make_step(config), make_state(config)
    batches = [make_batch(seed) for seed in range(3)]
    expected, norms = numpy_adamw(state.params, batches, config, num_steps=10)
    for batch, norm in zip(batches, norms, strict=True):
        state, result = step(state, batch)
        np.testing.assert_allclose(result.grad_norm, norm, rtol=1e-6)
    for name, value in expected.items():
        np.testing.assert_allclose(state.params[name], value, rtol=1e-5)
    assert int(state.step) == 3


def test_a_step_that_fits_applies_everything_and_reports(step):
    before = make_state()
    after, result = step(before, make_batch(needed=BUCKET))
    assert (int(after.step), bool(after.halted)) == (1, False)
    assert np.all(after.params["matrix"] != before.params["matrix"])
    # The busier expert's bias goes down by the rate, the other's up.
    np.testing.assert_allclose(after.expert_bias, [[-0.1, 0.1]])
    assert (float(result.loss), float(result.num_targets)) == (2.0, 7.0)
    np.testing.assert_allclose(result.learning_rate, 0.05)  # half way through two warm-up steps
    np.testing.assert_allclose(result.expert_load, 1.5)
    assert not result.overflow
    assert result.finite


def test_an_overflow_leaves_the_state_alone_and_halts_the_steps_behind_it(step, assert_untouched):
    before, _ = step(make_state(), make_batch())
    rejected, result = step(before, make_batch(1, needed=1.6))
    assert result.overflow
    assert_untouched(rejected, before)
    assert (int(rejected.step), bool(rejected.halted)) == (1, True)

    behind, result = step(rejected, make_batch(2))
    assert not result.overflow
    assert_untouched(behind, before)
    assert (int(behind.step), bool(behind.halted)) == (1, True)

    # Once the loop has cleared the flag, the state goes on as if nothing had been.
    cleared = dataclasses.replace(behind, halted=jnp.zeros((), bool))
    again, _ = step(cleared, make_batch(1))
    straight, _ = step(before, make_batch(1))
    assert_untouched(again, straight)
    assert int(again.step) == 2


BROKEN = {
    "loss": {"loss": np.nan},
    "infinite loss": {"loss": np.inf},
    "gradient": {"norm_scale": np.nan},
    "infinite gradient": {"matrix": -np.inf},
    "overflowing norm": {"matrix": 3e38},
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_stop_leaves_the_state_alone_and_halts(step, assert_untouched, broken):
    before, _ = step(make_state(), make_batch())
    after, result = step(before, make_batch(1, **broken))
    assert not result.finite
    assert not result.overflow
    assert_untouched(after, before)
    assert (int(after.step), bool(after.halted)) == (1, True)


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_skip_leaves_everything_but_the_step_count_alone(assert_untouched, broken):
    step = make_step(with_training(nonfinite="skip"))
    before, _ = step(make_state(), make_batch())
    after, result = step(before, make_batch(1, **broken))
    assert not result.finite
    assert_untouched(after, before)
    assert (int(after.step), bool(after.halted)) == (2, False)
    onward, result = step(after, make_batch(2))
    assert result.finite
    assert np.all(onward.params["matrix"] != before.params["matrix"])


def test_an_overflow_with_a_loss_that_is_not_finite_is_skipped_not_repeated(assert_untouched):
    """NaN scores send every token to the same experts: a larger bucket cannot help."""
    step = make_step(with_training(nonfinite="skip"))
    before = make_state()
    after, result = step(before, make_batch(loss=np.nan, needed=9.0))
    assert not result.overflow
    assert_untouched(after, before)
    assert (int(after.step), bool(after.halted)) == (1, False)


def test_bf16_master_weights_are_updated_in_fp32_and_rounded_once():
    config = with_training(param_dtype="bfloat16")
    before = make_state(config)
    after, _ = make_step(config)(before, make_batch())
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype("bfloat16")}
    moments = [leaf for leaf in jax.tree.leaves(after.opt_state) if leaf.ndim]
    assert {leaf.dtype for leaf in moments} == {jnp.dtype("bfloat16")}
    exact, _ = numpy_adamw(before.params, [make_batch()], config, num_steps=10)
    for name, value in exact.items():
        rounded = np.asarray(jnp.asarray(value, jnp.bfloat16), np.float32)
        one_ulp = np.abs(rounded) * 2.0**-7
        assert np.all(np.abs(np.asarray(after.params[name], np.float32) - rounded) <= one_ulp)
