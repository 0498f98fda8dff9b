"""The benchmark's models are those that its peers were measured on."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from mxjax.config import load_config
from mxjax.training.flops import model_flops_per_token


@pytest.fixture(scope="module")
def train_step():
    """`benchmarks/train_step.py` as a module."""
    path = Path(__file__).parents[1] / "benchmarks" / "train_step.py"
    spec = importlib.util.spec_from_file_location("train_step", path)
    module = sys.modules["train_step"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_step"]


@pytest.mark.parametrize("model", ["llama8L", "dslite8L", "tiny", "tiny-moe"])
def test_flops_per_token_are_those_of_the_peers_figures(train_step, model, tmp_path):
    """Their TFLOP/s over their tokens/s, both rounded."""
    benchmark = train_step.BENCHMARKS[model]
    (tmp_path / "config.yaml").write_text(json.dumps(benchmark.config))
    for variant in benchmark.variants.split(","):
        overrides = train_step.overrides_of(model, variant)
        config = load_config(tmp_path / "config.yaml", overrides, lambda _: 1)
        flops = model_flops_per_token(config.model, config.moe, config.training.seq_length)
        for peer in benchmark.peers:
            assert peer.tokens_per_second * flops / 1e12 == pytest.approx(peer.tflops, rel=5e-3)


def test_an_unknown_word_of_a_variant_is_named(train_step):
    with pytest.raises(ValueError, match="'fast' is none of unrolled, scan"):
        train_step.overrides_of("llama8L", "unrolled-fast")
