"""The layout and the schedule that a configuration asks for. No JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxjax.pipeline.layout import StageLayout, count_stages, make_layout
from mxjax.pipeline.schedule import Schedule, ScheduleError
from mxjax.pipeline.schedules import SCHEDULES, forward_only, make_schedule
from mxjax.pipeline.simulate import Costs, simulate
from mxjax.pipeline.stacks import Stacks
from mxjax.pipeline.ticks import TickTable, compile_ticks, time_of_ticks
from mxjax.pipeline.zero_bubble import search_zero_bubble

if TYPE_CHECKING:  # the configuration's rules import this module
    from mxjax.config.schema import Config


def num_chunks(config: Config) -> int:
    """Chunks of layers on each rank: `pipeline.vpp` with its default filled in."""
    pipeline = config.pipeline
    if pipeline.vpp is not None:
        return pipeline.vpp
    info = SCHEDULES[pipeline.schedule]
    if pipeline.layout is not None and info.interleaved:
        return max(1, count_stages(pipeline.layout) // config.parallel.pp)
    return 2 if info.interleaved or info.placement == "v" else 1


def stage_layout(config: Config) -> StageLayout:
    """Which layer lies where.

    Raises:
      LayoutError: the layers do not add up; its `key` is an argument of `make_layout`.
    """
    pipeline = config.pipeline
    return make_layout(
        config.model.num_layers,
        config.parallel.pp,
        num_chunks(config),
        SCHEDULES[pipeline.schedule].placement,
        mtp_num_layers=config.model.mtp_num_layers,
        layout=pipeline.layout,
        num_layers_in_first_pipeline_stage=pipeline.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=pipeline.num_layers_in_last_pipeline_stage,
        account_for_embedding_in_pipeline_split=pipeline.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=pipeline.account_for_loss_in_pipeline_split,
        empty_layers=pipeline.empty_layers,
    )


def training_schedule(config: Config, cells: str | None = None) -> Schedule:
    """The schedule of a training step; `cells` in place of the configured ones.

    Raises:
      ScheduleError: as `fixed_schedule`.
    """
    pipeline, ranks = config.pipeline, config.parallel.pp
    if pipeline.schedule == "zbh1" and pipeline.max_activations is not None:
        microbatches = config.training.num_microbatches
        return search_zero_bubble(ranks, microbatches, costs(config), pipeline.max_activations)
    return fixed_schedule(config, cells)


def fixed_schedule(config: Config, cells: str | None = None) -> Schedule:
    """The same, but nothing is searched.

    Raises:
      ScheduleError: it cannot be made for these numbers; its `key` is an argument of
        `make_schedule`.
    """
    wanted = cells or config.pipeline.cells
    return make_schedule(
        config.pipeline.schedule,
        config.parallel.pp,
        config.training.num_microbatches,
        num_chunks(config),
        "full" if wanted == "auto" else wanted,
    )


def costs(config: Config) -> Costs:
    """`pipeline.costs`; the default where they are still to be measured.

    Raises:
      ScheduleError: they are no times.
    """
    from mxjax.config.schema import PipelineConfig  # whose rules import this module

    given = config.pipeline.costs
    if given == "measured":
        given = PipelineConfig().costs
    if len(given) not in (3, 4):
        raise ScheduleError(
            f"{len(given)} numbers; give F, B, W, and perhaps both gradients in one", key="costs"
        )
    forward, backward, weights, *both = given
    return Costs(F=forward, B=backward, W=weights, BW=both[0] if both else None)


def stagewise_schedule(config: Config, stacks: Stacks) -> tuple[Schedule, str]:
    """The schedule for ranks that wait for nothing but what they need, and the form of its cells:
    of what the configuration leaves open, the fastest."""
    sizes = [sum(counts) for counts in stacks.stage_layers]
    choices = [(training_schedule(config, form), form) for form in _forms(config)]
    return min(choices, key=lambda choice: simulate(choice[0], costs(config), sizes).makespan)


def _forms(config: Config) -> list[str]:
    if config.pipeline.cells != "auto":
        return [config.pipeline.cells]
    return [form for form in SCHEDULES[config.pipeline.schedule].cells if form != "joint"]


def training_table(config: Config, stacks: Stacks) -> TickTable:
    """The tick table of a training step: of what the configuration leaves open, the fastest."""
    return training_choice(config, stacks)[0]


def training_choice(config: Config, stacks: Stacks) -> tuple[TickTable, str, str]:
    """The same with what was chosen for `pipeline.cells` and `pipeline.transfers`."""
    pipeline = config.pipeline
    deferrals = [pipeline.transfers]
    if pipeline.transfers == "auto":
        deferrals = ["immediate", "deferred"]
    choices = [
        (
            compile_ticks(training_schedule(config, form), stacks, deferred=when == "deferred"),
            form,
            when,
        )
        for form in _forms(config)
        for when in deferrals
    ]
    return min(choices, key=lambda choice: time_of_ticks(choice[0], costs(config)))


def evaluation_table(stacks: Stacks, num_microbatches: int) -> TickTable:
    """The tick table of a forward pass."""
    layout = stacks.layout
    schedule = forward_only(layout.num_ranks, num_microbatches, layout.num_chunks, layout.placement)
    return compile_ticks(schedule, stacks)
