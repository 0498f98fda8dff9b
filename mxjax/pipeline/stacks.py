"""Where the layers of each kind lie in the arrays that ranks hold. No JAX.

Layers of one kind are one program. Weights of one group, of one kind or of several that follow each
other and differ in what they keep for their backward passes, are stacked, and the stack is split
over the ranks. Each rank has the same number of places for a group, chunk after chunk, as many as
the largest chunk needs anywhere; places that a rank does not need hold zeros, take part in nothing,
and are in no checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mxjax.pipeline.layout import StageLayout

LayerCounts = tuple[int, ...]
"""Layers of each kind on a stage, in the order in which the kinds follow each other."""


@dataclass(frozen=True)
class Stacks:
    """The places of all layers.

    Attributes:
      kinds: number of layers of each kind in the model, in the order of the model.
      group_of: the group of kinds that are not one by themselves.
    """

    layout: StageLayout
    kinds: Mapping[str, int]
    group_of: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """The kinds of each group, both in the order of the model."""
        found: dict[str, list[str]] = {}
        for kind in self.kinds:
            found.setdefault(self.group(kind), []).append(kind)
        return found

    def group(self, kind: str) -> str:
        """The group that a kind belongs to; a group is its own."""
        return self.group_of.get(kind, kind)

    def before(self, kind: str, counts: LayerCounts) -> int:
        """Layers of the kind's group that come before it on a stage with these."""
        of_kind = dict(zip(self.kinds, counts, strict=True))
        group = self.groups[self.group(kind)]
        return sum(of_kind[other] for other in group[: group.index(kind)])

    def of_group(self, group: str, counts: LayerCounts) -> int:
        """Layers of a group on a stage with these."""
        pairs = zip(self.kinds, counts, strict=True)
        return sum(n for kind, n in pairs if self.group(kind) == group)

    @cached_property
    def stage_layers(self) -> tuple[LayerCounts, ...]:
        """Layers of each kind on each stage."""
        ends = np.cumsum(list(self.kinds.values()))
        kind_of = [int(np.searchsorted(ends, layer, "right")) for layer in range(ends[-1])]
        return tuple(
            tuple(sum(kind_of[layer] == k for layer in layers) for k in range(len(ends)))
            for layers in self.layout.layers
        )

    def first_layer(self, stage: int) -> int:
        """Layers of the model before those of a stage."""
        return sum(map(sum, self.stage_layers[:stage]))

    @cached_property
    def bases(self) -> dict[str, list[int]]:
        """For each group, the first place of each chunk on a rank, and behind them the number of
        places."""
        found = {}
        for group in self.groups:
            most = [0] * self.layout.num_chunks
            for stage, counts in enumerate(self.stage_layers):
                chunk = self.layout.chunk_of(stage)
                most[chunk] = max(most[chunk], self.of_group(group, counts))
            found[group] = [sum(most[:c]) for c in range(len(most) + 1)]
        return found

    def places(self, group: str) -> np.ndarray:
        """For each place of the whole stack, rank after rank, the number of the layer within its
        group, or -1."""
        bases = self.bases[group]
        found = np.full((self.layout.num_ranks, bases[-1]), -1)
        start = 0
        for stage, counts in enumerate(self.stage_layers):
            rank, chunk = self.layout.rank_of(stage), self.layout.chunk_of(stage)
            place, number = bases[chunk], self.of_group(group, counts)
            found[rank, place : place + number] = start + np.arange(number)
            start += number
        return found.reshape(-1)


def in_order(places: Sequence[int]) -> bool:
    """Whether a stack with these places is the model's own order, without gaps."""
    return list(places) == list(range(len(places)))
