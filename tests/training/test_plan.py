"""The plan of a step against what its layout must give, worked out by hand, and against a real
state."""

import dataclasses
import functools
import json
import math

import jax
import pytest

from mxjax import train
from mxjax.sharding import mesh
from mxjax.training.plan import (
    PLAN_VERSION,
    as_table,
    gradients_by_part,
    make_plan,
    weights_for_compute,
)
from mxjax.training.programs import Programs


@pytest.fixture(scope="module")
def plan_of(mesh_of):
    """Config -> its plan, with buffers for any routing."""

    @functools.cache
    def make(config):
        moe = dataclasses.replace(config.moe, capacity_buckets=())
        config = dataclasses.replace(config, moe=moe)
        return make_plan(config, mesh_of(config))

    return make


@pytest.fixture(scope="module")
def infos_of(mesh_of):
    """Config -> `ParamInfo`s of its model."""

    def make(config):
        return Programs(config, mesh_of(config)).objective.model.infos

    return make


def elements(infos):
    return sum(math.prod(info.shape) for info in jax.tree.leaves(infos))


def moved(plan, axes, kind):
    """(count, bytes) of the collectives of this kind along these axes."""
    (found,) = [c for c in plan.collectives if (c.axes, c.kind) == (axes, kind)] or [None]
    return (found.count, found.bytes) if found else (0, 0)


def test_zero_0_reduces_every_gradient_once(small_config, plan_of):
    """dp 2, fp32: 4 bytes a parameter, and five figures."""
    plan = plan_of(small_config("llama", parallel={"dp": 2, "zero_stage": 0}))
    assert moved(plan, ("dp",), "all-reduce")[1] == 4 * plan.parameters.total + 4 * 5
    assert {(c.axes, c.kind) for c in plan.collectives} == {(("dp",), "all-reduce")}
    assert all(c.exact for c in plan.collectives)
    assert plan.memory.weights_for_compute == 0, "they are the master weights"
    assert plan.memory.gradients == plan.memory.parameters == 4 * plan.parameters.total
    assert plan.memory.optimizer == pytest.approx(2 * plan.memory.parameters, abs=64)


def test_zero_3_gathers_every_weight(small_config, plan_of, infos_of):
    """dp 2, fp32, 2 microbatches: in each, every weight of a layer, and again in the backward pass;
    gradients are reduce-scattered there. Weights outside of the layers do not change between
    microbatches, and XLA gathers them once."""
    config = small_config(
        "llama", parallel={"dp": 2, "zero_stage": 3}, training={"num_microbatches": 2}
    )
    plan, infos = plan_of(config), infos_of(config)
    layers = jax.tree.leaves(infos["dense_layers"])
    outside = len(jax.tree.leaves(infos)) - len(layers)
    outside_elements, num_layers = elements(infos) - elements(layers), config.model.num_layers
    assert moved(plan, ("dp",), "all-gather") == (
        outside + 2 * num_layers * 2 * len(layers),
        4 * (outside_elements + 2 * 2 * elements(layers)),
    )
    scatters = 2 * (outside + num_layers * len(layers))
    assert moved(plan, ("dp",), "reduce-scatter") == (scatters, 2 * 4 * elements(infos))
    assert plan.memory.parameters == 4 * elements(infos) // 2
    assert plan.memory.weights_for_compute == 4 * outside_elements + (
        4 * elements(layers) // num_layers
    )


def test_tensor_parallel_gathers_and_scatters_the_sequence(small_config, plan_of):
    """Two blocks a layer, each entered and left forward and backward; embedding and head once."""
    config = small_config("llama", parallel={"tp": 2})
    plan, training = plan_of(config), config.training
    activations = training.global_batch_size * training.seq_length * config.model.hidden_size * 4
    times = 4 * config.model.num_layers + 2
    assert moved(plan, ("tp",), "all-gather") == (times, times * activations)
    assert moved(plan, ("tp",), "reduce-scatter") == (times, times * activations)
    assert {c.axes for c in plan.collectives} == {("tp",)}


def test_expert_parallel_exchanges_tokens(small_config, plan_of):
    """Rows, expert ids and weights there and results back; backward the same without ids."""
    config = small_config("mixtral", parallel={"ep": 2})
    plan, training, K = plan_of(config), config.training, config.moe.router_topk
    tokens = training.global_batch_size // 2 * training.seq_length
    H, places = config.model.hidden_size, 2 * tokens  # for either rank all of this rank's tokens
    assert moved(plan, ("ep",), "all-to-all") == (
        7 * config.model.num_layers,
        config.model.num_layers * 4 * places * (4 * H + 3 * K),
    )


def test_state_is_what_a_created_state_takes(small_config, mesh_of, plan_of):
    """On the first of 8 devices, byte for byte; all of it less than on one device alone."""
    parallel = {"dp": 2, "ep": 2, "tp": 2, "zero_stage": 1}
    config = small_config("mixtral", parallel=parallel, training={"compute_dtype": "bfloat16"})
    plan = plan_of(config)
    programs = Programs(config, mesh_of(config))
    first = programs.mesh.devices.flat[0]

    def bytes_of(tree):
        shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
        return sum(shard.data.nbytes for shard in shards if shard.device == first)

    state = programs.create_state()
    assert plan.memory.parameters == bytes_of(state.params)
    assert plan.memory.optimizer == bytes_of(state.opt_state)
    assert plan.memory.other_state == bytes_of((state.step, state.expert_bias, state.halted))
    alone = plan_of(small_config("mixtral", training={"compute_dtype": "bfloat16"}))
    for name in ("parameters", "optimizer", "gradients", "batch", "total"):
        assert getattr(plan.memory, name) < getattr(alone.memory, name) / 1.9, name
    assert alone.collectives == ()
    assert plan.parameters == alone.parameters
    assert plan.step == alone.step


def test_classes_add_up(small_config, plan_of):
    memory = plan_of(small_config("mixtral", parallel={"ep": 2})).memory
    parts = dataclasses.asdict(memory)
    total, device, headroom = (parts.pop(key) for key in ("total", "device", "headroom"))
    assert memory.activations_and_temporaries > 0
    assert sum(parts.values()) == total
    assert (device, headroom) == (None, None), "a CPU says nothing about its memory"


def test_compute_copies_and_accumulators_by_zero_stage(small_config, mesh_of):
    """dp 2, bf16 compute, 4 bytes a stored element. Accumulators of several microbatches are fp32;
    they and the copies are whole until ZeRO splits them. Beside gathered copies the rank's own part
    stays from step to step."""
    sizes = {}
    for stage in range(4):
        config = small_config(
            "llama",
            parallel={"dp": 2, "zero_stage": stage},
            training={"num_microbatches": 2, "compute_dtype": "bfloat16"},
        )
        programs = Programs(config, mesh_of(config))
        copies = weights_for_compute(programs.objective, programs.abstract_state.params)
        count = elements(programs.objective.model.infos)
        sizes[stage] = (copies / count, sum(gradients_by_part(programs).values()) / count)
    assert [sizes[stage] for stage in range(3)] == [(2, 4), (3, 4), (3, 2)]
    assert sizes[3][0] < 2
    assert sizes[3][1] == 2


def test_the_command_prints_json_and_touches_nothing(tmp_path, monkeypatch, capsys):
    """Its keys are what tools rely on: to change one, raise PLAN_VERSION."""
    build_mesh = mesh.build_mesh
    monkeypatch.setattr(train, "start_jax", lambda parallel, arguments: 2)
    monkeypatch.setattr(mesh, "build_mesh", lambda sizes: build_mesh(sizes, jax.devices()[:2]))
    config = tmp_path / "small.yaml"
    config.write_text(
        "model: {num_layers: 1, hidden_size: 32, ffn_hidden_size: 48, num_attention_heads: 4}\n"
        "moe: {num_experts: 4}\n"
        "training: {seq_length: 32}\n"
        "data: {source: text, paths: [/nowhere]}\n"
        f"run_dir: {tmp_path / 'run'}\n"
    )
    assert train.main(["--config", str(config), "--plan", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "run").exists()
    assert PLAN_VERSION == plan["version"] == 1
    assert plan["capacity_factor"] == 1.25
    assert plan["devices"]["axes"] == {"pp": 1, "dp": 2, "ep": 1, "cp": 1, "sp": 1, "tp": 1}
    assert [
        set(plan),
        *(set(plan[key]) for key in ("devices", "parameters", "step", "memory")),
    ] == [
        {
            "version",
            "devices",
            "target",
            "capacity_factor",
            "compile_seconds",
            "parameters",
            "step",
            "memory",
            "collectives",
            "pipeline",
            "stages",
            "advice",
        },
        {"kind", "count", "axes"},
        {"total", "active"},
        {"tokens", "model_flops"},
        {
            "parameters",
            "optimizer",
            "other_state",
            "batch",
            "weights_for_compute",
            "gradients",
            "activations_and_temporaries",
            "total",
            "device",
            "headroom",
            "host",
        },
    ]
    assert plan["pipeline"] is None
    for collective in plan["collectives"]:
        assert set(collective) == {"axes", "kind", "count", "bytes", "sent_bytes", "exact"}
        assert collective["axes"] == ["dp"]


def test_the_table_names_every_class_and_axis(small_config, plan_of):
    plan = plan_of(small_config("mixtral", parallel={"ep": 2}))
    text = as_table(plan)
    for field in dataclasses.fields(plan.memory):
        assert field.name.replace("_", " ") in text
    assert "ep 2" in text
    assert "all-to-all" in text
    assert "holds any routing" in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--json"], "--json belongs to --plan"),
        (["--plan", "--distributed"], "--plan runs in one process"),
    ],
)
def test_options_that_do_not_go_together(options, expected, capsys):
    assert train.main(["--config", "x.yaml", *options]) == 2
    assert expected in capsys.readouterr().err
