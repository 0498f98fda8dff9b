"""Each way to write a schedule wrongly, and that the message says what and where."""

from dataclasses import replace

import pytest

from mxjax.pipeline.schedule import Schedule, ScheduleError, parse_cell
from mxjax.pipeline.schedules import forward_only, make_schedule
from mxjax.pipeline.validate import execution_order, problems, validate


def write(*orders, microbatches=2, stage_to_rank=None):
    """A schedule out of one line of text for each rank."""
    cells = tuple(tuple(parse_cell(text) for text in order.split()) for order in orders)
    placement = stage_to_rank or tuple(range(len(orders)))
    return Schedule("mine", len(orders), microbatches, placement, cells)


def test_a_schedule_written_by_hand_passes():
    validate(write("F0.0 F0.1 B0.0 B0.1 W0.0 W0.1", "F1.0 F1.1|BW1.0 BW1.1"))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            write("F0.0 F0.1 BW0.0 BW0.1", "F1.0 F1.1 BW1.0"),
            "rank 1: no input gradient of microbatch 1 in stage 1",
        ),
        (
            write("F0.0 B0.0", microbatches=1),
            "rank 0: no weight gradient of microbatch 0 in stage 0",
        ),
        (
            write("F0.0 BW0.0 W0.0", microbatches=1),
            "rank 0: weight gradient of microbatch 0 in stage 0 more than once, in cell 1 (BW0.0) "
            "and cell 2 (W0.0)",
        ),
        (
            write("F0.0 F0.0 BW0.0", microbatches=1),
            "forward of microbatch 0 in stage 0 more than once, in cell 0 (F0.0) and cell 1 (F0.0)",
        ),
        (
            write("F0.0 W0.0 B0.0", microbatches=1),
            "rank 0, cell 1 (W0.0): needs B0.0, which comes later, in cell 2",
        ),
        (
            write("BW0.0 F0.0", microbatches=1),
            "rank 0, cell 0 (BW0.0): needs F0.0, which comes later, in cell 1",
        ),
        (
            write("F0.0|BW0.0", microbatches=1),
            "rank 0, cell 0 (F0.0|BW0.0): BW0.0 needs F0.0, so they cannot overlap",
        ),
        (
            write("F0.1 F0.0 BW0.0 BW0.1"),
            "rank 0, cell 1 (F0.0): forward of microbatch 0 after that of 1",
        ),
        (
            write("F0.0 F0.1 B0.0 B0.1 W0.1 W0.0"),
            "rank 0, cell 5 (W0.0): weight gradient of microbatch 0 after that of 1",
        ),
        (
            write("F0.0 F1.0 BW0.0", "BW1.0", microbatches=1),
            "rank 0, cell 1 (F1.0): stage 1 lies on rank 1",
        ),
        (
            write("F0.0 F0.1 BW0.0 BW0.1", microbatches=1),
            "rank 0, cell 1 (F0.1): microbatches are 0 to 0",
        ),
        (write("F0.0 F1.0 BW0.0", microbatches=1), "(F1.0): stages are 0 to 0"),
        (
            write("F0.0", "F1.0", microbatches=1, stage_to_rank=(0, 0)),
            "gives the ranks [2, 0] stages",
        ),
        (write("F0.0", microbatches=1, stage_to_rank=(1,)), "names rank 1; there are 0 to 0"),
    ],
)
def test_a_mistake_is_named_with_rank_and_cell(schedule, message):
    with pytest.raises(ScheduleError) as error:
        validate(schedule)
    assert "schedule mine cannot run:" in str(error.value)
    assert message in str(error.value)


def test_ranks_that_wait_for_each_other_are_named():
    schedule = write(
        "F0.0 F3.0 BW3.0 BW0.0 F0.1 F3.1 BW3.1 BW0.1",
        "F1.0 F1.1 F2.0 F2.1 BW2.0 BW1.0 BW2.1 BW1.1",
        stage_to_rank=(0, 1, 1, 0),
    )
    assert problems(schedule) == [
        "deadlock: rank 0 waits in cell 1 (F3.0) for F2.0, rank 1 waits in cell 1 (F1.1) for F0.1:"
        " a circle"
    ]


def test_waiting_for_work_that_nobody_does_is_told_apart_from_a_circle():
    with pytest.raises(ScheduleError, match=r"\(BW0.0\) for B1.0, which rank 1 never does"):
        execution_order(write("F0.0 BW0.0", "F1.0", microbatches=1))


def test_execution_order_has_each_cell_after_all_that_it_needs():
    schedule = make_schedule("dualpipev", 4, 10)
    done = set()
    for rank, number in execution_order(schedule):
        for op in schedule.cells[rank][number]:
            assert done.issuperset(op.dependencies(schedule.num_stages))
        done.update(part for op in schedule.cells[rank][number] for part in op.parts)
    assert len(done) == 3 * 8 * 10


def test_an_evaluation_schedule_is_not_taken_for_a_training_schedule_nor_the_reverse():
    assert "no input gradient" in problems(forward_only(2, 2))[0]
    assert "backward work" in problems(make_schedule("1f1b", 2, 2), forward_only=True)[0]


def test_a_long_list_of_problems_is_cut():
    schedule = make_schedule("gpipe", 2, 64)
    broken = replace(schedule, cells=(schedule.cells[0], ()))
    with pytest.raises(ScheduleError, match=r"and 172 more$"):
        validate(broken)
