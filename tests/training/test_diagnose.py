"""NaN and infinity: where they come from, and what the loop does about them."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.config.schema import ModelConfig, MoEConfig
from mxjax.models.transformer import Transformer
from mxjax.training.diagnose import NonFiniteError, where_nonfinite

MODEL = ModelConfig(num_layers=3, hidden_size=8, num_attention_heads=2, vocab_size=16)
EXPERTS = MoEConfig(num_experts=2, router_topk=2, first_k_dense=1)


@pytest.fixture(scope="module")
def stub():
    """Programs of a model with a dense layer 0 and MoE layers 1 and 2, whose results are given."""
    model = Transformer(MODEL, EXPERTS)

    def make(loss=1.0, finite=((True,), (True, True)), grads=None):
        statistics = SimpleNamespace(loss=np.float32(loss))
        groups = {
            name: np.array(flags) for name, flags in zip(model.layer_groups, finite, strict=True)
        }
        objective = SimpleNamespace(
            model=model, loss_and_gradients=lambda: lambda *_: (grads, None)
        )
        return SimpleNamespace(
            objective=objective,
            config=SimpleNamespace(training=SimpleNamespace(seed=0)),
            evaluation=lambda bucket: lambda *_: (statistics, groups),
            replicated=None,
        )

    return make


def filled(places, value):
    """Parameters of the model: ones, with `value` at the first entry of some (path, layer)."""
    params = jax.tree.map(
        lambda info: np.ones(info.shape, np.float32), Transformer(MODEL, EXPERTS).infos
    )
    for path, layer in places:
        leaf = params
        for name in path.split("."):
            leaf = leaf[name]
        (leaf if layer is None else leaf[layer]).flat[0] = value
    return params


def state_of(params):
    return SimpleNamespace(params=params, expert_bias=None, step=jnp.int32(4))


GOOD = state_of(filled([], 0))


def test_a_broken_parameter_is_named_first_with_its_layer_in_the_model(stub):
    places = [("head.weight", None), ("moe_layers.mlp.router.weight", 1)]
    state = state_of(filled(places, np.nan))
    place = where_nonfinite(stub(loss=np.nan), 1.0, state, {})
    assert place == "parameter moe_layers.mlp.router.weight of layer 2"


def test_the_first_layer_with_a_broken_output_is_named(stub):
    programs = stub(loss=np.nan, finite=((True,), (False, False)))
    assert where_nonfinite(programs, 1.0, GOOD, {}) == "output of layer 1"


def test_a_broken_loss_behind_good_layers_is_the_heads(stub):
    assert where_nonfinite(stub(loss=np.inf), 1.0, GOOD, {}) == "the head or the loss"


@pytest.mark.parametrize(
    ("places", "named"),
    [
        # The backward pass meets the head first, then the layers from the last to the first.
        ([("head.weight", None), ("moe_layers.mlp.router.weight", 1)], "head.weight"),
        (
            [("dense_layers.mlp.up", 0), ("moe_layers.attention.q", 0)],
            "moe_layers.attention.q of layer 1",
        ),
        ([("embedding.weight", None)], "embedding.weight"),
    ],
)
def test_the_first_gradient_of_the_backward_pass_is_named(stub, places, named):
    programs = stub(grads=filled(places, -np.inf))
    assert where_nonfinite(programs, 1.0, GOOD, {}) == f"gradient of {named}"


def test_finite_gradients_whose_squares_overflow_are_told_apart(stub):
    programs = stub(grads=filled([("embedding.weight", None)], 1e30))
    assert "their squares add up to infinity" in where_nonfinite(programs, 1.0, GOOD, {})


def test_what_does_not_come_again_is_called_not_reproducible(stub):
    programs = stub(grads=filled([], 0))
    assert "not reproducible" in where_nonfinite(programs, 1.0, GOOD, {})


# Runs with a real model.


@pytest.fixture(scope="module")
def text_with_one_bell(tmp_path_factory):
    """Overrides: text in which the byte 7 occurs in the samples of step 3 and nowhere else."""
    path = tmp_path_factory.mktemp("bell") / "text.txt"
    text = bytearray(b"0123456789abcdef" * 160)
    text[2 * 256 + 40] = 7
    path.write_bytes(text)
    return (
        "data.source=text",
        f"data.paths=[{path}]",
        "data.shuffle=false",
        "data.validation_fraction=0",
    )


def replace_params(trainer, path, function):
    """Change one parameter of a trainer that has not begun."""
    params = jax.device_get(trainer.state.params)
    part, *inner, name = path.split(".")
    tree = params[part]
    for word in inner:
        tree = tree[word]
    tree[name] = function(tree[name].copy())
    params = jax.device_put(params, trainer.programs.shardings.params)
    trainer.state = dataclasses.replace(trainer.state, params=params)


def poison(value, *index):
    def change(array):
        array[index] = value
        return array

    return change


@pytest.mark.parametrize(
    ("path", "change", "place"),
    [
        (
            "dense_layers.attention.q",
            poison(np.nan, 1, 0),
            "parameter dense_layers.attention.q of layer 1",
        ),
        ("dense_layers.mlp.up", poison(1e30, 1), "output of layer 1"),
        ("head.weight", poison(3e38), "the head or the loss"),
    ],
)
def test_stop_names_step_and_place_and_keeps_the_state(
    tmp_path, make_trainer, sums, bits_of, path, change, place
):
    trainer = make_trainer(tmp_path, *sums, "checkpoint.save_interval=5")
    replace_params(trainer, path, change)
    before = bits_of(trainer.state)
    with pytest.raises(NonFiniteError) as error:
        trainer.run()
    message = str(error.value)
    assert message.startswith("step 1: loss ")
    assert f"not finite: {place}. The state before this step is good" in message
    after = dataclasses.replace(bits_of(trainer.state), halted=before.halted)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert trainer.store.steps() == []
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_skip_counts_and_goes_on(tmp_path, make_trainer, text_with_one_bell, metrics_of, capsys):
    trainer = make_trainer(
        tmp_path, *text_with_one_bell, "training.nonfinite=skip", "data.num_epochs=1"
    )
    replace_params(trainer, "embedding.weight", poison(np.nan, 7))
    trainer.run()
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [line["loss"] is None for line in lines] == [False, False, True] + [False] * 7
    assert [line["skipped_steps"] for line in lines] == [0, 0] + [1] * 8
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert int(trainer.state.step) == 10
    assert "step 3: loss nan, gradient norm nan: update skipped" in capsys.readouterr().out


def test_skip_gives_up_after_too_many_in_a_row(
    tmp_path, make_trainer, text_with_one_bell, metrics_of
):
    settings = ("training.nonfinite=skip", "training.max_skipped_steps=2")
    trainer = make_trainer(tmp_path, *text_with_one_bell, *settings)
    replace_params(trainer, "embedding.weight", poison(np.nan))
    with pytest.raises(
        NonFiniteError, match=r"step 3: .* after 2 skipped steps in a row.* parameter embedding"
    ):
        trainer.run()
    assert [line["skipped_steps"] for line in metrics_of(tmp_path)] == [1, 2]
