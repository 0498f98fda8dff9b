"""What `--plan` says of a pipeline, against sums done by hand. Nothing is compiled."""

import dataclasses
import json

import jax
import pytest

from mxjax.training.flops import parameter_counts
from mxjax.training.pipeline_plan import as_lines, pipeline_plan
from mxjax.training.plan import gradients_by_part, weights_for_compute
from mxjax.training.programs import Programs


@pytest.fixture(scope="module")
def programs_of(small_config, mesh_of):
    """Settings of a pipeline of 2 ranks over 3 layers, the first dense -> its programs."""

    def make(pipeline, **parallel):
        config = small_config(
            "mixtral",
            model={"num_layers": 3},
            moe={"first_k_dense": 1},
            parallel={"pp": 2, **parallel},
            training={"num_microbatches": 4},
            pipeline=pipeline,
        )
        return Programs(config, mesh_of(config))

    return make


@pytest.fixture(scope="module")
def dualpipev(programs_of):
    return programs_of({"schedule": "dualpipev", "empty_layers": "auto", "costs": (1, 1, 1)})


def plan_of(programs):
    return pipeline_plan(programs.config, programs.objective, stagewise=False)


def sizes_of(programs):
    return {name: part.num_parameters for name, part in programs.objective.model.parts.items()}


def test_the_busier_rank_waits_for_the_first_round_of_the_other(programs_of):
    """1F1B, 2 + 1 layers, 4 microbatches, forward 1 and backward 2 a layer."""
    plan = plan_of(
        programs_of({"costs": (1, 1, 1), "cells": "full", "num_layers_in_first_pipeline_stage": 2})
    )
    layer = 2 / 3  # costs are those of a rank's layers, 1.5 on average
    assert plan.ideal == pytest.approx(4 * 3)
    # Rank 0 has a second forward of its own to do until the first backward comes back.
    assert plan.makespan == pytest.approx(layer * (4 * 3 * 2 + 3 - 2))
    assert plan.bubble == pytest.approx(1 - plan.ideal / plan.makespan)
    assert plan.makespan_of_ticks >= plan.makespan
    assert (plan.schedule, plan.cells, plan.chunks, plan.microbatches) == ("1f1b", "full", 1, 4)
    assert [rank.stages for rank in plan.ranks] == ["embedding, layers 0-1", "layer 2, loss"]
    assert [rank.activations_until_w for rank in plan.ranks] == [2, 1]


def test_spare_parameters_are_the_places_without_layer_and_the_copies(dualpipev):
    """Stages of dualpipev: layer 0 (dense), 1, 2, none; so rank 0 has a place for a dense layer
    that rank 1 lacks, and rank 1 has one for each of its MoE layers, of which rank 0 uses none."""
    plan, sizes = plan_of(dualpipev), sizes_of(dualpipev)
    assert [rank.stages for rank in plan.ranks] == [
        "embedding, layer 0 | 1 empty, loss",
        "layer 1 | layer 2",
    ]
    assert plan.spare_parameters.empty_places == sizes["dense_layers"] + sizes["moe_layers"]
    assert plan.spare_parameters.embedding_and_head == sizes["embedding"] + sizes["head"]


def test_empty_places_count_as_state_but_not_as_parameters(dualpipev):
    config, state = dualpipev.config, dualpipev.abstract_state
    count, spare = sum(sizes_of(dualpipev).values()), plan_of(dualpipev).spare_parameters
    assert count == parameter_counts(config.model, config.moe).total
    stored = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert stored == count + spare.empty_places


def test_memory_of_a_rank_has_its_places_and_all_of_embedding_and_head(programs_of):
    """bf16 compute, pp 2 alone: a rank's layers are copied in bf16 and its accumulators are fp32;
    embedding and head are whole in both, also with ZeRO 3, where they are not gathered by layer."""
    pipeline = {"schedule": "dualpipev", "empty_layers": "auto"}
    for stage in (1, 3):
        programs = programs_of(pipeline, zero_stage=stage)
        config = programs.config
        training = dataclasses.replace(config.training, compute_dtype="bfloat16")
        programs = Programs(dataclasses.replace(config, training=training), programs.mesh)
        sizes = sizes_of(programs)
        outside = sizes["embedding"] + sizes["head"]
        layers = (
            sizes["dense_layers"] + sizes["moe_layers"]
        )  # a place for the one, two for the other
        copies = weights_for_compute(programs.objective, programs.abstract_state.params)
        held = layers if stage == 1 else sizes["moe_layers"] // 2
        own = outside // 2 if stage == 1 else 0  # a rank's shard of them stays from step to step
        assert copies == pytest.approx(2 * (outside + held + own), rel=0.02), "fp32 routers are few"
        assert sum(gradients_by_part(programs).values()) == 4 * (outside + layers)


def test_it_is_json_and_every_figure_is_named(dualpipev):
    plan = plan_of(dualpipev)
    assert json.loads(json.dumps(dataclasses.asdict(plan)))["rings"] == plan.rings
    text = "\n".join(as_lines(plan))
    for words in ("dualpipev", "bubble", "x ideal", "residuals.moe_layers", "1 empty, loss"):
        assert words in text
    assert "those of executor one_program" not in text
    other = as_lines(dataclasses.replace(plan, executor="stagewise"))
    assert "those of executor one_program" in "\n".join(other)
