"""What `--plan` says of a pipeline: stages, the simulated schedule, rings, empty places."""

from __future__ import annotations

from dataclasses import dataclass

from mxjax.config.schema import Config
from mxjax.pipeline.configure import costs, stagewise_schedule, training_choice
from mxjax.pipeline.simulate import simulate
from mxjax.pipeline.stacks import Stacks
from mxjax.pipeline.ticks import time_of_ticks
from mxjax.training.pipelined import PipelinedObjective


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One pipeline rank."""

    stages: str
    """What lies on it, see `StageLayout.describe`."""
    activations_until_b: float
    """Most microbatches of all layers of a rank whose activations it holds at once, if the gradient
    of the input lets go of them."""
    activations_until_w: float
    """The same if the gradients of the weights do, which read a part of them."""


@dataclass(frozen=True, kw_only=True)
class SpareParameters:
    """Room for parameters that only some ranks need, over all of them and before ZeRO and the other
    axes split it."""

    empty_places: int
    """Every rank has as many places for a kind of layer as the largest chunk of any."""
    embedding_and_head: int
    """Copies that ranks without embedding, head or multi-token prediction compute with. Masters and
    optimizer state of these are split over `pp`, but for ZeRO 0."""


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A training step over pipeline ranks. Times are in the unit of `pipeline.costs`."""

    schedule: str
    executor: str
    """`one_program` or `stagewise`. What a plan compiles is always the first, to which `ticks`,
    `makespan_of_ticks` and `rings` belong too."""
    cells: str
    """`full`, `split` or `joint`."""
    transfers: str
    """`immediate` or `deferred`."""
    chunks: int
    """Stages of each rank."""
    microbatches: int
    costs: tuple[float, ...]
    """F, B, W, and both gradients in one."""
    ideal: float
    """Forward and backward of all layers, divided evenly over the ranks, without gaps."""
    makespan: float
    """By what the cells of the schedule need of each other, see `simulate`."""
    bubble: float
    """Share of `makespan` that is not `ideal`."""
    ticks: int
    makespan_of_ticks: float
    """With ranks that wait for each other to exchange tensors, see `time_of_ticks`."""
    rings: dict[str, int]
    """Slots of each ring of buffers: `x` and `g`, residual streams and their gradients between
    stages; by kind of layer, what one stage's layers leave for B, for B and W, and B for W."""
    ranks: tuple[RankPlan, ...]
    spare_parameters: SpareParameters


def pipeline_note(config: Config, stacks: Stacks, stagewise: bool) -> str:
    """What a run says when it starts: what it chose where the configuration left it open, and the
    bubble of that."""
    if stagewise:
        schedule, cells = stagewise_schedule(config, stacks)
        how = f"cells {cells}, executor stagewise"
    else:
        table, cells, transfers = training_choice(config, stacks)
        schedule = table.schedule
        how = f"cells {cells}, executor one_program, transfers {transfers}"
    found = costs(config)
    sizes = [sum(counts) for counts in stacks.stage_layers]
    simulated = simulate(schedule, found, sizes)
    return (
        f"{schedule.name}, {how}; bubble {100 * simulated.bubble / simulated.makespan:.1f}% with "
        f"F {found.F:g}, B {found.B:g}, W {found.W:g}, BW {found.both:g}"
    )


def pipeline_plan(config: Config, objective: PipelinedObjective, stagewise: bool) -> PipelinePlan:
    """The plan of the schedule that a step runs; `stagewise`: by that executor."""
    table, cells, transfers = training_choice(config, objective.stacks)
    schedule = table.schedule
    if stagewise:
        schedule, cells = stagewise_schedule(config, objective.stacks)
    layout = objective.stacks.layout
    sizes = [sum(counts) for counts in objective.stacks.stage_layers]
    found = costs(config)
    simulated = simulate(schedule, found, sizes)
    held = zip(simulated.activations_until_B, simulated.activations_until_W, strict=True)
    return PipelinePlan(
        schedule=schedule.name,
        executor="stagewise" if stagewise else "one_program",
        cells=cells,
        transfers=transfers,
        chunks=layout.num_chunks,
        microbatches=schedule.num_microbatches,
        costs=(found.F, found.B, found.W, found.both),
        ideal=simulated.ideal,
        makespan=simulated.makespan,
        bubble=simulated.bubble / simulated.makespan,
        ticks=table.num_ticks,
        makespan_of_ticks=time_of_ticks(table, found),
        rings=dict(table.slots),
        ranks=tuple(
            RankPlan(
                stages=line.partition(": ")[2],
                activations_until_b=until_b / layout.num_chunks,
                activations_until_w=until_w / layout.num_chunks,
            )
            for line, (until_b, until_w) in zip(layout.describe().splitlines(), held, strict=True)
        ),
        spare_parameters=_spare(objective),
    )


def _spare(objective: PipelinedObjective) -> SpareParameters:
    parts, groups = objective.model.parts, objective.stacks.groups
    outside = sum(part.num_parameters for name, part in parts.items() if name not in groups)
    return SpareParameters(
        empty_places=sum(
            round(parts[name].num_parameters * (1 / parts[name].filled - 1)) for name in groups
        ),
        embedding_and_head=outside * (objective.stacks.layout.num_ranks - 1),
    )


def as_lines(plan: PipelinePlan) -> list[str]:
    """The plan for people."""
    most = [max(getattr(rank, f"activations_until_{op}") for rank in plan.ranks) for op in "bw"]
    forward, backward, weights, both = plan.costs
    rows = [
        (
            "schedule",
            f"{plan.schedule}, cells {plan.cells}, transfers {plan.transfers}; chunks a rank: "
            f"{plan.chunks}, microbatches: {plan.microbatches}",
        ),
        (
            "costs",
            f"F {forward:g}, B {backward:g}, W {weights:g}, BW {both:g}; ideal {plan.ideal:g}",
        ),
        ("makespan", _over_ideal(plan.makespan, plan) + f", bubble {100 * plan.bubble:.1f}%"),
        ("in ticks", _over_ideal(plan.makespan_of_ticks, plan) + f", {plan.ticks} ticks"),
        ("activations", f"{most[0]:g} / {most[1]:g} microbatches held at most, until B / until W"),
        ("slots", ", ".join(f"{ring} {slots}" for ring, slots in plan.rings.items())),
        (
            "spare parameters",
            f"{plan.spare_parameters.empty_places:,} in empty places, "
            f"{plan.spare_parameters.embedding_and_head:,} in copies of embedding and head",
        ),
    ]
    lines = ["pipeline", *(f"  {name:<16} {text}" for name, text in rows)]
    if plan.executor == "stagewise":
        lines.append("  will run with executor stagewise; ticks, slots and what was compiled are")
        lines.append("  those of executor one_program")
    return lines + [f"  rank {rank:<11} {on.stages}" for rank, on in enumerate(plan.ranks)]


def _over_ideal(time: float, plan: PipelinePlan) -> str:
    return f"{time:g}, {time / plan.ideal:.3f} x ideal"
