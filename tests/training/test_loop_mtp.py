"""A whole run of a DeepSeek-like model with multi-token prediction, its sequence split in two."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.training.diagnose import where_nonfinite

SETTINGS = (
    "model.mla={kv_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8}",
    "model.num_query_groups=null",
    "model.num_layers=1",
    "model.mtp_num_layers=1",
    "moe.num_experts=8",
    "moe.moe_ffn_hidden_size=16",
    "moe.score_function=sigmoid",
    "moe.norm_topk_prob=true",
    "moe.num_groups=4",
    "moe.group_topk=2",
    "moe.expert_bias_update_rate=0.001",
    "moe.capacity_buckets=[]",
    "parallel.dp=1",
    "parallel.cp=2",
    "parallel.zero_stage=3",
    "training.num_steps=12",
    "training.seq_length=32",
    "training.eval_interval=12",
    "training.eval_batches=1",
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("mtp")


@pytest.fixture(scope="module")
def trainer(run_dir, train, sums):
    return train(run_dir, *SETTINGS, *sums, devices=2)


def test_both_losses_fall(trainer, run_dir, metrics_of):
    metrics = metrics_of(run_dir)
    first, last = metrics[0], metrics[-1]
    for key in ("loss", "mtp_loss"):
        assert abs(first[key] - math.log(264)) < 0.3
        assert last[key] < first[key] - 1
    assert abs(last["eval_loss"] - last["loss"]) < 0.5


def test_the_modules_router_has_its_row_of_the_bias(trainer):
    bias = np.asarray(trainer.state.expert_bias)
    assert bias.shape == (2, 8)
    assert np.all(np.any(bias != 0, axis=1))


def test_a_module_that_breaks_alone_is_named(trainer):
    """Its weights are good, its output is not: 1e30 squared is infinite in fp32."""
    params = jax.tree.map(lambda p: p, trainer.state.params)
    norm = params["mtp_layers"]["layer"]["mlp_norm"]
    norm["scale"] = jnp.full_like(norm["scale"], 1e30)
    state = trainer.state.__class__(**(vars(trainer.state) | {"params": params}))
    batch = trainer.sent[-1].batch
    place = where_nonfinite(trainer.programs, math.inf, state, batch)
    assert place == "output of multi-token prediction module 1"
