"""A folder as on Hugging Face's hub: ``config.json``, safetensors, an index of several files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.mapping.rules import Theirs
from mxjax.ckpt.safetensors import DTYPES, SafeTensor, read_safetensors
from mxjax.ckpt.torch_format.values import LazyTensor, TensorLike

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_FP8 = (DTYPES["F8_E4M3"], DTYPES["F8_E5M2"])
_SCALE = "_scale_inv"
"""Ends the name of the scales of an fp8 tensor."""


@dataclass(frozen=True, eq=False)
class HuggingFaceFolder:
    """Tensors by name, and the configuration.

    Attributes:
      path: of the folder.
      config: what ``config.json`` says.
      tensors: nothing is read before their ``numpy()``; fp8 ones with scales come as fp32.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorLike]

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self.tensors)

    def tensor(self, name: str, theirs: Theirs | None = None) -> TensorLike:
        """One of them; the table's `theirs` makes no difference."""
        return self.tensors[name]


def open_folder(path: Path) -> HuggingFaceFolder:
    """The checkpoint in the folder `path`.

    Raises:
      CheckpointFormatError: files are missing or damaged, or weights are quantised in a way that is
        not read.
    """
    if not path.is_dir():
        raise CheckpointFormatError(f"{path} is no folder; give the one with {CONFIG} in it.")
    config = _json(path / CONFIG)
    tensors: dict[str, SafeTensor] = {}
    for file, wanted in _files(path).items():
        found = read_safetensors(path / file)
        if lacking := sorted(wanted - found.keys()):
            raise CheckpointFormatError(
                f"{path / file} has no {lacking[0]} (and {len(lacking) - 1} more), which {INDEX}"
                " says it has. Download it again."
            )
        tensors |= found
    plain = _without_scales(tensors, config)
    # Buffers that old versions of transformers saved: they follow from the configuration.
    plain = {k: v for k, v in plain.items() if not k.endswith("rotary_emb.inv_freq")}
    return HuggingFaceFolder(path, config, plain)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointFormatError(
            f"{path} is missing: it says what the model is. Download it with the weights."
        ) from error
    except ValueError as error:
        raise CheckpointFormatError(f"{path} is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointFormatError(f"{path} holds no JSON object.")
    return found


def _files(path: Path) -> dict[str, set[str]]:
    """Names of the files, with the tensors that each must have."""
    if not (path / INDEX).exists():
        if (path / SINGLE).exists():
            return {SINGLE: set()}
        raise CheckpointFormatError(
            f"{path} has neither {SINGLE} nor {INDEX}. Download the one that belongs to its"
            " *.safetensors."
        )
    weight_map = _json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointFormatError(f"{path / INDEX} has no `weight_map` of names to files.")
    files: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(file, set()).add(name)
    for file, names in sorted(files.items()):
        if Path(file).name != file:
            raise CheckpointFormatError(f"{path / INDEX} names {file!r}, out of its folder.")
        if not (path / file).is_file():
            raise CheckpointFormatError(
                f"{path / file} is missing, with {len(names)} tensors such as {min(names)}."
                " Download it."
            )
    return files


def _without_scales(
    tensors: Mapping[str, SafeTensor], config: Mapping[str, Any]
) -> dict[str, TensorLike]:
    """The tensors as they are meant: fp8 ones multiplied by their scales."""
    quantization = config.get("quantization_config") or {}
    if quantization and quantization.get("quant_method") != "fp8":
        raise CheckpointFormatError(
            f"config.json: quantization_config.quant_method is {quantization.get('quant_method')!r}"
            "; read are fp8 weights in blocks (DeepSeek-V3) and weights that are not quantised."
        )
    found: dict[str, TensorLike] = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in tensors:
            continue
        if tensor.dtype not in _FP8:
            found[name] = tensor
            continue
        if f"{name}{_SCALE}" not in tensors:
            raise CheckpointFormatError(
                f"{name} is stored as {tensor.dtype} without {name}{_SCALE}, its scales."
            )
        block = quantization.get("weight_block_size") or [128, 128]
        found[name] = _dequantised(name, tensor, tensors[f"{name}{_SCALE}"], block)
    return found


def _dequantised(name: str, tensor: SafeTensor, scales: SafeTensor, block: list[int]) -> LazyTensor:
    """Blocks of a matrix times one scale each."""
    needed = tuple(-(-size // step) for size, step in zip(tensor.shape, block, strict=False))
    if len(tensor.shape) != 2 or scales.shape != needed:
        raise CheckpointFormatError(
            f"{name} of shape {tensor.shape} has scales of shape {scales.shape}; in blocks of"
            f" {block} they are {needed}."
        )
    rows, columns = block

    def read() -> np.ndarray:
        array = tensor.numpy().astype(np.float32)
        for i, row in enumerate(scales.numpy().astype(np.float32)):
            array[i * rows : (i + 1) * rows] *= np.repeat(row, columns)[: array.shape[1]]
        return array

    return LazyTensor(tensor.shape, np.dtype(np.float32), read)
