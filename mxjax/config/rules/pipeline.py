"""Rules for `parallel.pp` and the section `pipeline`; see `registry.py`."""

from __future__ import annotations

import re
from dataclasses import fields

from mxjax.config.rules.registry import Findings, rule
from mxjax.config.schema import Config, PipelineConfig
from mxjax.pipeline.configure import costs, fixed_schedule, stage_layout
from mxjax.pipeline.layout import LayoutError, count_stages
from mxjax.pipeline.schedule import ScheduleError

_SETTINGS = {field.name: f"pipeline.{field.name}" for field in fields(PipelineConfig)} | {
    "num_layers": "model.num_layers",
    "mtp_num_layers": "model.mtp_num_layers",
    "num_ranks": "parallel.pp",
    "num_chunks": "pipeline.vpp",
    "num_microbatches": "training.num_microbatches",
}
"""Settings by the names of the arguments that layouts and schedules are made of."""

_ARGUMENTS = re.compile(rf"\b({'|'.join(sorted(_SETTINGS, key=len, reverse=True))})\b")


def _finding(error: LayoutError | ScheduleError) -> tuple[str, str]:
    """What the error says, with settings by their paths."""
    message = _ARGUMENTS.sub(lambda found: _SETTINGS[found[0]], error.message)
    return _SETTINGS[error.key or "schedule"], message


@rule
def layers_fit_the_stages(c: Config) -> Findings:
    if c.parallel.pp == 1:
        return
    try:
        layout = stage_layout(c)
    except LayoutError as error:
        if error.key != "num_chunks":  # of which the schedule says more
            yield _finding(error)
        return
    if any(layout.mtp_layers[:-1]):
        yield (
            "pipeline.layout",
            "has multi-token prediction (m) on another stage than the loss (L), where it runs here;"
            " move m to the last stage",
        )


@rule
def schedule_fits_the_microbatches(c: Config) -> Findings:
    if c.parallel.pp == 1:
        return
    try:
        fixed_schedule(c)  # a search has the same limits, and takes long
    except LayoutError:  # of a string without stages to count; see above
        return
    except ScheduleError as error:
        key, message = _finding(error)
        if key == "pipeline.vpp" and c.pipeline.vpp is None and c.pipeline.layout is not None:
            stages = count_stages(c.pipeline.layout)
            key, message = (
                "pipeline.layout",
                f"has {stages} stages for {c.parallel.pp} ranks, but {message}",
            )
        yield key, message


@rule
def limits_of_activations_are_for_zbh1(c: Config) -> Findings:
    limit = c.pipeline.max_activations
    if limit is None or c.parallel.pp == 1:
        return
    if c.pipeline.schedule != "zbh1":
        yield (
            "pipeline.max_activations",
            f"{limit}, but only the order of zbh1 is searched; set pipeline.schedule to zbh1, or"
            " leave it out",
        )


@rule
def costs_are_times(c: Config) -> Findings:
    if c.parallel.pp == 1:
        return
    try:
        costs(c)
    except ScheduleError as error:
        yield _finding(error)


@rule
def ring_attention_needs_pairs_in_a_pipeline(c: Config) -> Findings:
    parallel = c.parallel
    ring = parallel.cp_method == "ring" and parallel.cp_rotation == "ppermute"
    if parallel.pp > 1 and parallel.cp > 1 and ring:
        yield (
            "parallel.cp_rotation",
            "ppermute cannot be used with parallel.pp > 1, where ranks take different branches; set"
            " it to alltoall, or parallel.cp_method to allgather",
        )
