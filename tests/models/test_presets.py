"""Presets against published numbers, and the configurations made from them."""

import dataclasses
import math
import re
from pathlib import Path

import jax
import pytest

from mxjax.config import load_config
from mxjax.models.presets import PRESETS
from mxjax.models.transformer import Transformer
from mxjax.sharding.mesh import AXES
from mxjax.training.flops import parameter_counts

ROOT = Path(__file__).parents[2]

PUBLISHED_TOTAL = {
    # `total_size` of the checkpoints' safetensors index / bytes per parameter on Hugging Face.
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen3_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "deepseek_v2_lite": 15_706_484_224,
}

PUBLISHED_ACTIVE = {
    # What the number counts, number in billions, source.
    "qwen3_30b_a3b": ("all", 3.3, "model card: 3.3B activated"),
    "qwen3_235b_a22b": ("all", 22, "model card: 22B activated"),
    "mixtral_8x7b": ("all", 12.9, "announcement: 12.9B per token"),
    "mixtral_8x22b": ("all", 39, "announcement: 39B active"),
    "deepseek_v2_lite": ("no embedding", 2.4, "paper, appendix B: 2.4B activated"),
    "deepseek_v3": ("no embedding", 36.6, "README_WEIGHTS.md: 36.6B with 0.9B of the head"),
}


def without_mtp(preset):
    return dataclasses.replace(preset.model, mtp_num_layers=0)


@pytest.mark.parametrize("name", PUBLISHED_TOTAL)
def test_total_is_that_of_the_published_checkpoint(name):
    preset = PRESETS[name]
    assert parameter_counts(preset.model, preset.moe).total == PUBLISHED_TOTAL[name]


def test_deepseek_v3_is_as_published():
    """README_WEIGHTS.md of the repository: 671B, and 11.5B more for multi-token prediction without
    the shared embedding and head, of which 1.5B are active with the head."""
    preset = PRESETS["deepseek_v3"]
    main = parameter_counts(without_mtp(preset), preset.moe)
    ahead = parameter_counts(preset.model, preset.moe)
    assert main.total == pytest.approx(671e9, rel=1e-3)
    assert ahead.total - main.total == pytest.approx(11.5e9, rel=0.01)
    head = preset.model.vocab_size * preset.model.hidden_size
    assert ahead.active - main.active + head == pytest.approx(1.5e9, rel=0.1)


@pytest.mark.parametrize("name", PUBLISHED_ACTIVE)
def test_active_is_as_published(name):
    counted, billions, _ = PUBLISHED_ACTIVE[name]
    preset = PRESETS[name]
    active = parameter_counts(without_mtp(preset), preset.moe).active
    if counted == "no embedding":
        active -= preset.model.vocab_size * preset.model.hidden_size
    assert active == pytest.approx(billions * 1e9, rel=0.025)


@pytest.mark.parametrize("name", PRESETS)
def test_the_model_has_as_many_parameters_as_the_formula_says(name):
    preset = PRESETS[name]
    infos = jax.tree.leaves(Transformer(preset.model, preset.moe).infos)
    total = sum(math.prod(info.shape) for info in infos)
    assert total == parameter_counts(preset.model, preset.moe).total


@pytest.mark.parametrize("name", PRESETS)
def test_its_configuration_is_the_preset_on_the_devices_that_its_comment_says(name):
    """Only the sizes of buffers are the run's own. The rules have passed if it loads."""
    path = ROOT / "configs" / f"{name}.yaml"
    config = load_config(path)
    preset = PRESETS[name]
    assert config.model == preset.model
    buckets = config.moe.capacity_buckets
    assert config.moe == dataclasses.replace(preset.moe, capacity_buckets=buckets)
    devices = math.prod(getattr(config.parallel, axis) for axis in AXES)
    header = " ".join(path.read_text().split("\n")[1:3])
    words = {8: "on eight (H200|GPUs)", 64: "on 64 H200", 1024: "on 1,024 H200"}
    assert re.search(words[devices], header.replace("# ", ""))


@pytest.mark.parametrize("name", PRESETS)
def test_any_usual_tensor_parallel_size_divides_the_vocabulary(name):
    assert PRESETS[name].model.vocab_size % 128 == 0
