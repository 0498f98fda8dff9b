"""The benchmark's models are those that its peers were measured on."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from mxjax.config import load_config
from mxjax.training.flops import model_flops_per_token


@pytest.fixture(scope="module")
def variants():
    """`benchmarks/variants.py` as a module."""
    path = Path(__file__).parents[1] / "benchmarks" / "variants.py"
    spec = importlib.util.spec_from_file_location("variants", path)
    module = sys.modules["variants"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["variants"]


@pytest.mark.parametrize(
    "model", ["llama8L", "dslite8L", "dsv3w3L", "llama70b4L", "tiny", "tiny-moe"]
)
def test_flops_per_token_are_those_of_the_peers_figures(variants, model, tmp_path):
    """Their TFLOP/s over their tokens/s, both rounded."""
    benchmark = variants.BENCHMARKS[model]
    (tmp_path / "config.yaml").write_text(json.dumps(benchmark.config))
    for variant in benchmark.variants.split(","):
        overrides = variants.overrides_of(model, variant)
        config = load_config(tmp_path / "config.yaml", overrides, lambda _: 1)
        flops = model_flops_per_token(config.model, config.moe, config.training.seq_length)
        for peer in benchmark.peers:
            assert peer.tokens_per_second * flops / 1e12 == pytest.approx(peer.tflops, rel=5e-3)


def test_an_unknown_word_of_a_variant_is_named(variants):
    with pytest.raises(ValueError, match="'fast' in a variant is none of unrolled, scan"):
        variants.overrides_of("llama8L", "unrolled-fast")
