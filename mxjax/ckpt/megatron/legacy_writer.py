"""Writing Megatron's ``torch`` format: one file for each rank of a grid."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mxjax.ckpt.mapping.rules import Cut
from mxjax.ckpt.megatron.exported import FLOAT32, MOMENTS, Exported
from mxjax.ckpt.megatron.grid import Grid, Rank
from mxjax.ckpt.megatron.legacy import FILE
from mxjax.ckpt.megatron.module_names import Spelling, registration_order
from mxjax.ckpt.megatron.optimizer_state import AdamState
from mxjax.ckpt.torch_format.archive_writer import save
from mxjax.ckpt.torch_format.values import LazyTensor

Tensors = dict[str, Exported]

_LINEAR = re.compile(r"(.+\.(?:linear_\w+|eh_proj))\.weight\d*")


@dataclass(frozen=True)
class LegacyLayout:
    """Which rank holds what.

    Attributes:
      num_layers: of the decoder, equally many for each chunk.
      tied: the embedding is the head too; if these are on different stages, both have it.
      spelling: of names.
    """

    grid: Grid
    num_layers: int
    tied: bool
    spelling: Spelling

    def chunks(self, tensors: Sequence[Exported], rank: Rank) -> list[Tensors]:
        """The tensors of each virtual chunk of a rank, by the names of their modules."""
        mtp = any(t.place.section.prefix.startswith("mtp.") for t in tensors)
        found: list[Tensors] = [{} for _ in range(self.grid.vpp)]
        for tensor in tensors:
            for stage in self._stages(tensor, mtp):
                chunk, pipeline_rank = divmod(stage, self.grid.pp)
                expert = self._local_expert(tensor, rank)
                if pipeline_rank == rank.stage and expert != -1:
                    name = self.spelling.name(tensor, self._local_layer(tensor), expert)
                    found[chunk][name] = tensor
        if self.tied and self._last > 0 and rank.stage == self.grid.pp - 1:
            found[-1]["output_layer.weight"] = next(
                t for t in tensors if t.names[0] == "embedding.word_embeddings.weight"
            )
        # In the order of registration: the only clue which of Adam's numbers is whose.
        return [
            {name: chunk[name] for name in sorted(chunk, key=registration_order)} for chunk in found
        ]

    @property
    def _last(self) -> int:
        return self.grid.pp * self.grid.vpp - 1

    def _stages(self, tensor: Exported, mtp: bool) -> set[int]:
        """Stages that hold it, counted in the order in which they compute."""
        section = tensor.place.section
        if section.part == "params.embedding":
            return {0, self._last} if mtp else {0}
        if section.prefix.startswith("decoder.layers."):
            return {tensor.place.layer // self._chunk_layers}
        return {self._last}

    @property
    def _chunk_layers(self) -> int:
        return self.num_layers // (self._last + 1)

    def _local_layer(self, tensor: Exported) -> int | None:
        if tensor.place.section.prefix.startswith("decoder.layers."):
            return tensor.place.layer % self._chunk_layers
        return tensor.place.layer

    def _local_expert(self, tensor: Exported, rank: Rank) -> int | None:
        """Its number in this rank; -1: another has it; None: it is no expert's."""
        expert, count = tensor.place.expert, tensor.place.rule.experts
        if expert is None:
            return None
        owner, local = divmod(expert, count // self.grid.ep)
        return local if owner == rank.expert else -1

    def part(
        self, tensor: Exported, rank: Rank, dtype: np.dtype, moment: str | None = None
    ) -> LazyTensor:
        """What a rank has of a tensor."""
        whole = tensor.tensor(dtype, moment)
        of_expert = tensor.place.expert is not None
        ranks = self.grid.expert_tp if of_expert else self.grid.tp
        cut = tensor.theirs.cut
        if cut is Cut.WHOLE_OR_ROWS:
            cut = Cut.ROWS if self.spelling.local else Cut.WHOLE
        if ranks == 1 or cut is Cut.WHOLE:
            return whole
        dim, branches = int(cut is Cut.COLUMNS), 2 if cut is Cut.GATED_ROWS else 1
        shape = list(whole.shape)
        shape[dim] //= ranks

        def read() -> np.ndarray:
            parts = np.split(whole.numpy(), branches * ranks, axis=dim)
            return np.concatenate(parts[rank.tensor % ranks :: ranks], axis=dim)

        return LazyTensor(tuple(shape), whole.dtype, read)


def write_legacy(
    folder: Path,
    tensors: Sequence[Exported],
    layout: LegacyLayout,
    common: dict[str, Any],
    dtype: np.dtype,
    adam: AdamState | None,
    bar: tqdm,
) -> None:
    """Writes one iteration.

    Args:
      folder: such as ``iter_0000010``.
      common: plain values.
      dtype: of the weights.
      adam: write Adam's moments, and fp32 weights if `dtype` is another; None: nothing of these.
      bar: shows the bytes of tensors.
    """
    contents = {
        rank: common | _RankContent(tensors, layout, rank, dtype, bar).all(adam)
        for rank in layout.grid.ranks()
    }
    for rank, content in contents.items():
        path = folder / layout.grid.folder(rank) / FILE
        path.parent.mkdir(parents=True)
        save(path, content)


class _RankContent:
    """What the file of a rank holds beside plain values. Tensors are read when they are written."""

    def __init__(
        self,
        tensors: Sequence[Exported],
        layout: LegacyLayout,
        rank: Rank,
        dtype: np.dtype,
        bar: tqdm,
    ) -> None:
        self._chunks = layout.chunks(tensors, rank)
        self._layout, self._rank, self._dtype, self._bar = layout, rank, dtype, bar

    def all(self, adam: AdamState | None) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for number, chunk in enumerate(self._chunks):
            key = "model" if len(self._chunks) == 1 else f"model{number}"
            content[key] = {name: self._part(t, self._dtype) for name, t in chunk.items()}
            content[key] |= dict.fromkeys(_extra_states(chunk, self._layout.spelling.local))
        if adam is not None:
            split = self._layout.grid.ep > 1  # then experts have an optimizer of their own
            found = [self._optimizer(adam, kind) for kind in ((False, True) if split else (None,))]
            content["optimizer"] = found if split else found[0]
            content["opt_param_scheduler"] = adam.scheduler()
        return content

    def _optimizer(self, adam: AdamState, experts: bool | None) -> dict[str, Any]:
        """The state of torch's Adam, for experts, for all others, or (None) for both."""
        params = [
            tensor
            for chunk in self._chunks
            for tensor in chunk.values()
            if tensor.is_parameter and experts in (None, tensor.place.expert is not None)
        ]
        groups, members, state = adam.groups(bool(experts)), [], {}
        for group in groups:
            plain = group["wd_mult"] == 0
            members.append([t for t in params if (len(t.theirs.shape) == 1) == plain])
            group["params"] = list(range(len(state), len(state) + len(members[-1])))
            for index, tensor in zip(group["params"], members[-1], strict=True):
                moments = {name: self._part(tensor, FLOAT32, name) for name in MOMENTS}
                state[index] = {"step": adam.step, **moments}
        inner = {"state": state, "param_groups": groups}
        if self._dtype == FLOAT32:
            return inner
        master = [[self._part(tensor, FLOAT32) for tensor in group] for group in members]
        return {"optimizer": inner, "fp32_from_fp16_params": master}

    def _part(self, tensor: Exported, dtype: np.dtype, moment: str | None = None) -> LazyTensor:
        part = self._layout.part(tensor, self._rank, dtype, moment)
        nbytes = prod(part.shape) * part.dtype.itemsize
        self._bar.total = (self._bar.total or 0) + nbytes

        def read() -> np.ndarray:
            self._bar.update(nbytes)
            return part.numpy()

        # The weights, then one moment, then the other: each array of ours in one go.
        kind = list(MOMENTS).index(moment) + 1 if moment else 0
        return LazyTensor(part.shape, part.dtype, read, order=(kind << 32) + tensor.number)


def _extra_states(names: Iterable[str], local: bool) -> set[str]:
    """Entries that modules with a linear map have beside their weights; they are None."""
    modules = {found[1] for name in names if (found := _LINEAR.fullmatch(name))}
    if "decoder.final_layernorm.weight" in names:
        modules.add("output_layer")  # without a weight of its own if it is tied
    if not local:
        core = {m.replace("linear_proj", "core_attention") for m in modules if "linear_proj" in m}
        modules |= core
    return {f"{module}._extra_state" for module in modules}
