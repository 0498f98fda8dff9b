"""Memory from shapes against sums done by hand, and what `save_memory` makes of it."""

import contextlib
import dataclasses
import io
import json
from types import SimpleNamespace

import jax
import pytest

from mxjax import train
from mxjax.config import ConfigError, load_config, to_yaml
from mxjax.config.schema import RematConfig, RematRule
from mxjax.kernels import implementation
from mxjax.kernels.attention import always_tiled
from mxjax.kernels.attention_cudnn import cudnn
from mxjax.training.memory_plan import RESERVE
from mxjax.training.pipelined import build_objective
from mxjax.training.plan import fitted, memory_model
from mxjax.training.programs import Programs
from mxjax.training.save_memory import Candidate, _Search, save_memory


@pytest.fixture(scope="module")
def model_of(mesh_of):
    """(config, stagewise) -> its `MemoryModel`, with buffers for any routing."""

    def make(config, stagewise=False):
        programs = Programs(config, mesh_of(config))
        programs.close()
        return memory_model(programs, float("inf"), stagewise, None)

    return make


def saved(stage):
    """Bytes by name."""
    return {row.name: row.bytes for row in stage.names if row.fate == "saved"}


def test_names_of_one_device(small_config, model_of):
    """Two layers, 8 x 32 tokens, hidden 32, 8 heads and 2 groups of 4, inner width 48, fp32."""
    (stage,) = model_of(small_config("llama", remat="norm")).stages()
    per_token = {
        "layer_input": 32, "query": 32, "key": 8, "value": 8, "attention_out": 32,
        "attention_residual": 32, "mlp_up": 96, "mlp_act": 48,
    }  # fmt: skip
    assert saved(stage) == {name: 2 * 4 * 256 * width for name, width in per_token.items()}
    again = {row.name: row.bytes for row in stage.names if row.fate == "recomputed"}
    assert again == dict.fromkeys(("attention_norm", "mlp_norm"), 2 * 4 * 256 * 32)
    assert stage.activations == sum(saved(stage).values())
    state = stage.parameters + stage.optimizer + stage.weights_for_compute + stage.gradients
    assert stage.total == state + stage.activations + stage.temporary + RESERVE
    assert stage.headroom is None, "a CPU does not say what it has"


def test_gradients_grow_as_activations_go(small_config, model_of):
    """Two unrolled layers: with all activations the peak is where the last layer's gradients come
    to those of the head; with little kept it is where the first layer's do. Scanned, all gradients
    are there from the first."""

    def stage_of(**changes):
        (stage,) = model_of(small_config("llama", **changes)).stages()
        return stage

    scanned = stage_of()
    unrolled = {"training": {"scan_layers": False}}
    kept = stage_of(**unrolled)
    wide = {"model": {"ffn_hidden_size": 2400}, "remat": "full"}
    again, whole = stage_of(**unrolled, **wide), stage_of(**wide)
    model = small_config("llama").model
    outside = 2 * 4 * model.vocab_size * model.hidden_size  # embedding and head
    layers = scanned.gradients - outside - 4 * model.hidden_size  # the last norm
    assert kept.gradients == scanned.gradients - outside // 2 - layers // 2
    assert saved(kept) == saved(scanned)
    assert again.gradients == whole.gradients - outside // 2
    assert 2 * sum(saved(again).values()) == sum(saved(whole).values())


def test_pipeline_stages(small_config, model_of):
    """1F1B over 2 ranks, 4 microbatches of 2 sequences, a layer each: rank 0 holds 2, rank 1 one.
    One program has the larger rings on both."""
    config = small_config(
        "llama",
        parallel={"pp": 2},
        training={"num_microbatches": 4},
        pipeline={"cells": "full"},
    )
    mlp_up = 4 * 64 * 96  # the activation is made again of it in any case
    alike = [saved(stage)["mlp_up"] for stage in model_of(config).stages()]
    own = [saved(stage)["mlp_up"] for stage in model_of(config, stagewise=True).stages()]
    assert own == [2 * mlp_up, mlp_up]
    assert alike == [2 * mlp_up, 2 * mlp_up]


def test_first_stages_of_a_pipeline_offload(small_config, model_of):
    """1F1B over 2 ranks: two microbatches of the first stage's layer are on the host, and what one
    layer sends there counts as on its way; the last stage has it on the device."""
    config = small_config(
        "llama",
        parallel={"pp": 2},
        training={"num_microbatches": 4},
        pipeline={"cells": "full", "executor": "stagewise"},
        remat=RematConfig(policy="full", offload=("mlp_up",)),
    )
    first, last = model_of(config, stagewise=True).stages()
    mlp_up = 4 * 64 * 96
    assert (first.host, last.host) == (2 * mlp_up, 0)
    assert "mlp_up" not in saved(first)
    assert saved(last)["mlp_up"] == mlp_up
    assert first.temporary == last.temporary + mlp_up


@pytest.mark.parametrize(("layers", "sent"), [("1", 0), ("0-1", 2)])
def test_a_layer_without_an_equal_beside_it_offloads_nothing(small_config, model_of, layers, sent):
    rule = RematRule(layers=layers, policy="full", offload=("mlp_up",))
    remat = RematConfig(policy="full", rules=(rule,))
    config = small_config("llama", model={"num_layers": 3}, remat=remat)
    (stage,) = model_of(config).stages()
    mlp_up = 4 * 4 * 64 * 96
    kept = 0 if sent else 1
    assert stage.host == sent * mlp_up
    assert saved(stage).get("mlp_up", 0) == kept * mlp_up


def test_save_memory_takes_the_cheapest_that_fits_and_undoes_nothing(
    small_config, model_of, mesh_of
):
    config = small_config("llama", remat=RematConfig(save=("query",), recompute=("mlp_act",)))
    model = model_of(config)

    def build(config):
        return build_objective(config, mesh_of(config))

    (start,) = model.stages()
    stage_of = lambda choice: model.with_objective(build(choice.config)).stages()[0]  # noqa: E731
    easy = save_memory(model, start.total, build)
    assert easy.config.remat.rules == ()
    assert "fits as it is" in easy.lines[-1]
    norm = 2 * 4 * 256 * 32
    choice = save_memory(model, start.total - norm, build)
    assert stage_of(choice).total <= start.total - norm
    (rule,) = choice.config.remat.rules
    assert set(rule.recompute) <= {"mlp_act", "attention_norm", "mlp_norm"}, "no matrix product"
    assert rule.save == ("query",)
    assert rule.recompute[0] == "mlp_act"
    assert any("attention_norm" in line for line in choice.lines)
    with pytest.raises(ConfigError, match=r"with what remat.save sets, .* without") as refused:
        save_memory(model, RESERVE, build)
    assert "the least by the plan is" in str(refused.value)
    explicit = RematRule(layers="0-1")
    fixed = dataclasses.replace(config, remat=RematConfig(rules=(explicit,)))
    with pytest.raises(ConfigError, match=r"remat.rules sets"):
        save_memory(model_of(fixed), start.total - norm, build)


def test_what_save_memory_chose_can_be_loaded_again(small_config, model_of, mesh_of, tmp_path):
    """Names that the user set, of other layers, are in no rule; a run writes what was chosen."""
    remat = RematConfig(recompute=("expert_up", "mlp_up", "norm"), save=("expert_act",))
    config = small_config("mixtral", model={"num_layers": 3}, moe={"first_k_dense": 1}, remat=remat)
    model = model_of(config)
    budget = model.stages()[0].total - 1
    choice = save_memory(model, budget, lambda c: build_objective(c, mesh_of(c)))
    assert {rule.group for rule in choice.config.remat.rules} >= {"dense_layers"}
    (tmp_path / "config.yaml").write_text(to_yaml(choice.config))
    assert load_config(tmp_path / "config.yaml", [], lambda _: 1).remat == choice.config.remat


def test_save_memory_gives_up_what_a_large_tensor_makes_unnecessary():
    small, large = (
        Candidate("dense_layers", name, size, seconds, layers=1)
        for name, size, seconds in (("a", 5, 1), ("b", 50, 20))
    )

    class Search(_Search):
        def stages(self, chosen):
            held = zip((100, 58, 40), chosen, strict=True)
            return [SimpleNamespace(total=n - sum(c.bytes for c in of)) for n, of in held]

    search = Search(SimpleNamespace(stagewise=True), 55, None, [small, large])
    assert search.chosen(3) == [[large], [small], []]
    search = Search(SimpleNamespace(stagewise=False), 55, None, [small, large])
    assert search.chosen(3) == [[large]] * 3
    search.budget = 1
    assert search.chosen(3) == [[small, large]] * 3, "nothing fits"


def test_save_memory_changes_nothing_where_that_fits_and_recompute_takes_more():
    """As where tensors wait on the host: what is computed again from them is there twice."""
    candidates = [Candidate("dense_layers", name, 8, 1, layers=1) for name in "abc"]

    class Search(_Search):
        def stages(self, chosen):
            return [SimpleNamespace(total=50 + 8 * bool(of) - len(of)) for of in chosen]

    for stagewise in (True, False):
        search = Search(SimpleNamespace(stagewise=stagewise), 51, None, candidates)
        assert search.chosen(2) == [[], []]


@pytest.mark.parametrize("executor", ["one_program", "stagewise"])
def test_save_memory_with_a_rank_without_layers(small_config, model_of, mesh_of, executor):
    config = small_config(
        "llama",
        parallel={"pp": 2},
        training={"num_microbatches": 4},
        pipeline={"executor": executor, "num_layers_in_first_pipeline_stage": 0},
    )
    model = model_of(config, stagewise=executor == "stagewise")
    before = model.stages()
    build = lambda c: build_objective(c, mesh_of(c))  # noqa: E731
    choice = save_memory(model, before[1].total - 1, build)
    after = model.with_objective(build(choice.config)).stages()
    assert max(stage.total for stage in after) < before[1].total
    with pytest.raises(ConfigError, match="no recompute makes a step fit"):
        save_memory(model, RESERVE, build)


def test_on_a_gpu_attention_has_bytes_and_a_price(small_config, model_of, mesh_of, monkeypatch):
    """In a trace, cuDNN's attention has no products; plans must not go by it."""

    def forward(*operands, **options):
        raise AssertionError("a plan from shapes asked for cuDNN's attention")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn, "dot_product_attention", forward)
    model, training = (
        {"head_dim": 8, "num_layers": 8},
        {"compute_dtype": "bfloat16", "seq_length": 2048},
    )
    config = small_config("llama", model=model, training=training)
    with always_tiled():
        (stage,) = model_of(config).stages()
    of_tensors = sum(saved(stage).values()) - saved(stage)["layer_input"]
    budget = f"{(stage.total - 0.8 * of_tensors) / 2**30:.6f}GiB"
    mode = RematConfig(mode="save_memory", memory_budget=budget)
    choice = fitted(dataclasses.replace(config, remat=mode), mesh_of(config))
    (attention,) = (line.split() for line in choice.lines if "attention_out" in line)
    assert float(attention[2]) > 0, "bytes"
    assert float(attention[5].replace(",", "")) > 0, "microseconds"


def test_save_memory_by_stage(small_config, model_of, mesh_of):
    """Rank 0 holds more microbatches: only there something is computed again. What it offloads
    stays offloaded."""
    config = small_config(
        "llama",
        parallel={"pp": 2},
        training={"num_microbatches": 4},
        pipeline={"cells": "full", "executor": "stagewise"},
        remat=RematConfig(policy="norm", offload=("value",)),
    )
    model = model_of(config, stagewise=True)
    first, last = model.stages()
    budget = (first.total + last.total) // 2
    choice = save_memory(model, budget, lambda c: build_objective(c, mesh_of(c)))
    rules = choice.config.remat.rules
    assert [(rule.stages, rule.offload) for rule in rules] == [("0", ("value",))]


def plan(*arguments):
    """(exit code, plan as JSON, what was said besides)."""
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        code = train.main([*arguments, "--plan", "--target", "h200", "--json"])
    return code, json.loads(said.getvalue() or "null"), errors.getvalue()


def test_deepseek_v3_on_1024_gpus(monkeypatch):
    """Recompute of everything keeps 61 inputs of 4,096 x 7,168 / 2 (tp) bf16, and two for
    multi-token prediction; a budget is kept by other means than that."""
    kinds = set()

    def device():
        kinds.add(device_of_mesh().device_kind)
        return device_of_mesh()

    device_of_mesh = implementation._device
    monkeypatch.setattr(implementation, "_device", device)
    code, found, said = plan("--config", "configs/deepseek_v3.yaml")
    assert (code, said) == (0, "")
    assert kinds == {"NVIDIA H200"}, "kernels are chosen for this machine"
    assert found["devices"]["count"] == 1024
    assert (found["collectives"], found["compile_seconds"]) == ([], None)
    (stage,) = found["stages"]
    kept = sum(row["bytes"] for row in stage["names"] if row["fate"] == "saved")
    assert kept == stage["activations"] == 63 * 4096 * 7168 // 2 * 2
    assert stage["device"] == 150_000_000_000


def test_products_of_kernels_have_a_price(tmp_path):
    """8,192 tokens' 2 choices through [256, 2 x 128] in each of 2 layers, at 680 TFLOP/s; buffers
    are those of the kernels, without room for other than balanced experts."""
    config = {
        "model": {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 2},
        "moe": {"num_experts": 8, "router_topk": 2, "moe_ffn_hidden_size": 128},
        "training": {"seq_length": 2048, "global_batch_size": 4},
        "parallel": {"dp": 1},
    }
    (tmp_path / "x.yaml").write_text(json.dumps(config))
    code, found, said = plan("--config", str(tmp_path / "x.yaml"), "--no-compile")
    assert code == 0, said
    (up,) = (a for a in found["advice"] if a["name"] == "expert_up")
    assert up["seconds"] >= 2 * 8192 * 2 * 2 * 256 * 2 * 128 / 680e12
    assert up["bytes"] < 2 * 2 * (8192 * 2 + 8 * 128) * 2 * 128 * 1.01


def test_a_budget_for_stages_that_are_not_compiled(tmp_path):
    (tmp_path / "x.yaml").write_text("{}")
    settings = ("parallel.pp=2", "remat.mode=save_memory", "remat.memory_budget=100GiB")
    arguments = ("--config", str(tmp_path / "x.yaml"), "--devices", "2", "--no-compile", *settings)
    code, found, said = plan(*arguments)
    assert code == 0, said
    assert "fits as it is" in said
    assert found["pipeline"]["executor"] == "stagewise"


def test_a_missing_compiler_is_named(tmp_path):
    (tmp_path / "x.yaml").write_text("{}")
    code, _, said = plan("--config", str(tmp_path / "x.yaml"), "--devices", "2")
    assert code == 2
    assert "pip install --no-deps jax-cuda13-pjrt==" in said


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--plan", "--devices", "2"], "belong to --target"),
        (["--plan", "--devices", "0"], "belong to --target"),
        (["--plan", "--target", "h200", "--devices", "0"], "--devices 0: it takes at least one"),
        (["--target", "h200"], "--target belongs to --plan"),
    ],
)
def test_options_of_targets(options, expected, capsys):
    assert train.main(["--config", "x.yaml", *options]) == 2
    assert expected in capsys.readouterr().err
