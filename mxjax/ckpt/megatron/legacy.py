"""Megatron's ``torch`` format: one file for each rank, with the rank's part of the model.

Layers count anew in every pipeline stage and every virtual chunk, experts in every ``ep`` rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.inspection import expected_ranks
from mxjax.ckpt.leaves import plain
from mxjax.ckpt.locate import RANK_FOLDER
from mxjax.ckpt.mapping.rules import Cut, Section, Theirs
from mxjax.ckpt.megatron.grid import Rank
from mxjax.ckpt.megatron.legacy_adam import DISTRIBUTED_FILE, States, has_state, read_rank
from mxjax.ckpt.megatron.saved_adam import MOMENTS, OptimizerStateError, SavedAdam, adam_count
from mxjax.ckpt.torch_format.archive import TorchArchive
from mxjax.ckpt.torch_format.values import LazyTensor, Record, TensorLike

FILE = "model_optim_rng.pt"

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_SEQUENTIAL = re.compile(r"(.+\.experts\.)local_experts\.(\d+)\.(linear_fc[12]\.\w+)")
_GROUPED = re.compile(r"(.+\.experts\.)(linear_fc[12])\.(weight|bias)(\d+)")
_STACKED = re.compile(r"(.+\.experts\.)(linear_fc[12]\.weight)")
_OLD_GROUPED = re.compile(r"(.+\.experts\.)weight([12])")


Shards = dict[str, dict[int, TensorLike]]
"""Parts of tensors by name and tensor parallel rank."""


class LegacyModel:
    """A folder of ``mp_rank_*``; see `opened.MegatronModel`."""

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
        self._files = {self._rank(file.parent.name): file for file in files}
        self._contents = {rank: contents[f.parent.name] for rank, f in self._files.items()}
        models = {rank: _chunks(content) for rank, content in self._contents.items()}
        self._firsts = _first_layers(models)
        self._shards = self._collected(models)
        self.names = set(self._shards)

    def optimizer_state(self, sections: Sequence[Section]) -> SavedAdam | None:
        """See `opened.MegatronModel`."""
        optimizer = self.common.get("optimizer")
        if not has_state(optimizer):
            return None
        states: dict[str, dict[Rank, States]] = {}
        for rank, file in self._files.items():
            content = self._contents[rank]
            found = read_rank(file, content["optimizer"], _chunks(content), rank.stage, self.args)
            for kind, state in found.states.items():
                states.setdefault(kind, {})[rank] = state
        if not states:
            raise OptimizerStateError(
                f"{self.folder} has no {DISTRIBUTED_FILE}, which the distributed optimizer keeps"
                " its state in."
            )
        shards = {kind: self._collected(ranks) for kind, ranks in states.items()}
        return SavedAdam(
            adam_count(optimizer),
            {
                kind: shards[kind].keys() if kind in shards else set()
                for kind in (*MOMENTS, *shards)
            },
            lambda name, theirs, kind: self._whole(shards[kind], name, theirs),
        )

    def _rank(self, folder: str) -> Rank:
        """Tensor, pipeline and expert rank of a folder's name."""
        first, *others = (int(n) for n in RANK_FOLDER.fullmatch(folder).groups() if n is not None)
        if len(others) == 2:
            return Rank(first, *others)
        if len(others) == 1 and (self.args.get("pipeline_model_parallel_size") or 1) > 1:
            return Rank(first, others[0], 0)
        return Rank(first, 0, others[0] if others else 0)

    def _collected(self, ranks: Mapping[Rank, States]) -> Shards:
        """Parts of tensors by the table's names; `ranks` has the weights of each rank, or what is
        in place of them in the optimizer."""
        found: Shards = {}
        for rank, chunks in ranks.items():
            for chunk, state in chunks.items():
                first = self._firsts[chunk, rank.stage]
                for name, value in state.items():
                    if not isinstance(value, TensorLike) or name.endswith("_extra_state"):
                        continue
                    for known, part in self._named(name, value, first, rank.expert):
                        experts = ".mlp.experts." in known
                        tensor = rank.tensor % self._expert_tensor_ranks if experts else rank.tensor
                        # Other expert, data and pipeline ranks have copies of the same.
                        found.setdefault(known, {}).setdefault(tensor, part)
        return found

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

    def tensor(self, name: str, theirs: Theirs) -> TensorLike:
        """See `opened.MegatronModel`."""
        return self._whole(self._shards, name, theirs)

    def _whole(self, shards: Shards, name: str, theirs: Theirs) -> TensorLike:
        ranks = self._expert_tensor_ranks if ".mlp.experts." in name else self._tensor_ranks
        return whole(shards[name], ranks, theirs, f"{self.folder}: {name}")


def whole(shards: Mapping[int, TensorLike], ranks: int, theirs: Theirs, what: str) -> TensorLike:
    """A tensor of which tensor parallel ranks have parts.

    Raises:
      CheckpointFormatError: parts are missing.
    """
    first = shards[min(shards)]
    is_whole = first.shape == theirs.shape and theirs.cut is Cut.WHOLE_OR_ROWS
    if is_whole or theirs.cut is Cut.WHOLE:
        return first
    if absent := [rank for rank in range(ranks) if rank not in shards]:
        raise CheckpointFormatError(f"{what} lacks the parts of tensor ranks {absent} of {ranks}.")
    parts = [shards[rank] for rank in range(ranks)]
    return parts[0] if ranks == 1 else _merged(parts, theirs.cut)


def _chunks(content: dict[str, Any]) -> States:
    """State dicts of a rank by virtual chunk."""
    if "model" in content:
        return {0: content["model"]}
    return {int(key[5:]): content[key] for key in content if re.fullmatch(r"model\d+", str(key))}


def _first_layers(ranks: Mapping[Rank, States]) -> dict[tuple[int, int], int]:
    """Number of the first layer of each (chunk, pipeline rank). They may be of any size."""
    counts: dict[tuple[int, int], int] = {}
    for rank, chunks in ranks.items():
        for chunk, state in chunks.items():
            layers = {int(found[1]) for name in state if (found := _LAYER.match(name))}
            counts[chunk, rank.stage] = max(layers, default=-1) + 1
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
