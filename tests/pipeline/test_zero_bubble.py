"""Searched orders against ZB-H1, the table of the authors' own search, and lower bounds."""

from pathlib import Path

import pytest

from mxjax.pipeline.schedule import Schedule, ScheduleError
from mxjax.pipeline.schedules import make_schedule
from mxjax.pipeline.simulate import Costs, simulate
from mxjax.pipeline.validate import problems
from mxjax.pipeline.zero_bubble import search_zero_bubble

GOLDEN = Path(__file__).parent.parent / "data" / "schedules"


@pytest.mark.parametrize("costs", [Costs(1, 1.5, 0.7, transfer=0.1), Costs(1, 0, 0.5)], ids=str)
@pytest.mark.parametrize("limit", [1, 3, 4, 5, 8])
def test_orders_can_run_and_hold_no_more_than_allowed(limit, costs):
    """Also where input gradients take no time, so that they arrive at once."""
    schedule = search_zero_bubble(4, 6, costs, limit)
    assert problems(schedule) == []
    assert max(simulate(schedule).activations_until_W) <= limit


@pytest.mark.parametrize("costs", [Costs(), Costs(1, 1.2, 0.8), Costs(1, 2, 1, transfer=0.1)])
def test_no_limit_makes_an_order_slower_than_a_smaller_one(costs):
    times = [simulate(make_schedule("zbh1", 4, 8), costs).makespan]
    times += [simulate(search_zero_bubble(4, 8, costs, n), costs).makespan for n in (4, 6, 8)]
    assert times == sorted(times, reverse=True)


def test_twice_the_activations_leave_only_the_start_of_one_rank_after_the_other():
    for costs in (Costs(), Costs(1, 1.2, 0.8), Costs(1, 2, 1)):
        result = simulate(search_zero_bubble(4, 8, costs, 8), costs)
        assert result.bubble == pytest.approx(3 * costs.F)


def test_is_as_good_as_the_order_that_the_authors_search_found():
    for table, limit in (("zb1p_sail_r4_m8", 4), ("zb2p_sail_r4_m8", 8)):
        theirs = simulate(Schedule.load(GOLDEN / f"{table}.json"))
        ours = simulate(search_zero_bubble(4, 8, Costs(), limit))
        assert ours.makespan == theirs.makespan
        assert max(ours.activations_until_W) <= max(theirs.activations_until_W)


def test_no_activation_at_all_is_refused():
    with pytest.raises(ScheduleError, match="max_activations: 0 is below 1"):
        search_zero_bubble(4, 8, Costs(), 0)
