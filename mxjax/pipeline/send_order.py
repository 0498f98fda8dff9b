"""Before the host sends off a cell: which inputs of later cells should be on their way.

A copy to another GPU does not begin before all work has ended that was sent off there earlier,
since the memory that it is written to may be in use until then. So what a rank needs next would
wait for the end of the cell before, although it is there, and its way would take time in which
nobody computes. Here that cell is sent off after the copy.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

from mxjax.pipeline.schedule import Op, Schedule
from mxjax.pipeline.simulate import Costs, simulate
from mxjax.pipeline.validate import execution_order


def awaited(
    schedule: Schedule, costs: Costs | None = None, stage_sizes: Sequence[float] | None = None
) -> list[list[list[Op]]]:
    """For each rank and each of its cells, ops of it and of later cells whose input from another
    rank must have been sent off before: that of a cell which ends earlier, by the simulator.

    Nobody waits in a circle. Of cells that end at the same time the longer one counts as earlier,
    then that of the lower rank, and of such as take no time that which can run first: so a cell is
    never earlier than what it needs.
    """
    found = simulate(schedule, costs, stage_sizes)
    ends = {}
    for i, (rank, n) in enumerate(execution_order(schedule)):
        # Rounded, for sums of the same costs in another order are the same time.
        start, end = (round(time / found.makespan, 9) for time in found.times[rank][n])
        ends[rank, n] = end, start, i if start == end else 0, rank
    of_rank = [[ends[rank, n] for n in range(len(row))] for rank, row in enumerate(schedule.cells)]
    made_by = {
        part: (rank, n)
        for rank, cells in enumerate(schedule.cells)
        for n, cell in enumerate(cells)
        for op in cell
        for part in op.parts
    }
    before: list[list[list[Op]]] = [[[] for _ in cells] for cells in schedule.cells]
    for part, (rank, _) in made_by.items():
        for need in part.dependencies(schedule.num_stages):
            if schedule.stage_to_rank[need.stage] != rank:
                first_later = bisect(of_rank[rank], ends[made_by[need]])
                before[rank][first_later].append(part)
    return before
