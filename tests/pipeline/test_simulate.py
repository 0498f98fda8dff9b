"""The simulator against recorded figures, the papers' formulas and a measured column."""

import json
from pathlib import Path

import pytest

from mxjax.pipeline.schedule import Schedule, ScheduleError
from mxjax.pipeline.schedules import forward_only, make_schedule
from mxjax.pipeline.simulate import Costs, simulate

GOLDEN = Path(__file__).parent.parent / "data" / "schedules"
ROWS = json.loads((GOLDEN / "simulated_costs.json").read_text())["rows"]
SIZES = [(2, 4), (2, 10), (4, 8), (4, 12), (8, 16)]
COSTS = [Costs(1, 1, 1), Costs(1, 1.2, 0.8), Costs(1, 2, 1)]


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda r: f"{r['schedule']}-{r['ranks']}-{r['microbatches']}"
)
def test_equals_the_figures_of_another_simulator(row):
    name = {"vpp": "interleaved"}.get(row["schedule"], row["schedule"])
    schedule = make_schedule(name, row["ranks"], row["microbatches"])
    result = simulate(schedule, Costs(row["F"], row["B"], row["W"]))
    assert result.makespan == pytest.approx(row["makespan"])
    assert result.ideal == pytest.approx(row["ideal"])
    assert result.bubble == pytest.approx(row["bubble"])
    assert list(result.activations_until_B) == row["peak_inflight_chunks_F_to_B"]
    assert list(result.activations_until_W) == row["peak_inflight_chunks_F_to_W"]
    assert [len(cells) for cells in schedule.cells] == row["n_cells"]


BUBBLES = {
    # name, chunks, cells: bubble of P ranks with forward F, input gradient B, weight gradient W
    ("gpipe", 1, "full"): lambda P, F, B, W: (P - 1) * (F + B + W),
    ("gpipe", 1, "split"): lambda P, F, B, W: (P - 1) * (F + B),
    ("1f1b", 1, "full"): lambda P, F, B, W: (P - 1) * (F + B + W),
    ("1f1b", 1, "split"): lambda P, F, B, W: (P - 1) * (F + B),
    ("1f1b", 1, "joint"): lambda P, F, B, W: (P - 1) * (F + B + W),
    ("interleaved", 2, "full"): lambda P, F, B, W: (P - 1) * (F + B + W) / 2,
    ("interleaved", 3, "full"): lambda P, F, B, W: (P - 1) * (F + B + W) / 3,
    ("interleaved", 2, "split"): lambda P, F, B, W: (P - 1) * (F + B) / 2,
    ("interleaved", 2, "joint"): lambda P, F, B, W: (P - 1) * (F + B + W) / 2,
    ("interleaved", 4, "joint"): lambda P, F, B, W: (P - 1) * (F + B + W) / 4,
    ("zbh1", 1, "full"): lambda P, F, B, W: (P - 1) * (F + B - W),
}


@pytest.mark.parametrize("form", BUBBLES, ids=str)
def test_bubble_follows_the_formula_of_the_paper(form):
    name, chunks, cells = form
    for num_ranks, num_microbatches in SIZES:
        for costs in COSTS:
            result = simulate(
                make_schedule(name, num_ranks, num_microbatches, chunks, cells), costs
            )
            formula = BUBBLES[form](num_ranks, costs.F, costs.B, costs.W)
            assert result.bubble == pytest.approx(formula), (num_ranks, num_microbatches, costs)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_dualpipev_bubble_is_that_of_its_authors_at_most(num_ranks, num_microbatches):
    for costs in COSTS:
        result = simulate(make_schedule("dualpipev", num_ranks, num_microbatches), costs)
        f, b, w = costs.F / 2, costs.B / 2, costs.W / 2  # of a chunk
        formula = (num_ranks - 1) * ((f + b + w) + (b + w) - 3 * w)
        if costs.F == costs.B == costs.W:
            assert result.bubble == pytest.approx(formula)
        assert result.bubble <= formula + 1e-9


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_zbv_leaves_no_gap_on_any_rank_if_all_ops_cost_the_same(num_ranks, num_microbatches):
    result = simulate(make_schedule("zbv", num_ranks, num_microbatches))
    assert result.spans == pytest.approx([result.ideal] * num_ranks)
    # What is left is that ranks start one after the other.
    assert result.bubble == pytest.approx((num_ranks - 1) / 2)


def test_zb2p_needs_three_units_a_microbatch_as_its_authors_found():
    result = simulate(Schedule.load(GOLDEN / "zb2p_sail_r4_m8.json"))
    assert max(result.spans) == 24
    assert max(result.activations_until_W) == 8


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_activations_follow_the_formulas(num_ranks, num_microbatches):
    P = num_ranks

    def held(name, chunks=None, cells="full"):
        result = simulate(make_schedule(name, P, num_microbatches, chunks, cells))
        return list(result.activations_until_B), list(result.activations_until_W)

    descending = [P - rank for rank in range(P)]
    assert held("gpipe") == ([num_microbatches] * P,) * 2
    assert held("1f1b") == (descending,) * 2
    assert held("1f1b", cells="joint") == ([min(2 * n, num_microbatches) for n in descending],) * 2
    assert held("zbh1") == (descending, [P] * P)
    assert held("dualpipev") == ([2 * P + 1] * P,) * 2
    assert max(held("zbv")[1]) == 2 * P
    for chunks in (2, 3):
        plain, joint = held("interleaved", chunks), held("interleaved", chunks, "joint")
        assert max(plain[0]) == P * chunks + P - 1
        assert max(joint[0]) == P * chunks + P


@pytest.mark.parametrize(
    ("name", "cells", "measured"),
    [
        ("gpipe", "full", 1.063),
        ("1f1b", "full", 1.063),
        ("1f1b", "split", 1.076),
        ("1f1b", "joint", 1.062),
        ("zbh1", "full", 1.057),
        ("dualpipev", "full", 1.022),
    ],
)
def test_measured_costs_of_a_layer_give_the_slowdown_computed_beside_the_measurement(
    name, cells, measured
):
    # Four layers of hidden size 4096 on each of two H200, 16 microbatches, milliseconds.
    costs = Costs(F=14.1, B=17.4, W=15.7, BW=31.6)
    result = simulate(make_schedule(name, 2, 16, cells=cells), costs)
    assert result.slowdown == pytest.approx(measured, abs=6e-4)


def test_transfers_delay_what_comes_after_them_and_nothing_else():
    # Two ranks, one microbatch: F on both, B on both, and a transfer each way.
    result = simulate(make_schedule("1f1b", 2, 1), Costs(1, 1, 1, transfer=0.25))
    assert result.times == (((0, 1), (4.5, 6.5)), ((1.25, 2.25), (2.25, 4.25)))
    assert result.num_transfers == 2
    # The turn of a V stays on its rank.
    assert simulate(make_schedule("dualpipev", 2, 4)).num_transfers == 4 * 2 * 2
    assert simulate(make_schedule("interleaved", 2, 4)).num_transfers == 4 * 3 * 2
    assert simulate(forward_only(2, 4, 2)).num_transfers == 4 * 3


def test_overlap_shortens_pairs_alone():
    schedule = make_schedule("1f1b", 2, 8, cells="joint")
    result = simulate(schedule, Costs(1, 1, 1, overlap=0.5))
    for cells, times in zip(schedule.cells, result.times, strict=True):
        for cell, (start, end) in zip(cells, times, strict=True):
            expected = 1.5 if len(cell) == 2 else (1 if str(cell[0])[0] == "F" else 2)
            assert end - start == pytest.approx(expected)


def test_embedding_and_head_slow_their_stages_down_and_count_as_work():
    costs = Costs(1, 1, 1, first=(0.5, 0, 0.25), last=(1, 2, 0.5))
    result = simulate(make_schedule("zbh1", 2, 1), costs)
    durations = [[end - start for start, end in rank] for rank in result.times]
    assert durations == [[1.5, 1, 1.25], [2, 3, 1.5]]
    assert result.ideal == pytest.approx((6 + 0.75 + 3.5) / 2)


def test_stages_of_uneven_size_cost_their_share():
    # 3 + 1 layers where a rank has 2 on average.
    result = simulate(make_schedule("gpipe", 2, 1), Costs(2, 2, 2), stage_sizes=[3, 1])
    durations = [[end - start for start, end in rank] for rank in result.times]
    assert durations == [[3, 6], [1, 2]]
    assert result.ideal == 6
    with pytest.raises(ScheduleError, match="3 sizes for 2 stages"):
        simulate(make_schedule("gpipe", 2, 1), stage_sizes=[1, 1, 1])


@pytest.mark.parametrize(
    ("num_ranks", "chunks", "placement"), [(4, 1, "loop"), (4, 2, "loop"), (4, 2, "v")]
)
def test_evaluation_waits_for_the_first_microbatch_alone(num_ranks, chunks, placement):
    result = simulate(forward_only(num_ranks, 8, chunks, placement))
    waits = (num_ranks - 1) / chunks if placement == "loop" else num_ranks - 1
    assert result.makespan == pytest.approx(8 + waits)
    assert result.activations_until_W == (0,) * num_ranks


@pytest.mark.parametrize(
    ("costs", "message"),
    [({"F": -1}, "-1 is not a time"), ({"W": float("nan")}, "nan is not"), ({"F": 0}, "F is 0")],
)
def test_impossible_costs_are_refused(costs, message):
    with pytest.raises(ScheduleError, match=message):
        Costs(**costs)
