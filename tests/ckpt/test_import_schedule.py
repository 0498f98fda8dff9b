"""Learning rates of runs that go on in mxjax after Megatron, and the other way round."""

import math

import pytest

from mxjax.ckpt.megatron.arguments import from_arguments
from mxjax.ckpt.megatron.grid import Grid
from mxjax.ckpt.megatron.optimizer_state import AdamState
from mxjax.ckpt.megatron.to_arguments import Saved, to_arguments
from mxjax.config import load_settings
from mxjax.training.optimizer import learning_rate


def megatron_rate(step, style, warmup, decay, wsd=None):
    """megatron-core's `OptimizerParamScheduler.get_lr` with rates from 1 to 0.1, in steps."""
    if warmup and step <= warmup:
        return step / warmup
    if style == "constant":
        return 1.0
    if step > decay:
        return 0.1
    ratio = (step - warmup) / (decay - warmup)
    if style == "WSD":
        ratio = max(0, step - decay + wsd) / wsd
    fall = 0.5 * (math.cos(math.pi * ratio) + 1) if style == "cosine" else 1 - ratio
    return 0.1 + 0.9 * fall


ARGUMENTS = {
    "num_layers": 1,
    "hidden_size": 8,
    "ffn_hidden_size": 8,
    "num_attention_heads": 2,
    "untie_embeddings_and_output_weights": True,
    "normalization": "RMSNorm",
    "swiglu": True,
    "global_batch_size": 4,
    "position_embedding_type": "rope",
    "norm_epsilon": 1e-5,
    "lr": 1.0,
    "min_lr": 0.1,
    "train_iters": 40,
}


@pytest.mark.parametrize(
    ("style", "warmup", "decay", "wsd", "lead", "off"),
    [
        ("cosine", 0, 40, None, 0, 0),
        ("cosine", 5, 30, None, 0, 0),
        ("cosine", 5, 30, None, 3, 0),  # the scheduler has seen three steps more than the run
        ("constant", 5, 40, None, 0, 0),
        ("WSD", 5, 40, 10, 0, 1),
        ("linear", 5, 40, None, 0, 1),
    ],
)
@pytest.mark.parametrize("with_state", [True, False])
def test_rates_are_those_of_megatron(style, warmup, decay, wsd, lead, off, with_state):
    """After the warm-up, up to `off` steps."""
    names = {"lr_decay_style": style, "lr_warmup_iters": warmup, "lr_decay_iters": decay}
    state = None
    if with_state:
        state = {
            "max_lr": 1.0,
            "min_lr": 0.1,
            "lr_decay_style": style,
            "num_steps": (12 + lead) * 4,
        }
        state |= {"lr_warmup_steps": warmup * 4, "lr_decay_steps": decay * 4}
        names = {"lr_decay_style": "cosine", "lr_warmup_iters": 1}  # not what the run did
    names |= {"lr_wsd_decay_iters": wsd}
    found = from_arguments(ARGUMENTS | names, 32, state, 12)
    assert (found.assumed, found.not_mapped) == ({}, {})
    config = load_settings(found.settings, "arguments")
    rate = learning_rate(config.optimizer, config.training.num_steps)
    lead = lead if with_state else 0
    for step in range(12, 39):
        theirs = megatron_rate(step + lead, style, warmup, decay, wsd)
        after = megatron_rate(step + lead + off, style, warmup, decay, wsd)
        assert after - 1e-6 <= float(rate(step)) <= theirs + 1e-6


@pytest.mark.parametrize(
    ("schedule", "warmup", "decay"),
    [
        ("cosine", 0, None),
        ("cosine", 5, 30),
        ("cosine", 20, None),
        ("wsd", 5, 10),
        ("wsd", 0, 40),
        ("constant", 0, None),
        ("constant", 15, None),
    ],
)
def test_an_exported_schedule_goes_on_in_megatron_and_comes_back(schedule, warmup, decay):
    """Rate by rate, also within the warm-up."""
    settings = from_arguments(ARGUMENTS, 32).settings
    settings["optimizer"] = {"schedule": schedule, "warmup_steps": warmup, "decay_steps": decay}
    settings["optimizer"] |= {"lr": 1.0} | ({} if schedule == "constant" else {"min_lr": 0.1})
    config = load_settings(settings, "test")
    scheduler = AdamState(config, 12, 12).scheduler()
    saved = Saved(12, 48, 32, 1, "float32", "local", "torch", optimizer=True, expert_bias=False)
    arguments = to_arguments(config, Grid(), saved)
    back = from_arguments(arguments, 32, scheduler, 12)
    assert load_settings(back.settings, "back").optimizer == config.optimizer
    steps = [scheduler[f"lr_{name}_steps"] / 4 for name in ("warmup", "decay")]
    rate = learning_rate(config.optimizer, 40)
    for step in range(12, 40):
        samples = scheduler["num_steps"] + 4 * (step - 12)
        theirs = megatron_rate(
            samples / 4, scheduler["lr_decay_style"], *steps, arguments["lr_wsd_decay_iters"]
        )
        assert float(rate(step)) == pytest.approx(theirs, abs=1e-6)


def test_batches_samples_and_decay_are_taken_over():
    names = {"train_iters": None, "train_samples": 400, "lr_warmup_samples": 20}
    state = {"start_wd": 0.0, "end_wd": 0.2, "num_steps": 48}
    found = from_arguments(ARGUMENTS | names, 32, state, 12)
    assert found.settings["training"]["num_steps"] == 100
    assert found.settings["optimizer"]["warmup_steps"] == 6
    assert found.settings["optimizer"]["weight_decay"] == 0.2
    assert found.assumed == {"weight decay from 0.0 to 0.2": "always 0.2"}
