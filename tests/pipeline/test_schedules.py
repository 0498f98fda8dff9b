"""Generators against tables that other projects' code wrote, and what `make_schedule` refuses."""

import json
from pathlib import Path

import pytest

from mxjax.pipeline.schedule import Kind, Op, Schedule, ScheduleError, format_cell, parse_cell
from mxjax.pipeline.schedules import SCHEDULES, forward_only, make_schedule, split_backward
from mxjax.pipeline.validate import problems

GOLDEN = Path(__file__).parent.parent / "data" / "schedules"

TABLES = {
    "gpipe_r4_m8": "gpipe",
    "1f1b_r4_m8": "1f1b",
    "interleaved1f1b_r4_m8_v2": "interleaved",
    "zb1p_torch_r4_m8_v1": "zbh1",
    "zb1p_sail_r4_m8": "zbh1",
    "zb_jaxpp_r4_m8": "zbh1",
    "zbv_torch_r4_m8": "zbv",
    "dualpipev_torch_r4_m10": "dualpipev",
    "dualpipev_torch_r2_m6": "dualpipev",
    "dualpipev_deepseek_r4_m10": "dualpipev",
    "dualpipev_deepseek_r2_m4": "dualpipev",
}


def orders(schedule):
    """What a rank does, as text."""
    return [" ".join(map(format_cell, cells)) for cells in schedule.cells]


@pytest.mark.parametrize("table", TABLES)
def test_equals_the_table_of_the_reference_implementation(table):
    golden = json.loads((GOLDEN / f"{table}.json").read_text())
    schedule = make_schedule(TABLES[table], golden["ranks"], golden["microbatches"])
    written = schedule.to_json()
    for key in ("ops", "stage_to_rank", "ranks", "microbatches", "virtual", "format"):
        assert written[key] == golden[key], key


@pytest.mark.parametrize("table", [*TABLES, "zb2p_sail_r4_m8"])
def test_every_reference_table_can_run(table):
    assert problems(Schedule.load(GOLDEN / f"{table}.json")) == []


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_run_in_every_form(name, num_ranks):
    for num_microbatches in (1, num_ranks - 1, 2 * num_ranks, 3 * num_ranks, 2 * num_ranks + 1):
        for cells in SCHEDULES[name].cells:
            for num_chunks in (None, 3) if name == "interleaved" else (None,):
                try:
                    schedule = make_schedule(name, num_ranks, num_microbatches, num_chunks, cells)
                except ScheduleError as error:
                    assert error.key == "num_microbatches"  # noqa: PT017
                    assert num_microbatches < 2 * num_ranks or num_microbatches % num_ranks
                else:
                    assert problems(schedule) == []


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 7])
def test_evaluation_schedules_have_forwards_alone_and_can_run(num_microbatches):
    for placement, chunks in (("loop", 1), ("loop", 3), ("v", 2)):
        schedule = forward_only(4, num_microbatches, chunks, placement)
        assert schedule.forward_only
        assert problems(schedule, forward_only=True) == []


def test_split_leaves_pairs_and_order_as_they_are():
    full = make_schedule("dualpipev", 2, 4)
    assert orders(split_backward(full))[0] == (
        "F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 F0.3|BW3.1 F3.2|BW0.0 B3.2 W3.2 F3.3|BW0.1 B3.3 W3.3 "
        "B0.2 W0.2 B0.3 W0.3"
    )
    assert make_schedule("1f1b", 4, 8, cells="split") == split_backward(make_schedule("1f1b", 4, 8))


def test_joint_form_overlaps_each_backward_of_the_steady_state_with_a_forward():
    assert orders(make_schedule("1f1b", 2, 5, cells="joint")) == [
        "F0.0 F0.1 F0.2 F0.3|BW0.0 F0.4|BW0.1 BW0.2 BW0.3 BW0.4",
        "F1.0 F1.1|BW1.0 F1.2|BW1.1 F1.3|BW1.2 F1.4|BW1.3 BW1.4",
    ]
    plain = make_schedule("interleaved", 4, 8)
    joint = make_schedule("interleaved", 4, 8, cells="joint")
    for rank in range(4):
        kinds = [[op for op in s.ops(rank) if op.kind is Kind.F] for s in (plain, joint)]
        assert kinds[0] == kinds[1]
        warmup = [len(cell) for cell in joint.cells[rank]].index(2)
        assert warmup == [op.kind for op in plain.ops(rank)].index(Kind.BW)


@pytest.mark.parametrize("text", ["F0.0", "B12.3", "W1.10", "BW7.4", "F4.3|BW7.1", "F4.3|B7.1"])
def test_cells_are_read_as_they_are_written(text):
    assert format_cell(parse_cell(text)) == text


@pytest.mark.parametrize("text", ["", "X1.2", "F1", "F1.2.3", "BW1.2|F3.4", "F1.2|W3.4", "F-1.2"])
def test_other_cells_are_refused_with_what_they_say(text):
    with pytest.raises(ScheduleError, match="cell " + repr(text).replace("|", r"\|")):
        parse_cell(text)


def test_dependencies_are_the_stage_before_the_stage_after_and_the_own_forward():
    assert Op(Kind.F, 0, 1).dependencies(4) == ()
    assert Op(Kind.F, 2, 1).dependencies(4) == (Op(Kind.F, 1, 1),)
    assert Op(Kind.BW, 2, 1).dependencies(4) == (Op(Kind.F, 2, 1), Op(Kind.B, 3, 1))
    assert Op(Kind.B, 3, 1).dependencies(4) == (Op(Kind.F, 3, 1),)
    assert Op(Kind.W, 3, 1).dependencies(4) == (Op(Kind.B, 3, 1),)


def test_a_schedule_knows_the_chunks_of_its_ranks():
    schedule = make_schedule("dualpipev", 4, 8)
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [schedule.chunk_of(stage) for stage in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (schedule.num_stages, schedule.num_chunks) == (8, 2)


def test_a_schedule_file_is_read_back_as_it_was(tmp_path):
    schedule = make_schedule("interleaved", 2, 4, 3, "joint")
    schedule.save(tmp_path / "schedule.json")
    assert Schedule.load(tmp_path / "schedule.json") == schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ops": None}, "schedule without ops"),
        ({"ops": {"0": [], "2": []}}, "ops: has keys 0, 2; expected 0 to 1"),
        ({"ops": {"0": [], "1": ["F0.0", "Z1.1"]}}, "ops of rank 1: cell 'Z1.1'"),
        ({"ops": {"0": [], "1": 5}}, "ops of rank 1: 5 is not a list of cells"),
        ({"ops": {"0": "F0.0", "1": []}}, "ops of rank 0: 'F0.0' is not a list of cells"),
        ({"ranks": "2"}, "ranks: '2' is not a whole number"),
        ({"ranks": 10**9}, "ranks: 1000000000, but ops has orders of 2"),
        ({"microbatches": 0}, "microbatches: 0 is not"),
        ({"microbatches": 10**9}, "microbatches: 1000000000, but ops has only 8 cells"),
        ({"schedule": 3}, "schedule: 3 is not a name"),
        (
            {"stage_to_rank": {"0": 0, "1": 2}},
            "stage_to_rank of stage 1: 2 is none of ranks 0 to 1",
        ),
        ({"stage_to_rank": {"0": 0, "2": 1}}, "stage_to_rank: has keys 0, 2; expected 0 to 1"),
    ],
)
def test_a_bad_schedule_file_is_refused_by_name_and_key(tmp_path, change, message):
    data = make_schedule("1f1b", 2, 2).to_json() | change
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    with pytest.raises(ScheduleError) as error:
        Schedule.load(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        (("zb", 4, 8), "schedule", "there is no 'zb'; there are gpipe, 1f1b"),
        (("1f1b", 0, 8), "num_ranks", "0 is below 1"),
        (("1f1b", 4, 0), "num_microbatches", "0 is below 1"),
        (("1f1b", 4, 8, 2), "num_chunks", "1f1b has 1 chunk a rank, not 2; interleaved"),
        (("1f1b", 10**22, 3), "num_ranks", "more than the 500,000 forwards"),
        (("zbh1", 2, 10**6), "num_microbatches", "more than the 500,000 forwards"),
        (("interleaved", 2, 4, 10**6), "num_chunks", "more than the 500,000 forwards"),
        (("dualpipev", 4, 8, 3), "num_chunks", "dualpipev has 2 chunks a rank, not 3"),
        (("interleaved", 4, 8, 1), "num_chunks", "needs 2 or more, not 1; 1f1b"),
        (("interleaved", 4, 6), "num_microbatches", "6 is not a multiple of the 4 ranks.* 8 or 4"),
        (("dualpipev", 4, 7), "num_microbatches", "7, but dualpipev on 4 ranks needs at least 8"),
        (("zbv", 4, 6), "num_microbatches", "6, but zbv on 4 ranks needs at least 7"),
        (("zbh1", 4, 8, None, "split"), "cells", "zbh1 has no form 'split'; it has full"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused_with_the_way_out(arguments, key, message):
    with pytest.raises(ScheduleError, match=message) as error:
        make_schedule(*arguments)
    assert error.value.key == key
