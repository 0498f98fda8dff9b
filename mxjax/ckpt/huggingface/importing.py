"""Making a run out of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.huggingface.config_json import from_config_json
from mxjax.ckpt.huggingface.folder import HuggingFaceFolder, open_folder
from mxjax.ckpt.huggingface.tokenizer import data_settings
from mxjax.ckpt.mapping.huggingface import EMBEDDING, HEAD, Family, copies, huggingface_table
from mxjax.ckpt.mapping.layouts import fit_rows
from mxjax.ckpt.mapping.matching import Blocks, blocks_of, match
from mxjax.ckpt.new_run import FRESH, ImportReport, require_new, state_of, write_run, zeros
from mxjax.ckpt.streaming import Index, StreamedArray
from mxjax.config import Config, load_settings

_COMPARED_ROWS = 4096


def import_huggingface(
    source: str | Path, run_dir: str | Path, overrides: Sequence[str] = (), progress: bool = True
) -> ImportReport:
    """Writes a new run with one checkpoint at step 0, from which training starts.

    Args:
      source: the folder with ``config.json`` and the safetensors.
      run_dir: must not exist.
      overrides: ``section.key=value``, for the configuration that ``config.json`` leads to.
      progress: show a bar.

    Raises:
      CheckpointFormatError: the checkpoint is incomplete, or not of a model that there is here.
      ConfigError: the configuration, with `overrides`, cannot be used.
      FileExistsError: there is something at `run_dir`.
    """
    run_dir = Path(run_dir)
    require_new(run_dir)
    folder = open_folder(Path(source))
    found = from_config_json(folder.config, folder.names)
    if data := data_settings(folder.path, folder.config.get("eos_token_id")):
        found.settings["data"] = data
        found.not_mapped.pop("eos_token_id")
    config = load_settings(found.settings, "config.json", overrides)
    config = replace(config, run_dir=str(run_dir))
    arrays, tensors = arrays_of(folder, found.family, config)
    report = ImportReport(
        str(source),
        str(run_dir),
        step=0,
        tensors=tensors,
        parameters=sum(array.size for name, array in arrays.items() if name.startswith("params.")),
        optimizer=FRESH,
        assumed=found.assumed,
        not_mapped=found.not_mapped,
    )
    write_run(report, config, arrays, progress=progress)
    return report


def arrays_of(
    folder: HuggingFaceFolder, family: Family, config: Config
) -> tuple[dict[str, StreamedArray], int]:
    """The whole training state by name, optimizer and step zero; how many tensors it is made of.

    Raises:
      CheckpointFormatError: tensors are missing, unknown, or of another shape than `config` says.
    """
    sections = huggingface_table(family, config.model, config.moe)
    further = copies(config.model)
    if config.model.tie_embeddings:
        further[HEAD] = EMBEDDING
    names = match(sections, folder.names, folder.tensor, set(further))
    for copy, original in further.items():
        _require_copy(folder, copy, original)
    blocks = blocks_of(sections)
    arrays = {}
    for name, leaf in state_of(config).items():
        shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
        known = name in blocks
        arrays[name] = _array(folder, blocks[name], shape, dtype) if known else zeros(shape, dtype)
    return arrays, len(names)


def _array(
    folder: HuggingFaceFolder, blocks: Blocks, shape: tuple[int, ...], dtype: np.dtype
) -> StreamedArray:
    def read(index: Index) -> np.ndarray:
        place, which = blocks[index]
        arrays = []
        for theirs in place.rule.theirs:
            array = folder.tensor(place.names(theirs)[0]).numpy()
            arrays.append(fit_rows(array, theirs.shape[0]) if theirs.vocabulary else array)
        return place.rule.to_ours(*arrays)[which]

    return StreamedArray(shape, dtype, len(next(iter(blocks))), read)


def _require_copy(folder: HuggingFaceFolder, copy: str, original: str) -> None:
    """A tensor that is stored twice is one parameter here."""
    if copy not in folder.names:
        return
    first, second = folder.tensor(copy), folder.tensor(original)
    same = tuple(first.shape) == tuple(second.shape)
    if same:
        a, b = first.numpy(), second.numpy()
        rows = range(0, len(a), _COMPARED_ROWS)
        same = all(np.array_equal(*(x[i : i + _COMPARED_ROWS] for x in (a, b))) for i in rows)
    if not same:
        raise CheckpointFormatError(
            f"{folder.path}: {copy} should equal {original}, which it shares its parameter with in"
            " this model. If config.json ties what was trained apart, give"
            " model.tie_embeddings=false; otherwise the model cannot be imported."
        )
