"""What all tests share: compiled programs, small models and packed batches."""

import dataclasses
import fcntl
import functools
import math
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from mxjax.config.schema import (
    Config,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    PipelineConfig,
    RematConfig,
    RopeScalingConfig,
    TrainingConfig,
)
from mxjax.data.mtp import with_mtp
from mxjax.models.transformer import Transformer
from mxjax.sharding.context_parallel import sequence_order
from mxjax.sharding.mesh import AXES, build_mesh
from mxjax.training.pipelined import build_objective

LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=8,
    num_query_groups=2,
    vocab_size=64,
)
GPT2 = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    vocab_size=64,
    max_position_embeddings=48,
    position_embedding="learned",
    norm="layernorm",
    activation="gelu",
    add_bias_linear=True,
    add_qkv_bias=True,
    tie_embeddings=True,
)
MIXTRAL = MoEConfig(
    num_experts=8,
    router_topk=2,
    moe_ffn_hidden_size=16,
    shared_expert_intermediate_size=24,
    aux_loss_coeff=0.02,
    seq_aux_loss_coeff=0.03,
    z_loss_coeff=1e-3,
)
DEEPSEEK = dataclasses.replace(
    MIXTRAL,
    first_k_dense=1,
    router_topk=3,
    score_function="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
)
QWEN3 = dataclasses.replace(LLAMA, qk_layernorm=True, head_dim=6)
QWEN3_MOE = dataclasses.replace(
    MIXTRAL,
    shared_expert_intermediate_size=0,
    router_pre_softmax=True,
    norm_topk_prob=True,
)
MLA = MLAConfig(
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
)
DEEPSEEK_V3 = dataclasses.replace(
    LLAMA,
    num_query_groups=None,
    mla=MLA,
    rope_scaling=RopeScalingConfig(
        kind="yarn", factor=4.0, original_max_position_embeddings=16, mscale_all_dim=0.7
    ),
    mtp_num_layers=1,
)
SHAPES = {
    "llama": (LLAMA, MoEConfig()),
    "gpt2": (GPT2, MoEConfig()),
    "mixtral": (LLAMA, MIXTRAL),
    "deepseek": (LLAMA, DEEPSEEK),
    "qwen3": (QWEN3, MoEConfig()),
    "qwen3_moe": (QWEN3, QWEN3_MOE),
    "deepseek_v3": (
        DEEPSEEK_V3,
        dataclasses.replace(DEEPSEEK, router_topk=4, num_groups=4, group_topk=2),
    ),
    "deepseek_v2_lite": (
        dataclasses.replace(
            DEEPSEEK_V3, mla=dataclasses.replace(MLA, q_lora_rank=None), mtp_num_layers=0
        ),
        dataclasses.replace(MIXTRAL, first_k_dense=1, router_pre_softmax=True),
    ),
}


def pytest_configure(config):
    """Compiled programs outlive the run, in pytest's cache (`pytest --cache-clear` empties it)."""
    folder = str(config.cache.mkdir("jax"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder  # for processes that tests start


@pytest.fixture(scope="session")
def small_config():
    """(shape, sections' changes as dicts) -> fp32 `Config` of a small model on one device."""

    def make(
        shape, *, model=None, moe=None, parallel=None, training=None, pipeline=None, remat="none"
    ):
        """`remat`: the policy, or the section."""
        dense, experts = SHAPES[shape]
        sizes = dict.fromkeys(AXES, 1) | {"zero_stage": 0} | (parallel or {})
        run = {"seq_length": 32, "global_batch_size": 8, "compute_dtype": "float32"}
        run |= {"z_loss_coeff": 1e-3} | (training or {})
        return Config(
            model=dataclasses.replace(dense, **(model or {})),
            moe=dataclasses.replace(experts, **(moe or {})),
            parallel=ParallelConfig(**sizes),
            training=TrainingConfig(**run),
            pipeline=PipelineConfig(**(pipeline or {})),
            remat=remat if isinstance(remat, RematConfig) else RematConfig(policy=remat),
        )

    return make


@pytest.fixture(scope="session")
def mesh_of():
    """Config -> its mesh on the first so many of the eight CPU devices."""

    def make(config):
        num_devices = math.prod(getattr(config.parallel, axis) for axis in AXES)
        return build_mesh(config.parallel, jax.devices()[:num_devices])

    return make


@pytest.fixture(scope="session")
def abstract_params():
    """Objective -> shapes of its parameters where they are stored, to compile without values."""

    def make(objective):
        return jax.tree.map(
            lambda info, spec: jax.ShapeDtypeStruct(
                info.shape, info.dtype, sharding=NamedSharding(objective.mesh, spec)
            ),
            objective.model.infos,
            objective.param_specs,
        )

    return make


@pytest.fixture(scope="session")
def packed_batch():
    """(config, seed) -> one global batch [M, B, S] of packed documents, with padding at the end of
    one sequence in four, one sequence of padding alone, and targets left out here and there, and
    with what the model's multi-token prediction needs."""

    def make(config, seed=0):
        rng = np.random.default_rng(seed)
        training = config.training
        M, B = training.num_microbatches, training.global_batch_size // training.num_microbatches
        shape = (M, B, training.seq_length)
        segments = 1 + np.sort(rng.integers(0, 4, shape), axis=-1)
        segments[:, ::4, -7:] = 0
        segments[0, 1] = 0
        starts = np.diff(segments, axis=-1, prepend=-1) != 0
        index = np.broadcast_to(np.arange(shape[-1]), shape)
        positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=-1)
        targets = rng.integers(0, config.model.vocab_size, shape)
        targets[(segments == 0) | (rng.random(shape) < 0.1)] = -1
        arrays = {
            "tokens": rng.integers(0, config.model.vocab_size, shape),
            "targets": targets,
            "segment_ids": segments,
            "positions": positions,
        }
        arrays = {name: array.astype(np.int32) for name, array in arrays.items()}
        return with_mtp(arrays, config.model.mtp_num_layers)

    return make


@pytest.fixture(scope="session")
def random_weights():
    """(`Transformer`, seed) -> (parameters, balancing bias or None) as numpy arrays that leave
    nothing at zero, as biases are initially, and no router without a clear choice."""

    def make(model, seed=0):
        rng = np.random.default_rng(seed)

        def draw(path, info):
            name = jax.tree_util.keystr(path)
            value = rng.normal(size=info.shape) * (0.5 if "router" in name else 0.1)
            return (value + ("scale" in name)).astype(info.dtype)

        params = jax.tree_util.tree_map_with_path(draw, model.infos)
        shape = (model.num_routers, model.moe.num_experts)
        bias = rng.normal(0, 0.1, shape).astype(np.float32)
        return params, bias if model.num_routers else None

    return make


@pytest.fixture(scope="session")
def loss_and_gradients(mesh_of, packed_batch, random_weights):
    """Config -> (gradients, statistics) as numpy arrays, for the same parameters and batch under
    every layout. Remembers its results, so that tests share the one-device reference."""

    @functools.cache
    def run(config):
        objective = build_objective(config, mesh_of(config))
        model = objective.model
        params, bias = random_weights(Transformer(config.model, config.moe))
        params = {name: in_places(model.parts[name], tree) for name, tree in params.items()}
        params = jax.tree.map(
            lambda value, spec: jax.device_put(value, NamedSharding(objective.mesh, spec)),
            params,
            objective.param_specs,
        )
        stagewise = config.pipeline.executor == "stagewise"
        function = objective.stagewise() if stagewise else jax.jit(objective.loss_and_gradients())
        order = sequence_order(config.training.seq_length, config.parallel.cp)
        batch = {name: array[..., order] for name, array in packed_batch(config).items()}
        grads, stats = jax.device_get(function(params, bias, batch, jax.random.key(1)))
        return {name: in_order(model.parts[name], tree) for name, tree in grads.items()}, stats

    return run


def in_places(part, stack):
    """Layers in the order of the model, put where a pipeline's ranks have them."""
    if part.places is None:
        return stack
    return jax.tree.map(
        lambda a: np.stack([a[place] if place >= 0 else 0 * a[0] for place in part.places]), stack
    )


def in_order(part, stack):
    """The inverse; what is not a layer must be zero."""
    if part.places is None:
        return stack
    assert all(not np.any(leaf[part.places < 0]) for leaf in jax.tree.leaves(stack))
    order = np.argsort(part.places)[np.sum(part.places < 0) :]
    return jax.tree.map(lambda a: a[order], stack)


@pytest.fixture(scope="session")
def assert_parity(small_config, loss_and_gradients):
    """Config -> asserts that loss and every gradient leaf are those of one device (fp32, largest
    error of a leaf over its largest value at most `tolerance`) and that the token counts are the
    same."""

    def check(config, tolerance=2e-5):
        alone = dataclasses.replace(
            config,
            parallel=small_config("llama").parallel,
            training=dataclasses.replace(config.training, scan_layers=True),
            moe=dataclasses.replace(config.moe, dispatcher="alltoall", expert_gemm="batched"),
            remat=RematConfig(),
            pipeline=PipelineConfig(),
        )
        grads, stats = loss_and_gradients(config)
        expected_grads, expected = loss_and_gradients(alone)
        assert stats.num_targets == expected.num_targets
        np.testing.assert_array_equal(stats.counts_LE, expected.counts_LE)
        if all(getattr(config.parallel, axis) == 1 for axis in AXES[1:]):  # nor are tokens split
            assert stats.needed_capacity == expected.needed_capacity
        for field in ("loss", "z_loss", "router_loss", "mtp_loss"):
            got, want = getattr(stats, field), getattr(expected, field)
            assert (got is None) == (want is None)
            if want is not None:
                np.testing.assert_allclose(got, want, rtol=2e-6)
        errors = jax.tree.map(relative_error, grads, expected_grads)
        broken = [
            f"{jax.tree_util.keystr(path)}: {error:.1e}"
            for path, error in jax.tree_util.tree_leaves_with_path(errors)
            if not error <= tolerance
        ]
        assert not broken, broken

    return check


def relative_error(got, expected):
    """Largest difference over the largest expected value."""
    return np.max(np.abs(got - expected)) / np.max(np.abs(expected))


@pytest.fixture(scope="session")
def cuda_compiler(request):
    """Folder with the compiler for NVIDIA GPUs: 142 MB, fetched once into pytest's cache."""
    folder = request.config.cache.mkdir(f"cuda_compiler_{jax.__version__}")
    packages = [f"jax-cuda13-{name}=={jax.__version__}" for name in ("pjrt", "plugin")]
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other worker may want it now, too
        if not any(folder.glob("jax_cuda13_plugin*.dist-info")):
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*install, "--target", folder, *packages], check=True)
    return folder
