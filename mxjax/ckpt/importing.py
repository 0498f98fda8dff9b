"""Making a run out of a Megatron checkpoint: ``python -m mxjax.ckpt import``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

import mxjax
from mxjax.ckpt.atomic import new_folder
from mxjax.ckpt.conversion import Conversion
from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.mapping.rules import Cut, Theirs
from mxjax.ckpt.megatron.arguments import from_arguments
from mxjax.ckpt.megatron.opened import open_megatron
from mxjax.ckpt.streaming import write_streamed
from mxjax.config import Config, load_settings, to_yaml
from mxjax.moe.buckets import BucketChooser

FRESH = "fresh: Adam's moments and its count are zero"

_EMBEDDING = Theirs(("embedding.word_embeddings.weight",), (), Cut.ROWS)
"""Its rows are the vocabulary with the padding of the ``tp`` that saved it, which no argument is
sure to say."""


@dataclass
class ImportReport:
    """What an import did.

    Attributes:
      step: of the checkpoint that was written, Megatron's iteration.
      tensors: how many of Megatron's were read.
      optimizer: whether its state was imported.
      assumed: arguments that were not recorded, or have no counterpart, and what was taken.
      not_mapped: further arguments without a counterpart.
    """

    source: str
    run_dir: str
    step: int
    tensors: int
    parameters: int
    optimizer: str
    assumed: dict[str, Any] = field(default_factory=dict)
    not_mapped: dict[str, Any] = field(default_factory=dict)


def import_megatron(
    source: str | Path, run_dir: str | Path, overrides: Sequence[str] = (), progress: bool = True
) -> ImportReport:
    """Writes a new run with one checkpoint, from which training resumes.

    Args:
      source: Megatron's folder, or one iteration in it.
      run_dir: must not exist.
      overrides: ``section.key=value``, for the configuration that the arguments lead to.
      progress: show a bar.

    Raises:
      CheckpointFormatError: the checkpoint is incomplete, or not of a model that there is here.
      ConfigError: the configuration, with `overrides`, cannot be used.
      FileExistsError: there is something at `run_dir`.
    """
    run_dir = Path(run_dir)
    if run_dir.exists():
        raise FileExistsError(f"{run_dir} exists. Move it away, or choose another name.")
    megatron = open_megatron(source)
    if _EMBEDDING.names[0] not in megatron.names:
        raise CheckpointFormatError(f"{source} has no {_EMBEDDING.names[0]}.")
    rows = megatron.tensor(_EMBEDDING.names[0], _EMBEDDING).shape[0]
    found = from_arguments(megatron.args, rows)
    # The layout of the run is the user's choice, later.
    config = load_settings(found.settings, "Megatron's arguments", overrides)
    config = replace(config, run_dir=str(run_dir))
    conversion = Conversion(megatron, config, found.zero_centred_gamma)
    iteration = megatron.common.get("iteration")
    step = iteration if isinstance(iteration, int) else 0  # a release may have none
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
    metadata = _metadata(config, step, megatron.args.get("consumed_train_samples") or 0, report)
    total = sum(array.nbytes for array in arrays.values())
    with (
        new_folder(run_dir) as folder,
        tqdm(total=total, unit="B", unit_scale=True, desc="import", disable=not progress) as bar,
    ):
        (folder / "config.yaml").write_text(to_yaml(config, only_differences=True), "utf-8")
        write_streamed(folder, step, arrays, metadata, bar.update)
    return report


def _metadata(
    config: Config, step: int, consumed_samples: int, report: ImportReport
) -> dict[str, Any]:
    """What the training loop finds beside the state."""
    return {
        "step": step,
        "next_sample_index": consumed_samples,
        "data": None,  # any data may follow
        "buckets": BucketChooser(config.moe.capacity_buckets).as_dict(),
        "fits": [],
        "skipped": [0, 0],
        "mesh": {},
        "version": mxjax.__version__,
        "config": to_yaml(config),
        "imported": asdict(report),
    }
