"""Comparing the names and shapes of a foreign checkpoint with what a table asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.mapping.rules import Rule, Section, Theirs
from mxjax.ckpt.torch_format.values import TensorLike

_SHOWN = 10


@dataclass(frozen=True)
class Place:
    """One use of a rule: the layer and the expert, by the other program's numbers."""

    section: Section
    rule: Rule
    layer: int | None
    expert: int | None

    @property
    def index(self) -> tuple[int, ...]:
        """Where it is in our stacked arrays."""
        section = self.section
        layer = () if section.layers is None else (self.layer - section.layers[0] + section.first,)
        return layer if self.expert is None else (*layer, self.expert)

    def leaves(self) -> list[str]:
        """Names of our arrays."""
        part = self.section.part
        return [f"{part}.{ours}" if ours else part for ours in self.rule.ours]

    def names(self, theirs: Theirs) -> list[str]:
        """What the tensor may be called here."""
        prefix = self.section.prefix.replace("{layer}", str(self.layer))
        return [prefix + name.replace("{expert}", str(self.expert)) for name in theirs.names]


def places(sections: Sequence[Section]) -> Iterator[Place]:
    """All uses of all rules."""
    for section in sections:
        for layer in section.layers or (None,):
            for rule in section.rules:
                experts = (None,) if rule.experts is None else range(rule.experts)
                for expert in experts:
                    yield Place(section, rule, layer, expert)


Blocks = dict[tuple[int, ...], tuple[Place, int]]
"""For each index of an array's stacked dims: the use of a rule, and which of its results."""


def blocks_of(sections: Sequence[Section]) -> dict[str, Blocks]:
    """Where each array of ours comes from."""
    found: dict[str, Blocks] = {}
    for place in places(sections):
        for which, leaf in enumerate(place.leaves()):
            found.setdefault(leaf, {})[place.index] = place, which
    return found


def match(
    sections: Sequence[Section],
    names: set[str],
    tensor: Callable[[str, Theirs], TensorLike],
    also_known: set[str] = frozenset(),
) -> dict[str, str]:
    """The name under which each tensor of the table is there, by its first name.

    Args:
      names: of all tensors of the checkpoint.
      tensor: opens one of them, without reading it.
      also_known: names that no rule needs and that may be there.

    Raises:
      CheckpointFormatError: tensors are missing, left over, or of another shape; all of the first
        kind found are named.
    """
    found: dict[str, str] = {}
    known = set(also_known)
    missing, misshapen = [], []
    for place in places(sections):
        for theirs in place.rule.theirs:
            candidates = place.names(theirs)
            known.update(candidates)  # our own exports have a tensor under each of its names
            name = next((name for name in candidates if name in names), None)
            if name is None:
                missing.append(f"{' or '.join(candidates)}, of shape {theirs.shape}")
                continue
            found[candidates[0]] = name
            shape = tuple(tensor(name, theirs).shape)
            same = shape[1:] == theirs.shape[1:] if theirs.vocabulary else shape == theirs.shape
            if not same:
                misshapen.append(f"{name} has shape {shape}, expected {theirs.shape}")
    extra = sorted(names - known)
    problems = [
        *_listed("not in the checkpoint", missing),
        *_listed("of another shape", misshapen),
        *_listed("in the checkpoint, and unknown", extra),
    ]
    if problems:
        raise CheckpointFormatError(
            "The checkpoint does not fit the model that its arguments describe:\n"
            + "\n".join(problems)
            + "\nNothing was written. If the arguments are wrong, correct them with"
            " section.key=value; parts that mxjax does not have cannot be imported."
        )
    return found


def _listed(heading: str, lines: list[str]) -> list[str]:
    if not lines:
        return []
    more = [f"    ... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [f"  {heading}:", *(f"    {line}" for line in lines[:_SHOWN]), *more]
