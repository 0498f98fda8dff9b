"""Making a run out of a checkpoint of another program: ``python -m mxjax.ckpt import``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mxjax.ckpt.conversion import Conversion
from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.huggingface.importing import import_huggingface
from mxjax.ckpt.locate import Kind, locate
from mxjax.ckpt.mapping.rules import Cut, Theirs
from mxjax.ckpt.megatron.arguments import FromArguments, from_arguments
from mxjax.ckpt.megatron.opened import MegatronModel, open_megatron
from mxjax.ckpt.new_run import FRESH, ImportReport, require_new, write_run
from mxjax.config import load_settings

_EMBEDDING = Theirs(("embedding.word_embeddings.weight",), (), Cut.ROWS)
"""Its rows are the vocabulary with the padding of the ``tp`` that saved it, which no argument is
sure to say."""


def import_checkpoint(
    source: str | Path,
    run_dir: str | Path,
    overrides: Sequence[str] = (),
    progress: bool = True,
    optimizer: bool = True,
) -> ImportReport:
    """Imports a Megatron or a Hugging Face checkpoint, whichever `source` is.

    Arguments and errors are those of :func:`import_megatron` and
    :func:`mxjax.ckpt.huggingface.importing.import_huggingface`.
    """
    if locate(source).kind is Kind.SAFETENSORS:
        return import_huggingface(source, run_dir, overrides, progress)
    return import_megatron(source, run_dir, overrides, progress, optimizer)


def open_with_settings(source: str | Path) -> tuple[MegatronModel, FromArguments]:
    """A Megatron checkpoint and the configuration that its arguments lead to.

    Raises:
      CheckpointFormatError: the checkpoint is incomplete, or not of a model that there is here.
    """
    megatron = open_megatron(source)
    if _EMBEDDING.names[0] not in megatron.names:
        raise CheckpointFormatError(f"{source} has no {_EMBEDDING.names[0]}.")
    rows = megatron.tensor(_EMBEDDING.names[0], _EMBEDDING).shape[0]
    scheduler, iteration = (
        megatron.common.get(name) for name in ("opt_param_scheduler", "iteration")
    )
    scheduler = scheduler if isinstance(scheduler, dict) else None
    return megatron, from_arguments(megatron.args, rows, scheduler, iteration)


def import_megatron(
    source: str | Path,
    run_dir: str | Path,
    overrides: Sequence[str] = (),
    progress: bool = True,
    optimizer: bool = True,
) -> ImportReport:
    """Writes a new run with one checkpoint, from which training resumes.

    Args:
      source: Megatron's folder, or one iteration in it.
      run_dir: must not exist.
      overrides: ``section.key=value``, for the configuration that the arguments lead to.
      progress: show a bar.
      optimizer: take its state too, if there is one.

    Raises:
      CheckpointFormatError: the checkpoint is incomplete, or not of a model that there is here.
      ConfigError: the configuration, with `overrides`, cannot be used.
      FileExistsError: there is something at `run_dir`.
    """
    run_dir = Path(run_dir)
    require_new(run_dir)
    megatron, found = open_with_settings(source)
    # The layout of the run is the user's choice, later.
    config = load_settings(found.settings, "Megatron's arguments", overrides)
    config = replace(config, run_dir=str(run_dir))
    conversion = Conversion(megatron, config, found.zero_centred_gamma, optimizer)
    step = megatron.common.get("iteration")
    step = step if isinstance(step, int) else 0  # a release may have none
    arrays = conversion.arrays(step)
    report = ImportReport(
        str(source),
        str(run_dir),
        step,
        tensors=conversion.num_tensors,
        parameters=sum(array.size for name, array in arrays.items() if name.startswith("params.")),
        optimizer="Adam's moments, imported" if conversion.has_moments else FRESH,
        assumed=found.assumed,
        not_mapped=found.not_mapped,
    )
    write_run(report, config, arrays, megatron.args.get("consumed_train_samples") or 0, progress)
    return report
