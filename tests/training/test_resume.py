"""Stopping and going on: what follows is what the uninterrupted run does, bit for bit."""

import os
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from mxjax.data import BatchLoader
from mxjax.moe import buckets

MOE = (
    "moe.num_experts=8",
    "moe.moe_ffn_hidden_size=16",
    "moe.aux_loss_coeff=0.01",
    "moe.expert_bias_update_rate=0.001",
    "checkpoint.save_interval=4",
)
RESTLESS = (*MOE, "moe.capacity_buckets=[2.5]", "model.hidden_dropout=0.1")
STEADY = (*MOE, "moe.capacity_buckets=[]", "parallel.zero_stage=0")


def losses(metrics):
    return {line["step"]: line["loss"] for line in metrics}


@pytest.fixture(scope="module")
def impatient():
    """Buckets go down within a run of 20 steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "PATIENCE", 3)
        yield


def test_three_resumes_in_a_row_change_no_bit(
    tmp_path, train, sums, metrics_of, bits_of, impatient
):
    whole = train(tmp_path / "whole", *RESTLESS, *sums)
    expected = metrics_of(tmp_path / "whole")
    sizes = [line["bucket"] for line in expected]
    assert sizes[0] == sizes[-1] == 2.5 and None in sizes, "the load is to go up and down"
    run_dir = tmp_path / "parts"
    for stop in (2, 8, 17):
        train(run_dir, *RESTLESS, *sums, sigterm_at=stop)
    last = train(run_dir, *RESTLESS, *sums)
    got = metrics_of(run_dir)
    for line, want in zip(got, expected, strict=True):
        assert line["loss"] == want["loss"] and line["grad_norm"] == want["grad_norm"], line
        assert line["bucket"] == want["bucket"], line
    jax.tree.map(np.testing.assert_array_equal, bits_of(last.state), bits_of(whole.state))
