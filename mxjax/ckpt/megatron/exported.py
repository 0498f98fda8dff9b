"""Megatron's tensors, made of the arrays of a run when they are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mxjax.ckpt.mapping.layouts import fit_rows
from mxjax.ckpt.mapping.matching import Place, places
from mxjax.ckpt.mapping.rules import Section, Theirs
from mxjax.ckpt.run_arrays import RunArrays
from mxjax.ckpt.torch_format.values import DTYPES, LazyTensor

MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu"}
"""optax's names of Adam's moments by Megatron's."""

FLOAT32 = DTYPES["float32"]

_MOMENT = re.compile(r"(opt_state\..*)\.mu\.")


@dataclass(frozen=True, eq=False)
class Exported:
    """A tensor of one layer and one expert.

    Attributes:
      theirs: what the table says of it, with the vocabulary padded.
      which: of the results of the rule.
      number: among all; what lies in one array of ours has numbers that follow each other.
    """

    arrays: RunArrays
    place: Place
    theirs: Theirs
    which: int
    number: int

    @property
    def names(self) -> list[str]:
        """What it may be called, as `mapping.megatron` spells names."""
        return self.place.names(self.theirs)

    @property
    def is_parameter(self) -> bool:
        """Whether the optimizer has state for it; the balancing bias of a router is none."""
        return self.place.section.part.startswith("params.")

    def tensor(self, dtype: np.dtype, moment: str | None = None) -> LazyTensor:
        """The whole of it.

        Args:
          dtype: of a parameter; what is none stays fp32, as Megatron keeps it.
          moment: a key of `MOMENTS`, in place of the weight.
        """
        dtype = dtype if self.is_parameter else FLOAT32
        return LazyTensor(self.theirs.shape, dtype, lambda: self._read(moment).astype(dtype))

    def _read(self, moment: str | None) -> np.ndarray:
        names = self.place.leaves()
        if moment is not None:
            prefix = f"{adam_state(self.arrays)}.{MOMENTS[moment]}."
            names = [prefix + name.removeprefix("params.") for name in names]
        ours = [self.arrays.read(name, self.place.index).astype(np.float32) for name in names]
        array = self.place.rule.to_theirs(*ours)[self.which]
        return fit_rows(array, self.theirs.shape[0]) if self.theirs.vocabulary else array


def exported(arrays: RunArrays, sections: Sequence[Section], rows: int) -> list[Exported]:
    """All tensors of a table.

    Rule by rule, and not layer by layer as Megatron does: what lies in one array of ours, perhaps
    in one stored chunk, is read together.

    Args:
      rows: of the vocabulary, with padding.
    """
    order = {id(rule): i for i, rule in enumerate(r for s in sections for r in s.rules)}
    found = []
    for place in sorted(places(sections), key=lambda place: order[id(place.rule)]):
        for which, theirs in enumerate(place.rule.theirs):
            if theirs.vocabulary:
                theirs = replace(theirs, shape=(rows, *theirs.shape[1:]))
            found.append(Exported(arrays, place, theirs, which, len(found)))
    return found


def adam_state(arrays: RunArrays) -> str | None:
    """What the names of Adam's arrays begin with; None: the run has none."""
    found = (_MOMENT.match(name) for name in arrays.shapes)
    return next((match[1] for match in found if match), None)
