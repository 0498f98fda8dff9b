"""Writing a run as a Megatron checkpoint: ``python -m mxjax.ckpt export``."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from mxjax.ckpt.atomic import new_folder
from mxjax.ckpt.errors import ExportError
from mxjax.ckpt.locate import TRACKER
from mxjax.ckpt.mapping.megatron import expert_bias_sections, megatron_table
from mxjax.ckpt.megatron.dist_writer import CONTENT, write_dist
from mxjax.ckpt.megatron.exported import adam_state, exported
from mxjax.ckpt.megatron.grid import Grid
from mxjax.ckpt.megatron.legacy_writer import LegacyLayout, write_legacy
from mxjax.ckpt.megatron.module_names import Spelling
from mxjax.ckpt.megatron.optimizer_state import AdamState
from mxjax.ckpt.megatron.to_arguments import Saved, to_arguments
from mxjax.ckpt.run_arrays import RunArrays, saved_step
from mxjax.ckpt.torch_format.values import DTYPES, Global, Record
from mxjax.config import Config


@dataclass(frozen=True)
class MegatronTarget:
    """What to write.

    Attributes:
      format: ``torch_dist`` fits any grid; ``torch`` has a file for each rank of `grid`.
      grid: of ``torch``; in ``torch_dist`` it is recorded, and its `tp` and `ep` decide the padding
        of the vocabulary and whether experts have an optimizer of their own.
      transformer_impl: whose names ``torch`` has; ``torch_dist`` has both.
      mtp_module: what ``torch`` calls the layer within multi-token prediction;
        ``transformer_layer`` up to 0.16.
      params_dtype: of the weights; None: the run's compute_dtype.
      optimizer: write Adam's state, if the run has it.
      divisible_by: the vocabulary of each tensor rank is padded to a multiple of this.
    """

    format: Literal["torch_dist", "torch"] = "torch_dist"
    grid: Grid = field(default_factory=Grid)
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    mtp_module: Literal["mtp_model_layer", "transformer_layer"] = "mtp_model_layer"
    params_dtype: Literal["float32", "bfloat16"] | None = None
    optimizer: bool = True
    divisible_by: int = 128


@dataclass
class ExportReport:
    """What an export did.

    Attributes:
      step: of the checkpoint that was read; Megatron's iteration.
      tensors: how many of Megatron's there are, counting layers and experts.
      optimizer: whether its state was exported.
    """

    source: str
    target: str
    format: str
    step: int
    tensors: int
    parameters: int
    params_dtype: str
    grid: dict[str, Any]
    optimizer: str


def export_megatron(
    source: str | Path,
    target_dir: str | Path,
    target: MegatronTarget,
    step: int | None = None,
    progress: bool = True,
) -> ExportReport:
    """Writes one checkpoint of a run as Megatron does.

    Args:
      source: a run, or one of its steps.
      target_dir: must not exist; gets one iteration and ``latest_checkpointed_iteration.txt``.
      step: which checkpoint of the run; None: the newest.
      progress: show a bar.

    Raises:
      ExportError: the step does not exist, the grid does not fit the model, or Megatron has
        nothing like a part of it.
      CheckpointFormatError: `source` is no run, or is damaged.
      FileExistsError: there is something at `target_dir`.
    """
    target_dir = Path(target_dir)
    if target_dir.exists():
        raise FileExistsError(f"{target_dir} exists. Move it away, or choose another name.")
    folder, metadata, config = saved_step(source, step)
    _check(target, config)
    export = _Export(RunArrays(folder), metadata, config, target)
    # Megatron's arguments, and with them what they cannot say, before anything is written.
    common = export.common()
    bar = tqdm(unit="B", unit_scale=True, desc="export", disable=not progress)
    with new_folder(target_dir) as new, bar:
        export.write(new / f"iter_{export.iteration:07d}", common, bar)
        # Last: it is where Megatron looks first.
        (new / TRACKER).write_text(str(export.iteration))
    return export.report(source, target_dir)


def _check(target: MegatronTarget, config: Config) -> None:
    problems = target.grid.problems(config, target.transformer_impl == "local")
    if target.divisible_by < 1:
        problems.append(f"--make-vocab-size-divisible-by {target.divisible_by}: must be 1 or more")
    if problems:
        raise ExportError("The run does not fit the layout asked for:\n  " + "\n  ".join(problems))


class _Export:
    """One checkpoint of a run, as what Megatron has."""

    def __init__(
        self, arrays: RunArrays, metadata: dict[str, Any], config: Config, target: MegatronTarget
    ) -> None:
        self._config, self._target = config, target
        self._consumed = metadata["next_sample_index"]
        self.iteration = int(arrays.read("step"))
        model, moe = config.model, config.moe
        self._has_bias = moe.num_experts > 0 and (
            moe.expert_bias_update_rate > 0 or bool(np.any(arrays.read("expert_bias")))
        )
        sections = megatron_table(model, moe)
        if self._has_bias:
            sections += expert_bias_sections(model, moe)
        self._rows = target.grid.padded_rows(model.vocab_size, target.divisible_by)
        self._tensors = exported(arrays, sections, self._rows)
        self._dtype_name = target.params_dtype or config.training.compute_dtype
        self._dtype = DTYPES[self._dtype_name]
        prefix = adam_state(arrays) if config.optimizer.name == "adamw" else None
        self._adam = None
        if target.optimizer and prefix is not None:
            count = int(arrays.read(f"{prefix}.count"))
            self._adam = AdamState(config, count, self.iteration)

    def common(self) -> dict[str, Any]:
        """Plain values beside the tensors."""
        target, adam = self._target, self._adam
        saved = Saved(
            iteration=self.iteration,
            consumed_samples=self._consumed,
            vocabulary_rows=self._rows,
            divisible_by=target.divisible_by,
            params_dtype=self._dtype_name,
            transformer_impl=target.transformer_impl,
            ckpt_format=target.format,
            optimizer=adam is not None,
            expert_bias=self._has_bias,
        )
        arguments = to_arguments(self._config, target.grid, saved)
        common: dict[str, Any] = {
            "args": Record(Global("argparse", "Namespace"), state=arguments),
            "checkpoint_version": 3.0,
            "iteration": self.iteration,
            "num_floating_point_operations_so_far": 0.0,
        }
        if target.format == "torch_dist":
            common["content_metadata"] = CONTENT
            if adam is not None:
                common["optimizer"] = adam.common(target.grid.ep > 1)
                common["opt_param_scheduler"] = adam.scheduler()
        return common

    def write(self, folder: Path, common: dict[str, Any], bar: tqdm) -> None:
        """Writes one iteration."""
        target, model = self._target, self._config.model
        if target.format == "torch_dist":
            optimizer = self._adam is not None
            write_dist(folder, self._tensors, model.num_layers, common, self._dtype, optimizer, bar)
            return
        layout = LegacyLayout(
            target.grid,
            model.num_layers,
            tied=model.tie_embeddings,
            spelling=Spelling(target.transformer_impl == "local", target.mtp_module),
        )
        write_legacy(folder, self._tensors, layout, common, self._dtype, self._adam, bar)

    def report(self, source: str | Path, target_dir: Path) -> ExportReport:
        """What was done."""
        if self._adam is not None:
            optimizer = f"Adam's state after {self._adam.count} updates"
        elif self._target.optimizer:
            name = self._config.optimizer.name
            optimizer = f"not exported: the state of {name} is not that of Megatron's Adam"
        else:
            optimizer = "not exported"
        return ExportReport(
            str(source),
            str(target_dir),
            self._target.format,
            self.iteration,
            tensors=len(self._tensors),
            parameters=sum(
                math.prod(tensor.theirs.shape) for tensor in self._tensors if tensor.is_parameter
            ),
            params_dtype=self._dtype_name,
            grid=asdict(self._target.grid),
            optimizer=optimizer,
        )
