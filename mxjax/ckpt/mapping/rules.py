"""What a mapping table is made of.

A table is a list of sections, one for each part of the parameter tree. A section has rules, and a
rule ties one or several of our parameters to one or several tensors of the other program. Names
within a section are those of one layer; stacked layers and experts are the table's business, not
the rules'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

Arrays = tuple[np.ndarray, ...]


class Cut(Enum):
    """How Megatron's tensor parallel ranks hold a tensor."""

    WHOLE = "whole"
    """All ranks have all of it."""
    ROWS = "rows"
    """Each has some rows (dim 0)."""
    COLUMNS = "columns"
    """Each has some columns (dim 1)."""
    GATED_ROWS = "gated rows"
    """Each has some rows of the gate and the same rows of up, one below the other."""
    WHOLE_OR_ROWS = "whole or rows"
    """Whole with Transformer Engine, cut by rows with Megatron's own modules."""


@dataclass(frozen=True)
class Theirs:
    """A tensor of the other program.

    Attributes:
      names: what it may be called, within its layer; the first is what is written. ``{expert}``
        stands for the number of an expert.
      shape: of the whole tensor, of one layer and one expert.
      vocabulary: rows are tokens, and their number may differ by padding.
      keep_precision: written in fp32, whatever the dtype of the rest.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    cut: Cut = Cut.WHOLE
    vocabulary: bool = False
    keep_precision: bool = False


@dataclass(frozen=True)
class Rule:
    """Parameters of ours that correspond to tensors of theirs.

    Attributes:
      ours: names within a layer, such as ``attention.q``; empty: the part itself.
      to_ours: theirs -> ours, in the order of the names.
      to_theirs: the inverse.
      experts: how many of it there are in a layer; None: it is not an expert's.
    """

    ours: tuple[str, ...]
    theirs: tuple[Theirs, ...]
    to_ours: Callable[..., Arrays]
    to_theirs: Callable[..., Arrays]
    experts: int | None = None


@dataclass(frozen=True)
class Section:
    """A part of the training state.

    Attributes:
      part: its name, such as ``params.moe_layers``.
      prefix: what the other program's names begin with; ``{layer}`` stands for the layer.
      layers: numbers of the layers in the other program; None: the part is not stacked.
      first: where in our stack the first of them is.
    """

    part: str
    prefix: str
    rules: tuple[Rule, ...]
    layers: range | None = None
    first: int = 0


def one(
    ours: str,
    theirs: Theirs,
    to_ours: Callable[[np.ndarray], np.ndarray] = lambda array: array,
    to_theirs: Callable[[np.ndarray], np.ndarray] = lambda array: array,
    experts: int | None = None,
) -> Rule:
    """A rule for one parameter and one tensor."""
    return Rule(
        (ours,),
        (theirs,),
        lambda array: (to_ours(array),),
        lambda array: (to_theirs(array),),
        experts,
    )
