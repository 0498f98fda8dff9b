"""Tick tables, played back with names in place of arrays: every op must read what it needs."""

import itertools

import numpy as np
import pytest

from mxjax.pipeline.layout import StageLayout
from mxjax.pipeline.schedule import Kind
from mxjax.pipeline.schedules import SCHEDULES, forward_only, make_schedule
from mxjax.pipeline.simulate import Costs, simulate
from mxjax.pipeline.stacks import Stacks
from mxjax.pipeline.ticks import compile_ticks, time_of_ticks

FORMS = [(name, form) for name, info in SCHEDULES.items() for form in info.cells]
EMPTY = "a slot that was never written"


def stacks_of(schedule, stage_layers):
    """(dense, expert) layers of each stage -> their places."""
    ends = np.cumsum([0, *map(sum, stage_layers)])
    layers = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))
    is_v = schedule.num_ranks > 1 and schedule.stage_to_rank[-1] == 0
    nothing = ((),) * schedule.num_stages
    layout = StageLayout(
        schedule.num_ranks,
        schedule.num_chunks,
        "v" if is_v else "loop",
        layers,
        nothing,
        (0,) * schedule.num_stages,
    )
    dense, experts = (sum(counts[k] for counts in stage_layers) for k in range(2))
    return Stacks(layout, {"dense": dense, "experts": experts})


def even(num_stages):
    return [(1, 0)] + [(0, 1)] * (num_stages - 1)


def uneven(num_stages):
    """Two kinds on one stage, two layers, three, and a stage with none."""
    return [(2, 0), (1, 2), (0, 3), (0, 0)][:num_stages] + [(0, 1)] * (num_stages - 4)


def microbatches(name, P):
    """Fewer than ranks where the schedule allows that, just enough, and many."""
    least = {"zbv": 2 * P - 1, "dualpipev": 2 * P, "interleaved": P}.get(name, 1)
    counts = {least, 2 * P} if name == "interleaved" else {least, P, 2 * P + 3}
    return sorted(M for M in counts if least <= M)


class Player:
    """All ranks of a table in step. Rings hold tuples that name a value: ("x", stage, microbatch)
    the input of a stage, ("g", stage, microbatch) the gradient of its output, (ring, stage,
    microbatch) what its layers leave behind."""

    def __init__(self, table):
        self.table, self.schedule = table, table.schedule
        self.forward_only = table.forward_only
        self.last = self.schedule.num_stages - 1
        self.rings = [
            {ring: [EMPTY] * (n + 1) for ring, n in table.slots.items()}
            for _ in range(self.schedule.num_ranks)
        ]
        self.done = []

    def play(self):
        for tick in range(self.table.num_ticks):
            for rank, rings in enumerate(self.rings):
                row = {name: int(rows[tick, rank]) for name, rows in self.table.rows.items()}
                if row["cell"] >= 0:
                    self._cell(rank, rings, row)
            self._exchange(tick)
        return self

    def _cell(self, rank, rings, row):
        flavour = self.table.flavours[row["cell"]]
        stages = [self.schedule.stages_of(rank)[part.chunk] for part in flavour]
        works = list(zip(flavour, stages, strict=True))
        for part, stage in works:
            assert part.layers == self.table.stacks.stage_layers[stage]
            layers_before = sum(map(sum, self.table.stacks.stage_layers[:stage]))
            letter = part.kind.value[0]
            assert row[f"{letter}.first_layer"] == layers_before
            if part.kind is Kind.F and row["embed"]:
                assert stage == 0
                rings["x"][row["F.x"]] = ("x", 0, row["F.microbatch"])
        for part, stage in works:
            if part.kind is not Kind.W:
                ring, slot, letter = ("x", "F.x", "F") if part.kind is Kind.F else ("g", "B.g", "B")
                assert rings[ring][row[slot]] == (ring, stage, row[f"{letter}.microbatch"])
        # The forward pass of a pair comes first: what it writes must not hit what the other reads.
        for part, stage in works:
            self._layers(part, stage, rings, row)
        for part, stage in works:
            if part.kind is Kind.F:
                rings["x"][row["F.y"]] = ("x", stage + 1, row["F.microbatch"])
            elif part.kind is not Kind.W:
                rings["g"][row["B.dx"]] = ("g", stage - 1, row["B.microbatch"])
        for part, stage in works:
            if part.kind is Kind.F:
                self._head(stage, rings, row)
            elif part.kind is not Kind.W:
                assert row["embed_gradient"] == (stage == 0)
                assert rings["g"][row["B.dx"]] == ("g", stage - 1, row["B.microbatch"])

    def _layers(self, part, stage, rings, row):
        letter = part.kind.value[0]
        microbatch = row[f"{letter}.microbatch"]
        writes, reads = {
            Kind.F: (() if self.forward_only else ("residuals", "kept"), ()),
            Kind.B: (("cut",), ("residuals", "kept")),
            Kind.W: ((), ("kept", "cut")),
            Kind.BW: ((), ("residuals", "kept")),
        }[part.kind]
        for kind in (k for k, n in zip(self.table.stacks.kinds, part.layers, strict=True) if n):
            for name in reads:
                found = rings[f"{name}.{kind}"][row[f"{letter}.{name}.{kind}"]]
                assert found == (name, stage, microbatch)
            for name in writes:
                slot = row[f"{letter}.{name}.{kind}"]
                rings[f"{name}.{kind}"][slot] = (name, stage, microbatch)
        kinds = (Kind.B, Kind.W) if part.kind is Kind.BW else (part.kind,)
        self.done += [(kind, stage, microbatch) for kind in kinds]

    def _head(self, stage, rings, row):
        assert row["embed"] == (stage == 0)
        assert row["head"] == (stage == self.last)
        if stage == self.last:
            assert rings["x"][row["F.y"]] == ("x", stage + 1, row["F.microbatch"])
            if not self.forward_only:
                rings["g"][row["F.g"]] = ("g", stage, row["F.microbatch"])

    def _exchange(self, tick):
        received = []
        for channel, pairs in self.table.patterns[self.table.pattern[tick]]:
            ring = channel[0]
            assert len({source for source, _ in pairs}) == len(pairs)
            assert len({target for _, target in pairs}) == len(pairs)
            for source, target in pairs:
                value = self.rings[source][ring][self.table.rows[f"send.{channel}"][tick, source]]
                slot = self.table.rows[f"receive.{channel}"][tick, target]
                received.append((target, ring, slot, value))
        for target, ring, slot, value in received:
            assert value != EMPTY
            self.rings[target][ring][slot] = value


@pytest.mark.parametrize("deferred", [False, True], ids=["immediate", "deferred"])
@pytest.mark.parametrize("P", [2, 4, 8])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_every_op_finds_what_it_reads(name, form, P, deferred):
    splits = (even, uneven) if P == 2 else (uneven,)
    for M, split in itertools.product(microbatches(name, P), splits):
        schedule = make_schedule(name, P, M, cells=form)
        table = compile_ticks(
            schedule, stacks_of(schedule, split(schedule.num_stages)), deferred=deferred
        )
        done = Player(table).play().done
        wanted = itertools.product((Kind.F, Kind.B, Kind.W), range(schedule.num_stages), range(M))
        assert sorted(done, key=str) == sorted(wanted, key=str)
        assert table.pattern.shape == table.rows["cell"].shape[:1]


@pytest.mark.parametrize("P", [2, 4])
@pytest.mark.parametrize(("V", "placement"), [(1, "loop"), (3, "loop"), (2, "v")])
def test_forward_passes_alone(V, placement, P):
    for M in (1, P, 3 * P + 1):
        schedule = forward_only(P, M, V, placement)
        table = compile_ticks(schedule, stacks_of(schedule, uneven(schedule.num_stages)))
        assert table.forward_only
        assert set(table.slots) == {"x", "g"}
        done = Player(table).play().done
        wanted = itertools.product([Kind.F], range(schedule.num_stages), range(M))
        assert sorted(done, key=str) == sorted(wanted, key=str)


CHUNKS = {
    # form: most chunks of activations on a rank, as in the papers; P ranks
    ("1f1b", "full"): lambda P: P,
    ("1f1b", "split"): lambda P: P,
    ("1f1b", "joint"): lambda P: 2 * P,
    ("interleaved", "full"): lambda P: 3 * P - 1,
    ("interleaved", "split"): lambda P: 3 * P - 1,
    ("interleaved", "joint"): lambda P: 3 * P,
    ("zbh1", "full"): lambda P: P,
    ("zbv", "full"): lambda P: 2 * P,
    ("dualpipev", "full"): lambda P: 2 * P + 1,
}


@pytest.mark.parametrize("P", [2, 8])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_slots_are_as_many_as_the_papers_say_however_many_microbatches(name, form, P):
    tables = {}
    for M in (3 * P, 5 * P):
        schedule = make_schedule(name, P, M, cells=form)
        stages = [(1, 0)] * schedule.num_stages
        tables[M] = compile_ticks(schedule, stacks_of(schedule, stages))
        expected = M if name == "gpipe" else CHUNKS[name, form](P)
        assert tables[M].slots["residuals.dense"] == expected
        assert tables[M].slots["kept.dense"] == expected
    few, many = tables.values()
    if name != "gpipe":
        assert few.slots == many.slots
    assert few.flavours == many.flavours
    assert set(few.patterns) == set(many.patterns), "branches of the exchange"
    assert few.channels == many.channels


@pytest.mark.parametrize(
    "costs", [Costs(), Costs(1, 1.2, 0.8), Costs(1, 2, 1, transfer=0.1)], ids=str
)
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_ticks_take_no_less_time_than_dependencies_alone(name, form, costs):
    schedule = make_schedule(name, 4, 8, cells=form)
    stage_layers = uneven(schedule.num_stages)
    free = simulate(schedule, costs, [sum(counts) for counts in stage_layers]).makespan
    for deferred in (False, True):
        table = compile_ticks(schedule, stacks_of(schedule, stage_layers), deferred=deferred)
        assert time_of_ticks(table, costs) >= free - 1e-9


def test_with_equal_costs_ticks_lose_nothing():
    """Where each cell takes one unit, lock step is no loss."""
    for P, M in ((2, 6), (4, 12), (8, 24)):
        schedule = make_schedule("zbh1", P, M)
        table = compile_ticks(schedule, stacks_of(schedule, [(1, 0)] * P))
        assert time_of_ticks(table, Costs()) == simulate(schedule).makespan == 3 * M + P - 1


def test_a_schedule_that_waits_for_ever_is_refused():
    schedule = make_schedule("1f1b", 2, 2)
    backwards = tuple(order[::-1] for order in schedule.cells)
    broken = type(schedule)("broken", 2, 2, schedule.stage_to_rank, backwards)
    with pytest.raises(ValueError, match="rank 0 waits for ever"):
        compile_ticks(broken, stacks_of(schedule, even(2)))
