"""What waits in the host's memory: the same figures, bytes where they should be, and a refusal."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mxjax.config import ConfigError, load_config
from mxjax.sharding.mesh import build_mesh
from mxjax.training.host_memory import check_host_memory
from mxjax.training.programs import (
    DETERMINISTIC_GPU_OPTIONS,
    OFFLOADING_GPU_OPTIONS,
    Programs,
)

SHORT = ("training.num_steps=4", "optimizer.schedule=constant", "optimizer.warmup_steps=0")


def test_moments_on_the_host_change_nothing(tmp_path, train, sums, metrics_of):
    """Nor does a checkpoint between."""
    here = train(tmp_path / "here", *SHORT, *sums)
    saves = ("optimizer.offload=true", "checkpoint.save_interval=2", *SHORT, *sums)
    there = train(tmp_path / "there", *saves, "training.num_steps=2")
    there = train(tmp_path / "there", *saves)
    kinds = {
        leaf.sharding.memory_kind
        for leaf in jax.tree.leaves(there.state.opt_state)
        if leaf.ndim  # the step count is no moment
    }
    assert kinds == {"pinned_host"}
    losses = [
        [row["loss"] for row in metrics_of(run) if "loss" in row]
        for run in (tmp_path / "here", tmp_path / "there")
    ]
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert here.config.optimizer.offload is False


@pytest.mark.parametrize(
    ("overrides", "graphs"),
    [
        ([], True),
        (["optimizer.offload=true"], False),
        (["remat.policy=full", "remat.offload=[mlp_up]"], False),
        (["remat.rules=[{layers: '0-1', offload: [mlp_up]}]"], False),
    ],
)
def test_on_a_gpu_transfers_are_in_no_graph(config_file, overrides, graphs, monkeypatch):
    """In one they would wait for kernels, and kernels for them."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    given = []
    lowered = SimpleNamespace(compile=lambda compiler_options: given.append(compiler_options))
    config = load_config(config_file, ["training.deterministic=true", *overrides], lambda _: 1)
    programs = Programs(config, build_mesh(config.parallel, jax.devices()[:1]))
    programs.close()
    programs.mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    programs._compile(lowered)
    expected = DETERMINISTIC_GPU_OPTIONS | ({} if graphs else OFFLOADING_GPU_OPTIONS)
    assert given == [expected]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["optimizer.offload=true"], "optimizer.offload"),
        (["remat.policy=full", "remat.offload=[layer_input]"], "remat.offload"),
        (["remat.rules=[{stages: '0', offload: [layer_input]}]"], "remat.rules"),
    ],
)
def test_more_than_the_host_has_is_refused_with_the_figures(config_file, overrides, key):
    config = load_config(config_file, ["remat.host_memory=10kB", *overrides], lambda _: 1)
    with pytest.raises(ConfigError, match=r"the host has 9.77 KiB \(by remat.host_memory\)") as no:
        check_host_memory(config, build_mesh(config.parallel, jax.devices()[:1]))
    assert no.value.problems[0].path == key
    enough = load_config(config_file, ["remat.host_memory=1GiB", *overrides], lambda _: 1)
    check_host_memory(enough, build_mesh(config.parallel, jax.devices()[:1]))


def test_ranks_of_a_pipeline_put_what_each_has_into_the_one_host(config_file):
    """Offloading is for the first stage by default."""
    pipeline = ["parallel.pp=2", "pipeline.executor=stagewise", "training.num_microbatches=2"]
    activations = ["remat.policy=full", "remat.offload=[layer_input]"]
    overrides = [*pipeline, *activations, "remat.host_memory=10B"]
    config = load_config(config_file, overrides, lambda parallel: 2)
    with pytest.raises(ConfigError, match=r"1 x \d.+B \+ 1 x 0.00 KiB\) need \d.+B, and"):
        check_host_memory(config, build_mesh(config.parallel, jax.devices()[:2]))


GPU_SCRIPT = r"""
import jax, json, re
import jax.numpy as jnp
from functools import partial
from jax.sharding import NamedSharding, PartitionSpec
from mxjax.config.schema import ParallelConfig
from mxjax.models.transformer import run_layers
from mxjax.pipeline.schedule import Kind
from mxjax.pipeline.schedules import make_schedule
from mxjax.pipeline.stagewise import Stagewise
from mxjax.remat.layers import LayerPolicy
from mxjax.remat.names import named
from mxjax.remat.offload import Offloading
from mxjax.remat.policy import rematerialise
from mxjax.training.programs import OFFLOADING_GPU_OPTIONS
from mxjax.training.target import TARGETS, target_mesh, use_target_compiler
from tests.pipeline.toy_model import Toy, parameters, stacks_of

use_target_compiler()
mesh = target_mesh(TARGETS["h200"], ParallelConfig(dp=1))

def layer(w, x, ctx, index, bias):
    return x + named(jnp.sin(x) @ w, "mlp_up") ** 2 @ w.T, None

away = LayerPolicy("names", offload=frozenset(["mlp_up"]))
keep = rematerialise(layer, away.on_device, gathers_weights=False, in_scan=True)

def compiled(run, options=None):
    loss = lambda w, x: jnp.sum(run_layers(run, w, x, None, jnp.arange(8), None)[0])
    replicated = NamedSharding(mesh, PartitionSpec())
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=replicated)
    return jax.jit(jax.grad(loss)).lower(like(8, 64, 256), like(1024, 64)).compile(options)

def bytes_of(program):
    sizes = program.memory_analysis()
    return sizes.temp_size_in_bytes, sizes.host_temp_size_in_bytes

def products_beside_transfers(program):
    # Of each loop: products of its body, those between the begin and end of a transfer, and how
    # many things begin that end later.
    text = program.as_text()
    found = []
    for body in re.findall(r"body=%([\w.-]+)", text):
        lines = re.search(rf"\n%{re.escape(body)} .*?\n}}", text, re.S)[0].split("\n")
        calls = [line.split(" = ")[0] for line in lines if " = " in line]
        of = lambda part: [i for i, name in enumerate(calls) if re.search(part, name)]
        start, = of("(update|dynamic)-slice-start")
        end, = of("(update|dynamic)-slice-done")
        products = of("dot|gemm|cublas")
        begun = len(of("-start"))
        found.append((len(products), sum(start < i < end for i in products), begun))
    return found

def bytes_of_a_stage(offload):
    stacks = stacks_of(make_schedule("1f1b", 2, 2), [(3, 0), (1, 0)])
    mesh = target_mesh(TARGETS["h200"], ParallelConfig(pp=2, dp=1))
    model = lambda tokens: Toy(tokens, 4, offload=offload)
    run = Stagewise(model, make_schedule("1f1b", 2, 2), stacks, mesh)
    layers, outer = parameters(4, 0)
    held = {"wide": layers[:3], "narrow": []}
    sums, shared = {"stats": (jnp.zeros(()), jnp.zeros(64))}, jnp.zeros((2, 6), jnp.int32)
    sharding = NamedSharding(run.meshes[0], run._varying)
    given = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((1, *a.shape), a.dtype, sharding=sharding),
        (sums, (held, outer, shared), [jnp.int32(0)], [{"x": None}]),
    )
    cell = ((Kind.F, 0),)
    program = run._program("F0", partial(run._cell, cell), 0)
    sizes = program.lower(*given).compile().memory_analysis()
    return sizes.output_size_in_bytes, sizes.host_output_size_in_bytes

kept, sent = compiled(keep), compiled(Offloading(keep, away.offload), OFFLOADING_GPU_OPTIONS)
found = [bytes_of(kept), bytes_of(sent), bytes_of_a_stage(()), bytes_of_a_stage(("hidden",))]
print(json.dumps([products_beside_transfers(sent), *found]))
"""


def test_a_gpu_program_has_offloaded_activations_in_host_memory(cuda_compiler):
    """Eight layers' [1024, 256] fp32 on the device, or on the host and travelling; and of a pipeline's stage what
    the forward pass of its three layers leaves, [6, 12] fp32 each."""
    environment = os.environ | {"PYTHONPATH": str(cuda_compiler)}
    command = [sys.executable, "-c", GPU_SCRIPT]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    loops, (device, none), (less, host), *stage = json.loads(said.stdout)
    tensor = 1024 * 256 * 4
    assert (none, host) == (0, 8 * tensor)
    assert device - less >= 5 * tensor  # two layers' are there, and a copy of one
    # They travel beside all of another layer: its two products, and in the backward pass four. And
    # nothing else does: XLA has four queues, and weights in that of a transfer would wait for it.
    assert loops == [[2, 2, 1], [4, 4, 1]]
    (all_there, nothing), (rest, left) = stage
    assert (nothing, left) == (0, 3 * 6 * 12 * 4)
    assert all_there - rest >= left
