"""What the compiler for H200 GPUs makes of the kernels and of the optimizer's update."""

import re

import pytest


@pytest.fixture(scope="module")
def programs(programs_for_h200):
    return programs_for_h200("mosaic", "optimizer", "added_product")


def test_kernels_compile_without_multicast(programs):
    """Forward and backward, recomputed, on two GPUs, types checked; nothing that uses NVLink
    multicast, which can take a shared host's GPUs down."""
    for name, program in programs.items():
        assert ('custom_call_target="mosaic_gpu' in program) == (name != "optimizer"), name
        assert "multimem" not in program, name


def test_a_product_is_added_to_sums_where_they_lie(programs):
    entry = programs["added_product"].split("\nENTRY ")[1]
    sums = [line for line in entry.splitlines() if "= f32[64,2048,1408]" in line]
    made = [line.split("(")[0].split()[-1] for line in sums if " parameter(" not in line]
    assert made == ["custom-call"], "no copy"
    assert "input_output_alias={ {}: (0" in programs["added_product"]


def test_the_optimizer_passes_over_its_bytes_once(programs):
    """One kernel reads and writes weights and moments, casts included, and writes the weights' copy
    in bf16. The gradient is read once more, for the norm by which it is clipped."""
    entry = programs["optimizer"].split("\nENTRY ")[1]
    large = re.compile(r"(?:f32|bf16)\[1024,512\]")
    calls = [
        line.split(", metadata")[0]
        for line in entry.splitlines()
        if " fusion(" in line or " copy(" in line
    ]
    writing = [line for line in calls if large.search(line.split(" fusion(")[0])]
    assert len(writing) == 1, writing
    assert sorted(large.findall(writing[0])) == ["bf16[1024,512]"] * 3 + ["f32[1024,512]"]
    for operand, uses in {"params__w": 1, "mu__w": 1, "nu__w": 1, "grads__w": 2}.items():
        assert sum(operand in line for line in calls) == uses, operand
