"""What the host sends off before what."""

import pytest

from mxjax.pipeline.schedule import Kind
from mxjax.pipeline.schedules import make_schedule
from mxjax.pipeline.send_order import awaited
from mxjax.pipeline.simulate import Costs, simulate

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbh1", "zbv", "dualpipev")


def remote_inputs(schedule, cell, rank):
    """Ops of a cell that take something from another rank, and what makes it."""
    return [
        (part, need)
        for op in cell
        for part in op.parts
        for need in part.dependencies(schedule.num_stages)
        if schedule.stage_to_rank[need.stage] != rank
    ]


@pytest.mark.parametrize("costs", [None, Costs(1, 1.3, 1.15, 2.35), Costs(1, 0, 0)], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_cells_are_sent_off(name, ranks, costs):
    """The host waits for each input once, at the latest where it is needed, and never in a circle;
    also where cells take no time."""
    schedule = make_schedule(name, ranks, 3 * ranks)
    before = awaited(schedule, costs)
    position, sent, waited_for = [0] * ranks, set(), set()
    while any(position[rank] < len(cells) for rank, cells in enumerate(schedule.cells)):
        moved = False
        for rank, cells in enumerate(schedule.cells):
            n = position[rank]
            if n == len(cells):
                continue
            needs = {need for part in before[rank][n] for need in makers(schedule, part, rank)}
            if needs <= sent:
                assert waited_for.isdisjoint(before[rank][n])
                waited_for.update(before[rank][n])
                assert {part for part, _ in remote_inputs(schedule, cells[n], rank)} <= waited_for
                sent.update(part for op in cells[n] for part in op.parts)
                position[rank] += 1
                moved = True
        assert moved, f"ranks wait in a circle at {position}"


def makers(schedule, part, rank):
    return [need for _, need in remote_inputs(schedule, (part,), rank)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_ends_earlier_is_sent_off_earlier(name):
    """A rank's cell waits for the inputs of later ones exactly if they are made by a cell that ends
    before it."""
    schedule, costs = make_schedule(name, 4, 8), Costs(1, 1.31, 1.17)  # no two ends at a time
    times = simulate(schedule, costs).times
    end = {
        part: times[rank][n][1]
        for rank, cells in enumerate(schedule.cells)
        for n, cell in enumerate(cells)
        for op in cell
        for part in op.parts
    }
    for rank, cells in enumerate(schedule.cells):
        for n, parts in enumerate(awaited(schedule, costs)[rank]):
            for made in (end[m] for part in parts for m in makers(schedule, part, rank)):
                assert made < times[rank][n][1] + 1e-9
                assert n == 0 or made > times[rank][n - 1][1] - 1e-9
        assert len(cells) == len(times[rank])


def test_a_pair_of_dualpipev_is_sent_off_after_the_input_of_the_next():
    """Two ranks that run pairs beside each other: the second one's next pair needs what the first
    one makes meanwhile."""
    schedule = make_schedule("dualpipev", 2, 8)
    before = awaited(schedule, Costs(1, 1.3, 1.15, 2.35))[1]
    pairs = [n for n, cell in enumerate(schedule.cells[1]) if len(cell) == 2]
    for n in pairs[:-1:2]:  # F2|BW1, and then F1|BW2
        later = {part for part, _ in remote_inputs(schedule, schedule.cells[1][n + 1], 1)}
        assert {(part.kind, part.stage) for part in later} == {(Kind.F, 1), (Kind.B, 2)}
        assert set(before[n]) == later
