"""As `test_gradients_pipeline.py`, models with experts."""

import pytest

FOUR = {"num_microbatches": 4, "global_batch_size": 16}
UNROLLED = FOUR | {"scan_layers": False}
ALLTOALL = {"cp_rotation": "alltoall"}
CASES = [
    ("mixtral", 4, {"pp": 2, "ep": 2}, {"schedule": "zbh1"}, FOUR, "none"),
    ("mixtral", 4, {"pp": 2, "ep": 2, "tp": 2}, {"schedule": "1f1b", "cells": "split"}, FOUR, "none"),
    ("deepseek", 4, {"pp": 2, "dp": 2, "zero_stage": 1}, {"schedule": "dualpipev"}, FOUR, "none"),
    ("deepseek", 3, {"pp": 2, "dp": 2, "zero_stage": 2}, {"schedule": "zbh1", "empty_layers": "auto"}, FOUR, "none"),
    ("deepseek", 4, {"pp": 2, "dp": 2, "zero_stage": 3}, {"schedule": "zbh1"}, UNROLLED, "none"),
    ("qwen3_moe", 4, {"pp": 2, "cp": 2, **ALLTOALL}, {"schedule": "zbh1"}, FOUR, "dots"),
    ("qwen3_moe", 4, {"pp": 2, "sp": 2, "ep": 2, "zero_stage": 1}, {"schedule": "1f1b"}, FOUR, "full"),
    ("deepseek_v3", 5, {"pp": 4, "tp": 2}, {"schedule": "interleaved", "vpp": 2, "empty_layers": "auto"}, FOUR, "none"),
    ("deepseek_v3", 4, {"pp": 2, "ep": 2, "dp": 2, "zero_stage": 1}, {"schedule": "dualpipev"}, FOUR, "full"),
    ("deepseek_v3", 3, {"pp": 2, "cp": 2, "tp": 2, "zero_stage": 3, "cp_method": "allgather"}, {"schedule": "1f1b", "layout": "Ett|tmL"}, FOUR, "none"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "layers", "parallel", "pipeline", "training", "remat"), CASES)
def test_moe(small_config, assert_parity, shape, layers, parallel, pipeline, training, remat):
    assert_parity(
        small_config(
            shape,
            model={"num_layers": layers},
            parallel=parallel,
            pipeline=pipeline,
            training=training,
            remat=remat,
        )
    )
