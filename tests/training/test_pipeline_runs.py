"""Runs with pipeline stages: the same losses as without, and checkpoints that move freely."""

import jax
import numpy as np
import pytest

MODEL = (
    "model.num_layers=3",
    "model.hidden_dropout=0.1",
    "moe.first_k_dense=1",
    "training.num_steps=6",
    "training.num_microbatches=4",
    "training.eval_interval=3",
    "training.eval_batches=1",
    "parallel.dp=2",
    "parallel.zero_stage=1",
    "checkpoint.save_interval=2",
)
DUALPIPEV = ("parallel.pp=2", "pipeline.schedule=dualpipev", "pipeline.empty_layers=auto")
ZBH1 = (
    "parallel.pp=2",
    "pipeline.schedule=zbh1",
    "pipeline.layout=Et|ttL",
    "pipeline.executor=stagewise",
    "remat.offload=[layer_input, mlp_up]",
    "remat.rules=[{stages: '1', offload: [attention, expert_up]}]",
)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory, train, moe, sums):
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    return run_dir, train(run_dir, *moe, *sums, *MODEL, devices=2)


def test_a_run_moves_between_schedules_executors_and_back_to_one_stage(
    tmp_path, plain_run, train, moe, sums, metrics_of
):
    """With dropout, router bias and evaluation; and with stages that offload."""
    plain_dir, plain = plain_run
    settings = (*moe, *sums, *MODEL)
    train(tmp_path, *settings, *DUALPIPEV, devices=4, sigterm_at=2)
    train(tmp_path, *settings, *ZBH1, devices=4, sigterm_at=4)
    last = train(tmp_path, *settings, devices=2)
    got, expected = metrics_of(tmp_path), metrics_of(plain_dir)
    assert [line["step"] for line in got] == [line["step"] for line in expected]
    for name in ("loss", "grad_norm", "router_loss", "eval_loss"):
        values = [[line[name] for line in lines if name in line] for lines in (got, expected)]
        np.testing.assert_allclose(*values, rtol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5),
        jax.device_get(last.state.params),
        jax.device_get(plain.state.params),
    )
