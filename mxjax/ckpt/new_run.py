"""Writing the run that an import makes, and the report of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import mxjax
from mxjax.ckpt.atomic import new_folder
from mxjax.ckpt.streaming import StreamedArray, write_streamed
from mxjax.ckpt.tree import named_leaves
from mxjax.config import Config, ParallelConfig, to_yaml
from mxjax.moe.buckets import BucketChooser
from mxjax.sharding.mesh import build_mesh
from mxjax.training.programs import Programs

FRESH = "fresh: Adam's moments and its count are zero"


@dataclass
class ImportReport:
    """What an import did.

    Attributes:
      step: of the checkpoint that was written.
      tensors: how many of the other program's were read.
      optimizer: whether its state was imported.
      assumed: settings that were not recorded, or have no counterpart, and what was taken.
      not_mapped: further settings without a counterpart.
    """

    source: str
    run_dir: str
    step: int
    tensors: int
    parameters: int
    optimizer: str
    assumed: dict[str, Any] = field(default_factory=dict)
    not_mapped: dict[str, Any] = field(default_factory=dict)


def require_new(run_dir: Path) -> None:
    """Raises FileExistsError if there is something at `run_dir`: sooner than after the work."""
    if run_dir.exists():
        raise FileExistsError(f"{run_dir} exists. Move it away, or choose another name.")


def state_of(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the whole training state by name."""
    config = replace(config, parallel=ParallelConfig(dp=1))
    programs = Programs(config, build_mesh(config.parallel, jax.devices()[:1]))
    return named_leaves(programs.abstract_state)


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> StreamedArray:
    """What the other program does not have."""
    return StreamedArray(shape, dtype, 0, lambda _: np.broadcast_to(np.zeros((), dtype), shape))


def write_run(
    report: ImportReport,
    config: Config,
    arrays: Mapping[str, StreamedArray],
    consumed_samples: int = 0,
    progress: bool = True,
) -> None:
    """Writes ``config.yaml`` and one checkpoint; the folder gets its name when it is complete."""
    run_dir = Path(report.run_dir)
    metadata = {
        "step": report.step,
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
    total = sum(array.nbytes for array in arrays.values())
    with (
        new_folder(run_dir) as folder,
        tqdm(total=total, unit="B", unit_scale=True, desc="import", disable=not progress) as bar,
    ):
        (folder / "config.yaml").write_text(to_yaml(config, only_differences=True), "utf-8")
        write_streamed(folder, report.step, arrays, metadata, bar.update)
