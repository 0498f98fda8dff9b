"""Where the layers of each kind lie in the arrays that ranks hold. No JAX.

Weights of layers of one kind are stacked, and the stack is split over the ranks. Each rank has the
same number of places for a kind, chunk after chunk, as many as the largest chunk needs anywhere;
places that a rank does not need hold zeros, take part in nothing, and are in no checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """

    layout: StageLayout
    kinds: Mapping[str, int]

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
        """For each kind, the first place of each chunk on a rank, and behind them the number of
        places."""
        found = {}
        for k, kind in enumerate(self.kinds):
            most = [0] * self.layout.num_chunks
            for stage, counts in enumerate(self.stage_layers):
                chunk = self.layout.chunk_of(stage)
                most[chunk] = max(most[chunk], counts[k])
            found[kind] = [sum(most[:c]) for c in range(len(most) + 1)]
        return found

    def places(self, kind: str) -> np.ndarray:
        """For each place of the whole stack, rank after rank, the number of the layer within its
        kind, or -1."""
        k = list(self.kinds).index(kind)
        bases = self.bases[kind]
        found = np.full((self.layout.num_ranks, bases[-1]), -1)
        before = sum(list(self.kinds.values())[:k])
        for stage, counts in enumerate(self.stage_layers):
            if counts[k]:
                rank, chunk = self.layout.rank_of(stage), self.layout.chunk_of(stage)
                start = self.layout.layers[stage][0] + sum(counts[:k]) - before
                place = bases[chunk]
                found[rank, place : place + counts[k]] = start + np.arange(counts[k])
        return found.reshape(-1)


def in_order(places: Sequence[int]) -> bool:
    """Whether a stack with these places is the model's own order, without gaps."""
    return list(places) == list(range(len(places)))
