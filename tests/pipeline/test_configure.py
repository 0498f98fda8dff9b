"""From a configuration to layout, schedule and table, and what it refuses."""

import pytest

from mxjax.config.rules.registry import RULES
from mxjax.pipeline.configure import (
    evaluation_table,
    num_chunks,
    stage_layout,
    stagewise_schedule,
    training_schedule,
    training_table,
)
from mxjax.pipeline.simulate import Costs, simulate
from mxjax.pipeline.ticks import compile_ticks, time_of_ticks
from mxjax.training.pipelined import layer_stacks


@pytest.fixture
def config_of(small_config):
    """(layers, pp, settings of `pipeline`, microbatches) -> configuration."""

    def make(layers, pp, pipeline, num_microbatches=8, shape="llama", model=None, **parallel):
        training = {"num_microbatches": num_microbatches, "global_batch_size": 2 * num_microbatches}
        model = {"num_layers": layers} | (model or {})
        parallel = {"pp": pp} | parallel
        return small_config(
            shape, model=model, parallel=parallel, training=training, pipeline=pipeline
        )

    return make


def problems(config):
    return [(key, text) for rule in RULES for key, text in rule(config)]


@pytest.mark.parametrize(
    ("pipeline", "chunks"),
    [
        ({"schedule": "1f1b"}, 1),
        ({"schedule": "gpipe"}, 1),
        ({"schedule": "zbh1"}, 1),
        ({"schedule": "interleaved"}, 2),
        ({"schedule": "interleaved", "vpp": 4}, 4),
        ({"schedule": "interleaved", "layout": "Et|t|t|t|t|t|t|tL"}, 4),
        ({"schedule": "zbv"}, 2),
        ({"schedule": "dualpipev"}, 2),
    ],
    ids=str,
)
def test_chunks_are_as_the_schedule_has_them(config_of, pipeline, chunks):
    config = config_of(8, 2, pipeline)
    assert problems(config) == []
    assert num_chunks(config) == chunks
    schedule, layout = training_schedule(config), stage_layout(config)
    assert schedule.num_chunks == layout.num_chunks == chunks
    assert schedule.stage_to_rank == layout.stage_to_rank


REFUSED = {
    "chunks that the schedule has not": (
        {"layers": 8, "pp": 2, "pipeline": {"schedule": "1f1b", "vpp": 2}},
        "pipeline.vpp",
        "interleaved is 1f1b with several",
    ),
    "one chunk interleaved": (
        {"layers": 8, "pp": 2, "pipeline": {"schedule": "interleaved", "vpp": 1}},
        "pipeline.vpp",
        "1f1b is the same with 1",
    ),
    "a V of three": (
        {"layers": 12, "pp": 2, "pipeline": {"schedule": "dualpipev", "vpp": 3}},
        "pipeline.vpp",
        "has 2 chunks a rank, not 3",
    ),
    "layers that do not divide": (
        {"layers": 7, "pp": 2, "pipeline": {}},
        "model.num_layers",
        "set pipeline.empty_layers to auto",
    ),
    "layers that do not divide with empty ones": (
        {"layers": 7, "pp": 4, "pipeline": {"empty_layers": (1, 2)}},
        "pipeline.empty_layers",
        "7 layers + 2 empty = 9",
    ),
    "a layout with too many stages": (
        {"layers": 4, "pp": 2, "pipeline": {"layout": "Et|t|t|tL"}},
        "pipeline.layout",
        "has 4 stages, but 2 ranks x 1 = 2; change the string",
    ),
    "a layout with other layers": (
        {"layers": 4, "pp": 2, "pipeline": {"layout": "Et|tL"}},
        "pipeline.layout",
        "num_layers is 4; change one",
    ),
    "first stage too large": (
        {"layers": 4, "pp": 2, "pipeline": {"num_layers_in_first_pipeline_stage": 5}},
        "pipeline.num_layers_in_first_pipeline_stage",
        "change one of them",
    ),
    "interleaved groups": (
        {"layers": 8, "pp": 2, "pipeline": {"schedule": "interleaved"}, "num_microbatches": 3},
        "training.num_microbatches",
        "take 4 or 2, or 1f1b",
    ),
    "two costs": (
        {"layers": 4, "pp": 2, "pipeline": {"costs": (1.0, 2.0)}},
        "pipeline.costs",
        "2 numbers; give F, B, W",
    ),
    "both gradients for nothing": (
        {"layers": 4, "pp": 2, "pipeline": {"costs": (1.0, 1.0, 1.0, 0.0)}},
        "pipeline.costs",
        "BW is 0",
    ),
    "a layout with one stage a rank for several chunks": (
        {"layers": 4, "pp": 2, "pipeline": {"schedule": "interleaved", "layout": "Ett|ttL"}},
        "pipeline.layout",
        "has 2 stages for 2 ranks, but interleaved needs 2 or more, not 1",
    ),
    "a layout that is none, for several chunks": (
        {"layers": 4, "pp": 2, "pipeline": {"schedule": "interleaved", "layout": "Ex|tL"}},
        "pipeline.layout",
        "'x' in 'Ex|tL' is not expected",
    ),
    "chunks of a searched order": (
        {"layers": 4, "pp": 2, "pipeline": {"schedule": "zbh1", "max_activations": 2, "vpp": 2}},
        "pipeline.vpp",
        "zbh1 has 1 chunk a rank, not 2",
    ),
    "cells of a searched order": (
        {"layers": 4, "pp": 2, "pipeline": {"schedule": "zbh1", "max_activations": 2, "cells": "joint"}},
        "pipeline.cells",
        "zbh1 has no form 'joint'",
    ),
    "activations of an order that is not searched": (
        {"layers": 4, "pp": 2, "pipeline": {"schedule": "1f1b", "max_activations": 4}},
        "pipeline.max_activations",
        "set pipeline.schedule to zbh1",
    ),
    "a rank that would have nothing to do": (
        {
            "layers": 4,
            "pp": 3,
            "pipeline": {
                "num_layers_in_first_pipeline_stage": 2,
                "num_layers_in_last_pipeline_stage": 2,
            },
        },
        "pipeline.num_layers_in_first_pipeline_stage",
        "leaves rank 1 with nothing to compute: 4 layers lie on other ranks; give it layers, or"
        " lower parallel.pp",
    ),
    "too few microbatches for dualpipev": (
        {"layers": 8, "pp": 2, "pipeline": {"schedule": "dualpipev"}, "num_microbatches": 3},
        "training.num_microbatches",
        "needs at least 4; take more, or zbh1 or 1f1b",
    ),
    "too few microbatches for zbv": (
        {"layers": 8, "pp": 2, "pipeline": {"schedule": "zbv"}, "num_microbatches": 2},
        "training.num_microbatches",
        "needs at least 3; take more",
    ),
    "a form that the schedule has not": (
        {"layers": 8, "pp": 2, "pipeline": {"schedule": "zbh1", "cells": "joint"}},
        "pipeline.cells",
        "it has full",
    ),
    "ring attention by ppermute": (
        {"layers": 2, "pp": 2, "pipeline": {}, "cp": 2},
        "parallel.cp_rotation",
        "set it to alltoall, or parallel.cp_method to allgather",
    ),
    "prediction of later tokens away from the loss": (
        {"layers": 4, "pp": 2, "pipeline": {"layout": "Ettttm|L"}, "shape": "deepseek_v3"},
        "pipeline.layout",
        "move m to the last stage",
    ),
    "a hidden size that ZeRO cannot divide": (
        {"layers": 4, "pp": 4, "pipeline": {}, "model": {"hidden_size": 12, "num_attention_heads": 2}, "dp": 2, "zero_stage": 1},
        "model.hidden_size",
        "set parallel.zero_stage to 0 or use other axis sizes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_setting_and_the_way_out(config_of, name):
    arguments, key, way_out = REFUSED[name]
    found = problems(config_of(**arguments))
    assert key in [k for k, _ in found]
    assert any(way_out in text for k, text in found if k == key), found


def test_what_is_left_open_is_the_fastest_by_simulation(config_of):
    """Over `cells` (without joint) and `transfers`; what is given is kept."""
    costs = (1.0, 2.0, 1.0)
    config = config_of(8, 4, {"schedule": "1f1b", "costs": costs})
    stacks = layer_stacks(config)
    times = {
        (form, deferred): time_of_ticks(
            compile_ticks(training_schedule(config, form), stacks, deferred=deferred), Costs(*costs)
        )
        for form in ("full", "split")
        for deferred in (False, True)
    }
    assert len(set(times.values())) > 1
    chosen = time_of_ticks(training_table(config, stacks), Costs(*costs))
    assert chosen == min(times.values())
    for (form, deferred), time in times.items():
        transfers = "deferred" if deferred else "immediate"
        pipeline = {"schedule": "1f1b", "costs": costs, "cells": form, "transfers": transfers}
        given = config_of(8, 4, pipeline)
        assert time_of_ticks(training_table(given, stacks), Costs(*costs)) == time


def test_ranks_that_do_not_wait_for_each_other_take_the_fastest_by_dependencies(config_of):
    """Of full and split cells; both gradients in one may cost less than one after the other."""
    chosen = {}
    for both in (3.0, 2.2):
        config = config_of(8, 4, {"schedule": "1f1b", "costs": (1.0, 2.0, 1.0, both)})
        schedule, chosen[both] = stagewise_schedule(config, layer_stacks(config))
        times = [
            simulate(training_schedule(config, form), Costs(1.0, 2.0, 1.0, both)).makespan
            for form in ("full", "split")
        ]
        assert simulate(schedule, Costs(1.0, 2.0, 1.0, both)).makespan == min(times)
    assert chosen == {3.0: "split", 2.2: "full"}


def test_zbh1_with_more_activations_is_searched_for_the_costs(config_of):
    costs = (1.0, 1.3, 1.1)
    fixed, searched = (
        config_of(4, 2, {"schedule": "zbh1", "costs": costs, "max_activations": limit})
        for limit in (None, 4)
    )
    assert problems(searched) == []
    times = [
        time_of_ticks(training_table(c, layer_stacks(c)), Costs(*costs)) for c in (fixed, searched)
    ]
    assert times[1] < times[0]


def test_evaluation_takes_any_number_of_microbatches(config_of):
    config = config_of(8, 2, {"schedule": "dualpipev"})
    for number in (1, 5):
        table = evaluation_table(layer_stacks(config), number)
        assert table.forward_only
        assert table.schedule.num_microbatches == number


def test_stacks_follow_the_layer_groups_of_the_model(config_of):
    config = config_of(5, 2, {"empty_layers": "auto"}, shape="deepseek_v3")
    assert dict(layer_stacks(config).kinds) == {"dense_layers": 1, "moe_layers": 4}
    assert dict(layer_stacks(config_of(4, 2, {})).kinds) == {"dense_layers": 4}
