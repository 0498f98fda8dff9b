"""Rules for `parallel.pp` and the section `pipeline`; see `registry.py`."""

from __future__ import annotations

from mxjax.config.rules.registry import Findings, rule
from mxjax.config.schema import Config
from mxjax.pipeline.configure import stage_layout, training_schedule
from mxjax.pipeline.layout import LayoutError
from mxjax.pipeline.schedule import ScheduleError

_KEYS = {
    "num_layers": "model.num_layers",
    "num_ranks": "parallel.pp",
    "num_chunks": "pipeline.vpp",
    "num_microbatches": "training.num_microbatches",
}
"""Settings by the names of the arguments that layouts and schedules are made of."""


@rule
def layers_fit_the_stages(c: Config) -> Findings:
    if c.parallel.pp == 1:
        return
    try:
        layout = stage_layout(c)
    except LayoutError as error:
        yield _KEYS.get(error.key, f"pipeline.{error.key}"), error.message
        return
    except ScheduleError as error:
        yield _KEYS.get(error.key or "", f"pipeline.{error.key}"), error.message
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
        training_schedule(c)
    except ScheduleError as error:
        yield _KEYS.get(error.key or "", f"pipeline.{error.key}"), error.message


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
