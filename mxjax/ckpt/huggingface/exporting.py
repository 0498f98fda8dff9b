"""Writing a run as Hugging Face's models are stored."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
from tqdm import tqdm

from mxjax.ckpt.atomic import new_folder
from mxjax.ckpt.errors import ExportError
from mxjax.ckpt.huggingface.folder import CONFIG, INDEX, SINGLE
from mxjax.ckpt.huggingface.to_config_json import differences, to_config_json
from mxjax.ckpt.huggingface.tokenizer import end_of_document, files_of
from mxjax.ckpt.mapping.huggingface import Family, copies, huggingface_table
from mxjax.ckpt.mapping.matching import Place, places
from mxjax.ckpt.new_run import require_new
from mxjax.ckpt.run_arrays import RunArrays, saved_step
from mxjax.ckpt.safetensors import write_safetensors
from mxjax.ckpt.torch_format.values import LazyTensor
from mxjax.config import Config

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass
class HuggingFaceReport:
    """What an export did.

    Attributes:
      step: of the checkpoint that was read.
      tensors: that were written.
      tokenizer: files that were copied.
      differences: where `transformers` computes something else.
    """

    source: str
    target: str
    model_type: str
    step: int
    tensors: int
    dtype: str
    shards: int
    tokenizer: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def export_huggingface(
    source: str | Path,
    target: str | Path,
    dtype: Literal["float32", "bfloat16"] | None = None,
    max_shard_size: int | str = "5GB",
    step: int | None = None,
    progress: bool = True,
) -> HuggingFaceReport:
    """Writes the weights of one checkpoint of a run.

    Args:
      source: a run, or one of its steps.
      target: must not exist; gets ``config.json`` and safetensors, and the files of the run's
        tokenizer if it has one.
      dtype: of the weights; None: the run's ``training.compute_dtype``. The router and its bias of
        DeepSeek-V3 are always fp32.
      max_shard_size: bytes, or such as ``5GB`` or ``500MiB``, of one file; a larger tensor has a
        file of its own.
      step: which checkpoint of the run; None: the newest.
      progress: show a bar.

    Raises:
      ExportError: no family of models computes the same, or the step does not exist.
      CheckpointFormatError: `source` is no run, or is damaged.
      FileExistsError: there is something at `target`.
    """
    target = Path(target)
    require_new(target)
    largest = max_shard_size if isinstance(max_shard_size, int) else parse_size(max_shard_size)
    folder, _, config = saved_step(source, step)
    name = dtype or config.training.compute_dtype
    description = to_config_json(config.model, config.moe, name)
    family = Family(description["model_type"])
    arrays = RunArrays(folder)
    if family is not Family.DEEPSEEK_V3 and config.moe.num_experts:
        _require_no_bias(arrays, family)
    tensors = _tensors(arrays, config, family, _DTYPES[name])
    shards = _shards(tensors, largest)
    files: list[Path] = []
    if tokenizer := _tokenizer(config):
        files = files_of(tokenizer)
        description["eos_token_id"] = end_of_document(tokenizer, config.data.eod_token)
    total = sum(_nbytes(tensor) for tensor in tensors.values())
    with (
        new_folder(target) as new,
        tqdm(total=total, unit="B", unit_scale=True, desc="export", disable=not progress) as bar,
    ):
        for file, part in shards.items():
            write_safetensors(new / file, part, bar.update)
        for file in files:
            shutil.copyfile(file, new / file.name)
        if len(shards) > 1:
            weight_map = {name: file for file, part in shards.items() for name in part}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (new / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
        (new / CONFIG).write_text(json.dumps(description, indent=2, sort_keys=True) + "\n", "utf-8")
    return HuggingFaceReport(
        str(source),
        str(target),
        description["model_type"],
        int(arrays.read("step")),
        tensors=len(tensors),
        dtype=name,
        shards=len(shards),
        tokenizer=[file.name for file in files],
        differences=differences(config.model),
    )


def _require_no_bias(arrays: RunArrays, family: Family) -> None:
    if np.any(arrays.read("expert_bias")):
        raise ExportError(
            f"The run cannot be exported: its routers have a balancing bias, and {family} has none."
        )


def parse_size(text: str) -> int:
    """Bytes, of ``5GB``, ``500MiB`` or ``1000``.

    Raises:
      ExportError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise ExportError(f"--max-shard-size {text}: write a size such as 5GB or 500MiB.")
    return size


class _LastPlace:
    """Tensors of one use of a rule: two of them may come from one array, which is read once."""

    def __init__(self, arrays: RunArrays) -> None:
        self._arrays = arrays
        self._place: Place | None = None
        self._made: tuple[np.ndarray, ...] = ()

    def read(self, place: Place, which: int) -> np.ndarray:
        if self._place is not place:
            self._place, self._made = None, ()  # freed before the next one is read
            ours = [self._arrays.read(name, place.index) for name in place.leaves()]
            self._place, self._made = place, place.rule.to_theirs(*ours)
        return self._made[which]


def _tensors(
    arrays: RunArrays, config: Config, family: Family, dtype: np.dtype
) -> dict[str, LazyTensor]:
    """All that is written, by name, in an order in which an array of ours is read in one go."""
    last, found = _LastPlace(arrays), {}
    sections = huggingface_table(family, config.model, config.moe)
    for place in sorted(places(sections), key=lambda place: place.leaves()):
        for which, theirs in enumerate(place.rule.theirs):
            kept = np.dtype(np.float32) if theirs.keep_precision else dtype
            read = partial(last.read, place, which)
            found[place.names(theirs)[0]] = LazyTensor(theirs.shape, kept, read)
    for copy, original in copies(config.model).items():
        found[copy] = found[original]
    # Larger elements first: every tensor begins at a multiple of its element's size.
    return dict(sorted(found.items(), key=lambda item: -item[1].dtype.itemsize))


def _nbytes(tensor: LazyTensor) -> int:
    return math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize


def _shards(tensors: dict[str, LazyTensor], largest: int) -> dict[str, dict[str, LazyTensor]]:
    """Files with their tensors."""
    parts: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + _nbytes(tensor) > largest:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += _nbytes(tensor)
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    count = len(parts)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _tokenizer(config: Config) -> Path | None:
    """The file of the run's tokenizer, if it has one.

    Raises:
      ExportError: it is not where the run says.
    """
    if config.data.tokenizer == "byte":
        return None
    path = Path(config.data.tokenizer).expanduser()
    if not path.is_file():
        raise ExportError(
            f"data.tokenizer: {path} does not exist. Put it back, or make a link to where it is."
        )
    return path
