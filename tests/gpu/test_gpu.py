"""What needs real GPUs: `pytest -m gpu` on one, `pytest -m multigpu` on two or more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mxjax.config import Config, DataConfig, ModelConfig, MoEConfig, ParallelConfig, TrainingConfig
from mxjax.kernels.attention import causal_attention
from mxjax.sharding.context_parallel import sequence_order
from mxjax.sharding.mesh import build_mesh
from mxjax.training.gradients import Objective


def relative_error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("groups", "D", "E"), [(1, 128, 128), (4, 128, 128), (8, 128, 128), (8, 192, 128)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_cudnn_attention_equals_the_reference(groups, D, E, packed):
    """bf16 cuDNN against fp32 on the same values: output and gradients within bf16 rounding. Also
    with values narrower than keys, as in multi-head latent attention."""
    B, S, N = 2, 512, 8
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (N, D), (groups, D), (groups, E), (N, E)
    q, k, v, g = (
        jax.random.normal(key, (B, S, *shape), jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )
    segments = None
    if packed:
        rows = np.sort(np.random.default_rng(0).integers(0, 5, (B, S)), axis=1)
        segments = jnp.asarray(rows, jnp.int32)

    def run(implementation, *inputs):
        def attend(q, k, v):
            return causal_attention(q, k, v, segment_ids_BS=segments, implementation=implementation)

        out, pullback = jax.vjp(attend, *inputs)
        return out, *pullback(g.astype(out.dtype))

    with jax.default_matmul_precision("highest"):
        want = jax.jit(lambda *x: run("xla", *x))(*(x.astype(jnp.float32) for x in (q, k, v)))
    got = jax.jit(lambda *x: run("cudnn", *x))(q, k, v)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-2


def small_config(parallel: ParallelConfig, **model) -> Config:
    return Config(
        model=ModelConfig(
            num_layers=3, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4,
            num_query_groups=2, vocab_size=128, **model,
        ),
        moe=MoEConfig(
            num_experts=8, moe_ffn_hidden_size=32, shared_expert_intermediate_size=32,
            first_k_dense=1, aux_loss_coeff=0.01,
        ),
        parallel=parallel,
        training=TrainingConfig(seq_length=64, global_batch_size=4, compute_dtype="float32"),
        data=DataConfig(),
    )  # fmt: skip


def loss_and_gradients(config: Config, devices):
    mesh = build_mesh(config.parallel, devices)
    objective = Objective(config, mesh)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), objective.param_specs)
    # Drawn on the host: what is compared is the computation, not the random generators.
    generator = np.random.default_rng(0)
    params = jax.tree.map(
        lambda info, sharding: jax.device_put(
            (0.1 * generator.standard_normal(info.shape)).astype(np.float32), sharding
        ),
        objective.model.infos,
        shardings,
    )
    shape = (1, 4, 64)
    batch = {
        "tokens": generator.integers(0, 128, shape),
        "targets": generator.integers(0, 128, shape),
        "segment_ids": np.sort(generator.integers(1, 4, shape), axis=-1),
        "positions": np.broadcast_to(np.arange(64), shape),
    }
    order = sequence_order(64, config.parallel.cp)
    batch = {name: value[..., order].astype(np.int32) for name, value in batch.items()}
    bias = objective.model.initial_expert_bias()
    replicated, key = NamedSharding(mesh, PartitionSpec()), jax.random.key(0)
    with jax.default_matmul_precision("highest"):
        grads, stats = jax.jit(objective.loss_and_gradients())(
            params, np.asarray(bias), batch, jax.device_put(key, replicated)
        )
    return float(stats.loss), jax.tree.map(np.asarray, grads)


@pytest.mark.gpu
def test_gpu_and_cpu_agree_in_fp32():
    """The whole objective of a small MoE model, one GPU against one CPU device."""
    config = small_config(ParallelConfig(dp=1))
    loss, grads = loss_and_gradients(config, jax.devices("gpu")[:1])
    want_loss, want_grads = loss_and_gradients(config, jax.devices("cpu")[:1])
    assert abs(loss - want_loss) <= 1e-5 * abs(want_loss)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        assert relative_error(got, want) <= 1e-4


@pytest.mark.multigpu
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "zero_stage": 0},
        {"dp": 2, "zero_stage": 1},
        {"dp": 2, "zero_stage": 3},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": False},
        {"ep": 2},
        {"ep": 2, "zero_stage": 3},
        {"tp": 2, "expert_tensor_parallel": False},
        {"cp": 2},
        {"cp": 2, "cp_rotation": "alltoall"},
        {"cp": 2, "cp_method": "allgather", "zero_stage": 3},
        {"sp": 2},
    ],
    ids=str,
)
def test_two_gpus_equal_one(layout):
    """Loss and every gradient leaf, fp32."""
    want_loss, want_grads = loss_and_gradients(
        small_config(ParallelConfig(dp=1, zero_stage=0)), jax.devices()[:1]
    )
    parallel = ParallelConfig(**{"dp": 1, **layout})
    loss, grads = loss_and_gradients(small_config(parallel), jax.devices()[:2])
    assert abs(loss - want_loss) <= 1e-5 * abs(want_loss)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        assert np.max(np.abs(got - want)) <= 2e-5 * np.max(np.abs(want))
