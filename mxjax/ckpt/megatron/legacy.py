"""Megatron's ``torch`` format: one file for each rank, with the rank's part of the model.

Layers count anew in every pipeline stage and every virtual chunk, experts in every ``ep`` rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.inspection import expected_ranks
from mxjax.ckpt.leaves import plain
from mxjax.ckpt.locate import RANK_FOLDER
from mxjax.ckpt.mapping.rules import Cut, Theirs
from mxjax.ckpt.torch_format.archive import TorchArchive
from mxjax.ckpt.torch_format.values import LazyTensor, Record, TensorLike

FILE = "model_optim_rng.pt"

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_SEQUENTIAL = re.compile(r"(.+\.experts\.)local_experts\.(\d+)\.(linear_fc[12]\.\w+)")
_GROUPED = re.compile(r"(.+\.experts\.)(linear_fc[12])\.(weight|bias)(\d+)")
_STACKED = re.compile(r"(.+\.experts\.)(linear_fc[12]\.weight)")
_OLD_GROUPED = re.compile(r"(.+\.experts\.)weight([12])")


class LegacyModel:
    """A folder of ``mp_rank_*``; see `opened.MegatronModel`."""

    moments: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob(f"mp_rank_*/{FILE}"))
        contents = {file.parent.name: TorchArchive(file).load() for file in files}
        if not contents:
            raise CheckpointFormatError(f"{folder} has no mp_rank_*/{FILE}.")
        self.folder = folder
        self.common = next(iter(contents.values()))
        args = self.common.get("args") if isinstance(self.common, dict) else None
        if not isinstance(args, Record):
            raise CheckpointFormatError(
                f"{files[0]} has no `args`, Megatron's arguments, so that grid and model are not"
                " known."
            )
        self.args: dict[str, Any] = plain(args.fields)
        if missing := sorted(expected_ranks(self.args) - contents.keys()):
            raise CheckpointFormatError(
                f"{folder} is incomplete: {', '.join(missing[:8])} of"
                f" {len(contents) + len(missing)} ranks are missing. Copy the files of all ranks."
            )
        self._tensor_ranks = self.args.get("tensor_model_parallel_size") or 1
        self._expert_tensor_ranks = (
            self.args.get("expert_tensor_parallel_size") or self._tensor_ranks
        )
        if self._tensor_ranks % self._expert_tensor_ranks:
            raise CheckpointFormatError(
                f"{folder}: experts were split over {self._expert_tensor_ranks} tensor ranks and"
                f" the rest over {self._tensor_ranks}. The format has room for the experts of the"
                " latter only; save it as torch_dist."
            )
        self._shards: dict[str, dict[int, TensorLike]] = {}
        self._collect({self._rank(name): content for name, content in contents.items()})
        self.names = set(self._shards)

    def _rank(self, folder: str) -> tuple[int, int, int]:
        """Tensor, pipeline and expert rank of a folder's name."""
        first, *others = (int(n) for n in RANK_FOLDER.fullmatch(folder).groups() if n is not None)
        if len(others) == 2:
            return first, others[0], others[1]
        if len(others) == 1 and (self.args.get("pipeline_model_parallel_size") or 1) > 1:
            return first, others[0], 0
        return first, 0, others[0] if others else 0

    def _collect(self, ranks: Mapping[tuple[int, int, int], dict[str, Any]]) -> None:
        firsts = _first_layers(ranks)
        for (tensor, stage, expert), content in ranks.items():
            for chunk, state in _chunks(content).items():
                first = firsts[chunk, stage]
                for name, value in state.items():
                    if not isinstance(value, TensorLike) or name.endswith("_extra_state"):
                        continue
                    for known, part in self._named(name, value, first, expert):
                        experts = ".mlp.experts." in known
                        rank = tensor % self._expert_tensor_ranks if experts else tensor
                        # Other expert, data and pipeline ranks have copies of the same.
                        self._shards.setdefault(known, {}).setdefault(rank, part)

    def _named(
        self, name: str, value: TensorLike, first_layer: int, expert_rank: int
    ) -> Iterator[tuple[str, TensorLike]]:
        """The table's name of a tensor; of each of its experts, if it holds several."""
        name = name.replace(".mtp_model_layer.", ".transformer_layer.")
        if found := _LAYER.match(name):
            name = f"decoder.layers.{first_layer + int(found[1])}.{name[found.end() :]}"
        if ".mlp.experts." not in name:
            yield name, value
            return
        local = self._local_experts(name)
        first = expert_rank * local
        if found := _SEQUENTIAL.fullmatch(name):
            yield f"{found[1]}{first + int(found[2])}.{found[3]}", value
        elif found := _GROUPED.fullmatch(name):
            yield f"{found[1]}{first + int(found[4])}.{found[2]}.{found[3]}", value
        elif found := _STACKED.fullmatch(name):
            for e in range(value.shape[0]):
                yield f"{found[1]}{first + e}.{found[2]}", _expert(value, e, lambda a: a)
        elif found := _OLD_GROUPED.fullmatch(name):
            # Memory of [experts, in, out], whatever the shape says.
            inner = value.shape[0] if found[2] == "1" else value.shape[0] // local
            for e in range(local):
                part = _expert(value, e, lambda a: a.reshape(local, inner, -1).swapaxes(1, 2))
                yield f"{found[1]}{first + e}.linear_fc{found[2]}.weight", part
        else:
            yield name, value

    def _local_experts(self, name: str) -> int:
        experts = self.args.get("num_experts") or self.args.get("num_moe_experts") or 0
        ranks = self.args.get("expert_model_parallel_size") or 1
        if not experts or experts % ranks:
            raise CheckpointFormatError(
                f"{self.folder}: {name} is an expert's, but `args` say num_experts"
                f" {experts or None} and expert_model_parallel_size {ranks}."
            )
        return experts // ranks

    def tensor(self, name: str, theirs: Theirs, moment: str | None = None) -> TensorLike:
        """See `opened.MegatronModel`."""
        shards = self._shards[name]
        first = shards[min(shards)]
        whole = first.shape == theirs.shape and theirs.cut is Cut.WHOLE_OR_ROWS
        if whole or theirs.cut is Cut.WHOLE:
            return first
        experts = ".mlp.experts." in name
        ranks = self._expert_tensor_ranks if experts else self._tensor_ranks
        if absent := [rank for rank in range(ranks) if rank not in shards]:
            raise CheckpointFormatError(
                f"{self.folder}: {name} lacks the parts of tensor ranks {absent} of {ranks}."
            )
        parts = [shards[rank] for rank in range(ranks)]
        return parts[0] if ranks == 1 else _merged(parts, theirs.cut)


def _chunks(content: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """State dicts of a rank by virtual chunk."""
    if "model" in content:
        return {0: content["model"]}
    return {int(key[5:]): content[key] for key in content if re.fullmatch(r"model\d+", str(key))}


def _first_layers(
    ranks: Mapping[tuple[int, int, int], dict[str, Any]],
) -> dict[tuple[int, int], int]:
    """Number of the first layer of each (chunk, pipeline rank). They may be of any size."""
    counts: dict[tuple[int, int], int] = {}
    for (_, stage, _), content in ranks.items():
        for chunk, state in _chunks(content).items():
            layers = {int(found[1]) for name in state if (found := _LAYER.match(name))}
            counts[chunk, stage] = max(layers, default=-1) + 1
    firsts, total = {}, 0
    for place in sorted(counts):
        firsts[place] = total
        total += counts[place]
    return firsts


def _expert(stack: TensorLike, index: int, view: Callable[[np.ndarray], np.ndarray]) -> LazyTensor:
    """One expert of a tensor that `view` shows as [experts, out, in]."""
    shape = view(np.broadcast_to(np.int8(0), stack.shape)).shape[1:]
    return LazyTensor(shape, stack.dtype, lambda: view(stack.numpy())[index])


def _merged(parts: list[TensorLike], cut: Cut) -> LazyTensor:
    """The whole of what tensor ranks hold parts of."""
    dim = 1 if cut is Cut.COLUMNS else 0
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)

    def read() -> np.ndarray:
        arrays = [part.numpy() for part in parts]
        if cut is Cut.GATED_ROWS:
            halves = [np.split(array, 2) for array in arrays]
            arrays = [half[branch] for branch in (0, 1) for half in halves]
        return np.concatenate(arrays, axis=dim)

    return LazyTensor(tuple(shape), parts[0].dtype, read)
