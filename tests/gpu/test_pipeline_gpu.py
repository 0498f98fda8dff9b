"""Pipeline stages on two GPUs: `pytest -m multigpu`."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from mxjax.config import Config, ModelConfig, MoEConfig, ParallelConfig, TrainingConfig
from mxjax.config.schema import PipelineConfig
from mxjax.models.transformer import Transformer
from mxjax.sharding.mesh import build_mesh
from mxjax.training.pipelined import build_objective
from mxjax.training.programs import Programs

M, B, S, VOCAB = 4, 2, 256, 128
MODEL = ModelConfig(
    num_layers=4, hidden_size=256, ffn_hidden_size=384, num_attention_heads=4,
    num_query_groups=2, vocab_size=VOCAB,
)  # fmt: skip
EXPERTS = MoEConfig(
    num_experts=8, moe_ffn_hidden_size=64, shared_expert_intermediate_size=64, first_k_dense=1,
    aux_loss_coeff=0.01,
)  # fmt: skip
ONE_GPU = ParallelConfig(dp=1, zero_stage=0)
TWO_STAGES = ParallelConfig(dp=1, pp=2, zero_stage=0)


def make_config(moe, dtype, parallel, **pipeline):
    training = TrainingConfig(
        seq_length=S, num_microbatches=M, global_batch_size=M * B, compute_dtype=dtype
    )
    return Config(
        model=MODEL,
        moe=moe,
        parallel=parallel,
        training=training,
        pipeline=PipelineConfig(**pipeline),
    )


def loss_and_gradients(config):
    """With weights and a batch that are the same for every layout; layers in their order."""
    gpus = jax.devices()[: config.parallel.pp]
    objective = build_objective(config, build_mesh(config.parallel, gpus))
    model, rng = objective.model, np.random.default_rng(0)
    drawn = jax.tree.map(
        lambda info: (0.1 * rng.standard_normal(info.shape)).astype(np.float32),
        Transformer(config.model, config.moe).infos,
    )

    def place(name, leaf, spec):
        places = model.parts[name].places
        if places is not None:
            leaf = np.where((places >= 0).reshape(-1, *[1] * (leaf.ndim - 1)), leaf[places], 0)
        return jax.device_put(leaf, NamedSharding(objective.mesh, spec))

    params = {
        name: jax.tree.map(
            lambda a, spec, n=name: place(n, a, spec), tree, objective.param_specs[name]
        )
        for name, tree in drawn.items()
    }
    shape = (M, B, S)
    batch = {
        "tokens": rng.integers(0, VOCAB, shape),
        "targets": rng.integers(0, VOCAB, shape),
        "segment_ids": np.sort(rng.integers(1, 4, shape), axis=-1),
        "positions": np.broadcast_to(np.arange(S), shape),
    }
    batch = {name: value.astype(np.int32) for name, value in batch.items()}
    if config.pipeline.executor == "stagewise":
        function = objective.stagewise()
    else:
        function = jax.jit(objective.loss_and_gradients())
    bias = model.initial_expert_bias()
    with jax.default_matmul_precision("highest"):
        grads, stats = jax.device_get(function(params, bias, batch, jax.random.key(0)))
    for name, part in model.parts.items():
        if part.places is not None:
            order = np.argsort(part.places)[np.sum(part.places < 0) :]
            grads[name] = jax.tree.map(lambda a, order=order: a[order], grads[name])
    return float(stats.loss), grads


@pytest.mark.multigpu
@pytest.mark.parametrize("executor", ["one_program", "stagewise"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbh1", "dualpipev"])
@pytest.mark.parametrize(
    ("dtype", "moe"),
    [("float32", EXPERTS), ("bfloat16", MoEConfig())],
    ids=["float32 experts", "bfloat16 dense"],
)
def test_two_stages_equal_one_gpu(dtype, moe, schedule, executor):
    """Loss and every gradient leaf. bf16 with cuDNN's attention, whose gradients vary a little."""
    want_loss, want_grads = loss_and_gradients(make_config(moe, dtype, ONE_GPU))
    pipeline = {"schedule": schedule, "executor": executor}
    loss, grads = loss_and_gradients(make_config(moe, dtype, TWO_STAGES, **pipeline))
    loss_bound, bound = (1e-5, 1e-4) if dtype == "float32" else (2e-3, 3e-2)
    assert abs(loss - want_loss) <= loss_bound * abs(want_loss)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        got, want = (np.asarray(a, np.float64) for a in (got, want))
        assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)


@pytest.mark.multigpu
def test_a_state_goes_to_the_order_of_the_model_and_back():
    """DualPipeV with an empty place: what a checkpoint would hold, bit for bit."""
    pipeline = {"schedule": "dualpipev", "empty_layers": "auto"}
    config = make_config(EXPERTS, "bfloat16", TWO_STAGES, **pipeline)
    config = dataclasses.replace(config, model=dataclasses.replace(MODEL, num_layers=3))
    programs = Programs(config, build_mesh(TWO_STAGES, jax.devices()[:2]))
    alone = dataclasses.replace(config, parallel=ONE_GPU, pipeline=PipelineConfig())
    expected = Programs(alone, build_mesh(ONE_GPU, jax.devices()[:1])).create_state()
    state = programs.create_state()
    before = jax.device_get(state)
    in_order = programs.layer_order.to_model(state)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(in_order), jax.device_get(expected))
    back = programs.layer_order.from_model(in_order)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), before)
