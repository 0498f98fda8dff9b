"""Loss and every gradient are those of one device under pipeline stages, alone and with every other
axis, for every schedule and every kind of model."""

import pytest

FOUR = {"num_microbatches": 4}
UNROLLED = FOUR | {"scan_layers": False}
ALLTOALL = {"cp_rotation": "alltoall"}


@pytest.mark.parametrize(
    ("shape", "layers", "parallel", "pipeline", "training"),
    [
        ("llama", 2, {"pp": 2}, {"schedule": "1f1b"}, FOUR),
        ("llama", 2, {"pp": 2}, {"schedule": "gpipe"}, UNROLLED),
        ("llama", 4, {"pp": 2}, {"schedule": "interleaved", "cells": "joint"}, FOUR),
        ("llama", 4, {"pp": 2}, {"schedule": "zbv"}, FOUR),
        ("llama", 4, {"pp": 4}, {"schedule": "zbh1"}, UNROLLED),
        ("gpt2", 4, {"pp": 2}, {"schedule": "dualpipev"}, FOUR),
    ],
    ids=str,
)
def test_dense(small_config, assert_parity, shape, layers, parallel, pipeline, training):
    assert_parity(
        small_config(
            shape,
            model={"num_layers": layers},
            parallel=parallel,
            pipeline=pipeline,
            training=training,
        )
    )
