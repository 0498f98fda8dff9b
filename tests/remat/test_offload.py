"""Layers whose tensors travel to the host and back beside other layers compute what they did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.kernels.attention import causal_attention, stand_in
from mxjax.remat.layers import LayerPolicy
from mxjax.remat.names import named
from mxjax.remat.offload import Offloading, run_offloading
from mxjax.remat.policy import rematerialise, with_softmax

L, B, H, F = 5, 3, 4, 6
AWAY = LayerPolicy("names", offload=frozenset(["layer_input", "mlp_up"]))


def layer(weights, x, ctx, index, bias_E):
    """With dropout, a side input that is the same for all layers, and results of every kind."""
    x = named(x, "layer_input")
    up = named(x @ weights["up"], "mlp_up")
    kept = jax.random.bernoulli(jax.random.fold_in(ctx["key"], index), 0.8, up.shape)
    act = jnp.where(kept, jnp.sin(up) * jnp.exp(ctx["scale"]), 0)
    aux = {"sum": jnp.sum(act**2), "count": jnp.sum(act > bias_E), "none": None}
    return x + act @ weights["down"], aux


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": 0.3 * jax.random.normal(keys[0], (L, H, F)),
        "down": 0.3 * jax.random.normal(keys[1], (L, F, H)),
    }
    ctx = {"key": keys[2], "scale": jnp.linspace(0, 1, F), "unused": None}
    return params, jax.random.normal(keys[3], (B, H)), ctx, jnp.arange(L), jnp.zeros((L, 1))


def assert_near(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.max(np.abs(expected)))


def with_gradients(run, params, x, *side):
    def loss(params, x):
        y, aux = run(params, x, *side)
        return jnp.sum(y**2) + jnp.sum(aux["sum"] * jnp.arange(1, L + 1)), (y, aux)

    gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return jax.jit(gradient)(params, x)


def test_results_and_gradients_are_those_of_a_plain_scan():
    params, x, *side = arguments()

    def plain(params, x, ctx, indices_L, bias_LE):
        return jax.lax.scan(
            lambda x, inputs: layer(inputs[0], x, ctx, *inputs[1:]), x, (params, indices_L, bias_LE)
        )

    def offloading(params, x, *side):
        keep = rematerialise(layer, AWAY.on_device, gathers_weights=False, in_scan=True)
        return run_offloading(Offloading(keep, AWAY.offload), params, x, *side)

    got, expected = (with_gradients(run, params, x, *side) for run in (offloading, plain))
    jax.tree.map(assert_near, got, expected)
    # As an evaluation runs it.
    jax.tree.map(assert_near, jax.jit(offloading)(params, x, *side), expected[0][1])


@pytest.mark.parametrize("away", [True, False])
def test_attention_out_stands_for_cudnns_results(away):
    """Output and log-sum-exp; here those of the stand-in of plans."""
    x, weights = jnp.zeros((2, 16, 4, 8), jnp.bfloat16), jnp.ones((3, 8), jnp.bfloat16)

    def layer(weights, x, ctx, index, bias_E):
        return x + causal_attention(x * weights, x, x, implementation="cudnn"), None

    policy = LayerPolicy("names", offload=frozenset(["attention_out" if away else "mlp_up"]))
    keep = rematerialise(layer, policy.on_device, gathers_weights=False, in_scan=True)
    run = Offloading(keep, with_softmax(policy.offload))

    def loss(weights):
        y, _ = run_offloading(run, weights, x, None, jnp.arange(3), None)
        return jnp.sum(y.astype(jnp.float32))

    with stand_in():
        text = str(jax.make_jaxpr(jax.grad(loss))(weights))
    sent = {"bf16<host>[2,16,4,8]", "f32<host>[2,4,16]"}
    assert {kind for kind in sent if kind in text} == (sent if away else set())
