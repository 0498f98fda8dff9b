"""The compiled program of a pipelined step: what it holds, and where ranks meet."""

import re

import jax
import pytest

from mxjax.pipeline.configure import training_table
from mxjax.training.pipelined import build_objective

SIZES = {
    "model": {"num_layers": 4},
    "parallel": {"pp": 2, "cp": 2, "cp_rotation": "alltoall"},
}


@pytest.fixture(scope="module")
def compiled(small_config, mesh_of, abstract_params, packed_batch):
    """(schedule, microbatches) -> tick table and compiled program of a Llama-like model."""
    programs = {}

    def compile_(schedule, num_microbatches):
        if (schedule, num_microbatches) not in programs:
            training = {
                "num_microbatches": num_microbatches,
                "global_batch_size": 2 * num_microbatches,
            }
            pipeline = {"schedule": schedule, "transfers": "immediate"}
            config = small_config("llama", training=training, pipeline=pipeline, **SIZES)
            objective = build_objective(config, mesh_of(config))
            function = jax.jit(objective.loss_and_gradients())
            arguments = (None, packed_batch(config), jax.random.key(0))
            lowered = function.lower(abstract_params(objective), *arguments)
            # What is looked at comes before the code of each kernel.
            program = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
            table = training_table(config, objective.stacks)
            programs[schedule, num_microbatches] = table, program
        return programs[schedule, num_microbatches]

    return compile_


def computations(text):
    """Name -> body of each computation of an HLO module."""
    found = re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    return dict(found)


def test_memory_and_program_do_not_grow_with_microbatches(compiled):
    """Other schedules with a smaller model: `tests/pipeline/test_executor.py`."""
    (_, few), (_, many) = compiled("zbh1", 8), compiled("zbh1", 32)
    memory = [program.memory_analysis().temp_size_in_bytes for program in (few, many)]
    assert memory[1] <= 1.02 * memory[0]
    instructions = [program.as_text().count(" = ") for program in (few, many)]
    assert instructions[1] <= 1.01 * instructions[0]


@pytest.mark.parametrize("schedule", ["zbh1", "dualpipev"])
def test_ranks_of_different_stages_meet_in_the_exchange_alone(compiled, schedule):
    """Each collective-permute is in a branch of the tick's one conditional, which has a branch for
    each pattern of the table; attention's own exchange, within a stage, is an all-to-all in the
    loops of the cells."""
    table, program = compiled(schedule, 8)
    bodies = computations(program.as_text())
    sending = {
        name for name, body in bodies.items() if re.search(r"collective-permute(-start)?\(", body)
    }
    branches = [
        re.findall(r"%?([\w.\-]+)", listed)
        for body in bodies.values()
        for listed in re.findall(r"branch_computations=\{([^}]*)\}", body)
    ]
    assert len(branches) == 1
    assert len(branches[0]) == len(table.patterns)
    assert sending == set(branches[0][1:])  # the first is the empty pattern
    meeting = {name for name, body in bodies.items() if " all-to-all(" in body}
    assert meeting
    assert meeting.isdisjoint(sending)
    pairs = re.findall(r"source_target_pairs=\{(\{.*?\})\}", program.as_text())
    for listed in pairs:
        for source, target in re.findall(r"\{(\d+),(\d+)\}", listed):
            assert abs(int(source) - int(target)) == 2, "pp is the outer axis, cp the inner"


def test_gpu_program_copies_no_ring(small_config, compiled_for_h200):
    """Unrolled layers, pairs F|BW: cells read and write slots of the rings in place. Rings have 4
    slots, of a size that nothing else has."""
    config = small_config(
        "llama",
        model={"num_layers": 2, "attention_implementation": "xla"},
        parallel={"pp": 2},
        pipeline={"schedule": "1f1b", "cells": "joint"},
        training={
            "compute_dtype": "bfloat16",
            "scan_layers": False,
            "num_microbatches": 8,
            "global_batch_size": 8,
        },
    )
    text = compiled_for_h200(config)
    assert re.search(r"bf16\[4,\d+\]\S* (fusion|dynamic-update-slice)\(", text), "rings as expected"
    copied = re.findall(r"= bf16\[4,\d+\]\S* copy\(%(\S+)\)", text)
    assert all(source.startswith("broadcast") for source in copied), "other than their first zeros"
