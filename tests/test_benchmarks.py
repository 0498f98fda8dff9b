"""The benchmarks' models are those that peers were measured on; what profiles are read as."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mxjax.config import load_config
from mxjax.training.flops import model_flops_per_token

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(name):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def variants():
    """`benchmarks/variants.py`."""
    yield load("variants")
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


def test_a_profile_says_what_the_runs_of_each_program_took(monkeypatch):
    """Two runs of F0 (kernels of 3 and 2 us, 1 us apart) around one of B0, and a copy."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    profile = load("pipeline_profile")

    def event(start, end, name, **stats):
        return SimpleNamespace(start_ns=start, end_ns=end, name=name, stats=stats.items())

    def run(at, module):
        return [
            event(at, at + 3000, "gemm", hlo_module=f"jit_{module}", hlo_op="dot.1"),
            event(at + 4000, at + 6000, "add", hlo_module=f"jit_{module}", hlo_op="add.1"),
        ]

    compute = [*run(0, "F0"), *run(6000, "F0"), *run(22000, "B0")]
    lines = {
        "Stream #1(Compute)": compute,
        "Stream #2(MemcpyP2P)": [event(100, 90100, "MemcpyP2P")],
    }
    plane = SimpleNamespace(
        lines=[SimpleNamespace(name=name, events=events) for name, events in lines.items()]
    )
    found = [line.split() for line in profile.table(plane).splitlines()[1:]]
    #        program, runs, kernels, busy, gaps, before
    assert found[0] == ["F0", "2", "2.0", "5.0", "1.0", "0.0"]
    assert found[1] == ["B0", "1", "2.0", "5.0", "1.0", "10.0"]
    assert found[2] == ["all,", "ms", "0.0", "0.0", "0.0"]
    assert found[3][:5] == ["MemcpyP2P", "1", "x", "90.0", "us,"]
