"""Which layer lies on which stage: the one table that building, numbering and checkpoints read.

The model is a row of layers, embedding first and loss last, that is cut into global stages. Where:
evenly, with the embedding and the loss counted as layers and places left empty if wanted; or by the
layers of the first and the last rank; or by Megatron's layout string. No JAX.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from mxjax.pipeline.schedule import loop_placement, v_placement

Placement = Literal["loop", "v"]

_MOST_LETTERS = 100_000
"""Of a layout string without repetitions."""


class LayoutError(ValueError):
    """Layers that do not fit the stages.

    Attributes:
        key: the setting to change, an argument of `make_layout`.
        message: what is wrong, with the sums, and the way out.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message


@dataclass(frozen=True)
class StageLayout:
    """What lies on each global stage. The embedding is always on the first and the loss, with the
    final norm and the head, on the last."""

    num_ranks: int
    num_chunks: int
    """Stages of each rank."""
    placement: Placement
    """`loop`: chunk c of rank r is stage c P + r; `v`: chunks of rank r are r and 2 P - 1 - r."""
    layers: tuple[tuple[int, ...], ...]
    """For each stage, the numbers of its layers in the model. A stage may have none."""
    mtp_layers: tuple[tuple[int, ...], ...]
    """For each stage, the numbers of its multi-token prediction layers."""
    empty_layers: tuple[int, ...]
    """For each stage, how many slots were left empty. They exist nowhere but here."""

    @property
    def num_stages(self) -> int:
        """Global stages."""
        return len(self.layers)

    @property
    def num_layers(self) -> int:
        """Layers of the model, without empty and without multi-token prediction layers."""
        return sum(map(len, self.layers))

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        """Rank of each stage, as in `Schedule`."""
        if self.placement == "v":
            return v_placement(self.num_ranks)
        return loop_placement(self.num_ranks, self.num_chunks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank; the position is the chunk number."""
        return tuple(s for s, owner in enumerate(self.stage_to_rank) if owner == rank)

    def rank_of(self, stage: int) -> int:
        """The rank that a stage lies on."""
        return self.stage_to_rank[stage]

    def chunk_of(self, stage: int) -> int:
        """Which chunk of its rank a stage is."""
        return self.stages_of(self.rank_of(stage)).index(stage)

    def has_embedding(self, stage: int) -> bool:
        """Whether the embedding lies on this stage."""
        return stage == 0

    def has_loss(self, stage: int) -> bool:
        """Whether final norm, head and loss lie on this stage."""
        return stage == self.num_stages - 1

    def describe(self) -> str:
        """A line for each rank, such as ``rank 0: embedding, layers 0-2 | layers 31-34``."""
        lines = []
        for rank in range(self.num_ranks):
            stages = " | ".join(self._describe_stage(stage) for stage in self.stages_of(rank))
            lines.append(f"rank {rank}: {stages}")
        return "\n".join(lines)

    def _describe_stage(self, stage: int) -> str:
        parts = ["embedding"] if self.has_embedding(stage) else []
        layers, mtp = self.layers[stage], self.mtp_layers[stage]
        if len(layers) == 1:
            parts.append(f"layer {layers[0]}")
        elif layers:
            parts.append(f"layers {layers[0]}-{layers[-1]}")
        if self.empty_layers[stage]:
            parts.append(f"{self.empty_layers[stage]} empty")
        if mtp:
            parts.append(f"mtp {mtp[0]}" if len(mtp) == 1 else f"mtp {mtp[0]}-{mtp[-1]}")
        if self.has_loss(stage):
            parts.append("loss")
        return ", ".join(parts) or "nothing"


def make_layout(
    num_layers: int,
    num_ranks: int,
    num_chunks: int = 1,
    placement: Placement = "loop",
    *,
    mtp_num_layers: int = 0,
    layout: str | None = None,
    num_layers_in_first_pipeline_stage: int | None = None,
    num_layers_in_last_pipeline_stage: int | None = None,
    account_for_embedding_in_pipeline_split: bool = False,
    account_for_loss_in_pipeline_split: bool = False,
    empty_layers: Literal["auto"] | Sequence[int] = (),
) -> StageLayout:
    """Cut a model into `num_ranks` x `num_chunks` stages. Names and meanings are Megatron's.

    Args:
        num_layers: layers of the model, empty and multi-token prediction layers not counted.
        num_ranks: pipeline ranks.
        num_chunks: stages of each rank.
        placement: how stages lie on ranks; `v` has two chunks a rank.
        mtp_num_layers: multi-token prediction layers; they come before the loss, on its stage
            unless `layout` has a stage for them.
        layout: stages separated by ``|``, of ``E`` embedding, ``t`` layer, ``m`` multi-token
            prediction layer, ``L`` loss; ``x*3`` and ``(...)*3`` repeat, commas are ignored.
        num_layers_in_first_pipeline_stage: layers of the first rank, on all of its chunks together.
        num_layers_in_last_pipeline_stage: the same for the last rank.
        account_for_embedding_in_pipeline_split: the embedding takes the place of a layer.
        account_for_loss_in_pipeline_split: the loss does.
        empty_layers: places to leave empty, counted in the row of layers and empty places, which
            must then divide by the stages; ``auto`` takes as many as that needs, where embedding
            and loss are work already: the last stage, the first, the last again, then one of each
            stage from both ends inwards.

    Raises:
        LayoutError: the layers do not add up, or a rank has nothing to compute.
    """
    if placement == "v" and num_chunks != 2:
        raise LayoutError(
            "num_chunks", f"{num_chunks}, but stages in a V are two a rank; set it to 2"
        )
    counts = (num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage)
    account = (account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split)
    _refuse_two_ways(layout, counts, account, empty_layers)
    for key, count in (("num_ranks", num_ranks), ("num_chunks", num_chunks)):
        if count > num_layers + mtp_num_layers + 2:
            raise LayoutError(
                key,
                f"{count}, but only {num_layers} layers, the embedding and the loss can be spread; "
                "lower it",
            )
    num_stages = num_ranks * num_chunks
    mtp = [0] * (num_stages - 1) + [mtp_num_layers]
    empty = [0] * num_stages
    if layout is not None:
        sizes, mtp = _sizes_from_string(layout, num_layers, mtp_num_layers, num_ranks, num_chunks)
    elif counts != (None, None):
        per_rank = _layers_of_ranks(num_layers, num_ranks, num_chunks, *counts)
        owners = (
            v_placement(num_ranks) if placement == "v" else loop_placement(num_ranks, num_chunks)
        )
        sizes = [per_rank[rank] // num_chunks for rank in owners]
    else:
        sizes, empty = _even_sizes(num_layers, num_ranks, num_chunks, account, empty_layers)
    made = StageLayout(
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        placement=placement,
        layers=_number(sizes),
        mtp_layers=_number(mtp),
        empty_layers=tuple(empty),
    )
    _refuse_idle_ranks(made, layout, counts)
    return made


def count_stages(layout: str) -> int:
    """How many global stages a layout string has.

    Raises:
        LayoutError: it is not a layout string.
    """
    return _unrolled(layout).count("|") + 1


def _refuse_two_ways(
    layout: str | None,
    counts: tuple[int | None, int | None],
    account: tuple[bool, bool],
    empty_layers: Literal["auto"] | Sequence[int],
) -> None:
    counted = any(count is not None for count in counts)
    others = {
        "num_layers_in_first_pipeline_stage / num_layers_in_last_pipeline_stage": counted,
        "account_for_embedding_in_pipeline_split / account_for_loss_in_pipeline_split": any(
            account
        ),
        "empty_layers": bool(empty_layers),
    }
    if layout is not None:
        for other, given in others.items():
            if given:
                raise LayoutError("layout", f"already says where each layer lies; remove {other}")
    if counted:
        key = f"num_layers_in_{'last' if counts[0] is None else 'first'}_pipeline_stage"
        for other in list(others)[1:]:
            if others[other]:
                raise LayoutError(
                    key, f"cannot be combined with {other}; remove one, or use layout instead"
                )


def _even_sizes(
    num_layers: int,
    num_ranks: int,
    num_chunks: int,
    account: tuple[bool, bool],
    empty_layers: Literal["auto"] | Sequence[int],
) -> tuple[list[int], list[int]]:
    """Layers and empty places of each stage when all stages have equally many slots."""
    num_stages = num_ranks * num_chunks
    taken = [0] * num_stages
    taken[0] += account[0]
    taken[-1] += account[1]
    used = num_layers + sum(account)
    if empty_layers == "auto":
        num_empty = -used % num_stages
        empty = _places_for_empty(num_empty, (used + num_empty) // num_stages, taken)
    else:
        num_empty = len(empty_layers)
        _refuse_remainder(num_layers, account, num_empty, num_ranks, num_chunks)
        empty = [0] * num_stages
        for place in _checked_places(empty_layers, num_layers):
            empty[(place + account[0]) * num_stages // (used + num_empty)] += 1
    slots = (used + num_empty) // num_stages
    return [slots - t - e for t, e in zip(taken, empty, strict=True)], empty


def _places_for_empty(num_empty: int, slots: int, taken: Sequence[int]) -> list[int]:
    """Empty places of each stage for `auto`; `taken` are slots of embedding and loss."""
    last = len(taken) - 1
    inwards = [stage for i in range(1, last) for stage in (last - i, i)][: max(last - 1, 0)]
    wanted = [last, 0, last, *inwards]
    # The places that embedding and loss have taken by themselves are not theirs a second time.
    if taken[0]:
        wanted.remove(0)
    if taken[last]:
        wanted.remove(last)
    empty = [0] * len(taken)
    for stage in wanted:
        if sum(empty) < num_empty and empty[stage] + taken[stage] < slots:
            empty[stage] += 1
    return empty


def _checked_places(places: Sequence[int], num_layers: int) -> Sequence[int]:
    end = num_layers + len(places)
    outside = [place for place in places if not 0 <= place < end]
    if outside:
        raise LayoutError(
            "empty_layers", f"there is no place {outside[0]}; there are 0 to {end - 1}"
        )
    if len(set(places)) < len(places):
        raise LayoutError("empty_layers", f"{list(places)} names a place twice; remove one")
    return places


def _refuse_idle_ranks(
    made: StageLayout, layout: str | None, counts: tuple[int | None, int | None]
) -> None:
    """A stage may have no layers, and a rank the embedding or the loss alone."""
    for rank in range(made.num_ranks):
        stages = made.stages_of(rank)
        if any(
            made.layers[s] or made.mtp_layers[s] or made.has_embedding(s) or made.has_loss(s)
            for s in stages
        ):
            continue
        key = "layout" if layout is not None else "empty_layers"
        if counts != (None, None):
            key = f"num_layers_in_{'last' if counts[0] is None else 'first'}_pipeline_stage"
        raise LayoutError(
            key,
            f"leaves rank {rank} with nothing to compute: {made.num_layers} layers lie on other "
            "ranks; give it layers, or lower num_ranks",
        )


def _refuse_remainder(
    num_layers: int, account: tuple[bool, bool], num_empty: int, num_ranks: int, num_chunks: int
) -> None:
    num_stages = num_ranks * num_chunks
    total = num_layers + sum(account) + num_empty
    if total % num_stages == 0:
        return
    terms = [f"{num_layers} layers"]
    terms += ["the embedding"] * account[0] + ["the loss"] * account[1]
    terms += [f"{num_empty} empty"] if num_empty else []
    addition = f"{' + '.join(terms)} = {total}" if len(terms) > 1 else terms[0]
    below = total // num_stages
    missing = -total % num_stages
    raise LayoutError(
        "empty_layers" if num_empty else "num_layers",
        f"{addition}, but {num_ranks} ranks x {num_chunks} = {num_stages} stages hold "
        f"{below * num_stages} or {(below + 1) * num_stages}; set empty_layers to "
        + (f"{num_empty + missing} places or " if num_empty else "")
        + f"auto ({num_empty + missing} empty), or use layout, or "
        "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage",
    )


def _layers_of_ranks(
    num_layers: int, num_ranks: int, num_chunks: int, first: int | None, last: int | None
) -> list[int]:
    """Layers of each rank when those of the first or the last are given."""
    key = f"num_layers_in_{'last' if first is None else 'first'}_pipeline_stage"
    if num_ranks == 1:
        raise LayoutError(key, "one rank has all layers; remove it")
    given = [count for count in (first, last) if count is not None]
    middle = num_ranks - len(given)
    left = num_layers - sum(given)
    if left < 0 or (left and not middle) or (middle and left % middle):
        total = " + ".join(map(str, given)) + (f" = {sum(given)}" if len(given) > 1 else "")
        rest = f"leave {left} of {num_layers} for the other {middle}, which does not divide"
        if left < 0:
            rest = f"are more than the {num_layers} that there are"
        elif not middle:
            rest = f"leave {left} of {num_layers} for no rank"
        raise LayoutError(key, f"{total} layers on the given ranks {rest}; change one of them")
    each = left // middle if middle else 0
    per_rank = [each] * num_ranks
    if first is not None:
        per_rank[0] = first
    if last is not None:
        per_rank[-1] = last
    for rank, count in enumerate(per_rank):
        if count % num_chunks:
            raise LayoutError(
                key,
                f"rank {rank} has {count} layers, which must divide over its {num_chunks} stages; "
                "change the counts, or use layout",
            )
    return per_rank


def _sizes_from_string(
    layout: str, num_layers: int, mtp_num_layers: int, num_ranks: int, num_chunks: int
) -> tuple[list[int], list[int]]:
    """Layers and multi-token prediction layers of each stage of a layout string."""
    row = _unrolled(layout)
    stages = row.split("|")
    if len(stages) != num_ranks * num_chunks:
        raise LayoutError(
            "layout",
            f"has {len(stages)} stages, but {num_ranks} ranks x {num_chunks} = "
            f"{num_ranks * num_chunks}; change the string or the number of ranks or chunks",
        )
    slots = row.replace("|", "")
    if slots.count("E") != 1 or slots[0] != "E" or slots.count("L") != 1 or slots[-1] != "L":
        raise LayoutError("layout", f"{row} must begin with its only E and end with its only L")
    for letter, expected, name in (
        ("t", num_layers, "num_layers"),
        ("m", mtp_num_layers, "mtp_num_layers"),
    ):
        if slots.count(letter) != expected:
            raise LayoutError(
                "layout",
                f"has {slots.count(letter)} times {letter}, but {name} is {expected}; change one",
            )
    if "m" in slots and slots.rindex("t") > slots.index("m"):
        raise LayoutError("layout", f"{row} has a t after an m; move m behind all t")
    mtp = [stage.count("m") for stage in stages]
    if sum(map(bool, mtp)) > 1:
        raise LayoutError("layout", f"{row} has m on several stages; put all of them on one")
    return [stage.count("t") for stage in stages], mtp


def _unrolled(layout: str) -> str:
    """The string without repetitions, brackets and commas."""
    if not layout.strip():
        raise LayoutError("layout", "is empty; leave it out for even stages, or write Et*4|t*4L")
    tokens = re.findall(r"\*\d+|.", re.sub(r"[,\s]", "", layout))
    groups: list[list[str]] = [[]]  # a list for each open bracket, of letters and closed groups
    for token in tokens:
        pieces = groups[-1]
        if token == "(":
            groups.append([])
        elif token == ")" and len(groups) > 1:
            groups.pop()
            groups[-1].append("".join(pieces))
        elif token[0] == "*" and len(token) > 1 and pieces:
            if len(pieces[-1]) * int(token[1:]) > _MOST_LETTERS:
                raise LayoutError(
                    "layout", f"{layout!r} is longer than {_MOST_LETTERS:,} letters; repeat less"
                )
            pieces[-1] *= int(token[1:])
        elif token in "EtmL|":
            pieces.append(token)
        else:
            raise LayoutError(
                "layout",
                f"{token!r} in {layout!r} is not expected; stages are made of E, t, m and L, "
                "separated by |, repeated as in t*3 or (tt|)*29",
            )
    if len(groups) > 1:
        raise LayoutError("layout", f"{layout!r} does not close a bracket")
    return "".join(groups[0])


def _number(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Sizes 2, 0, 3 as numbers (0, 1), (), (2, 3, 4)."""
    ends = list(accumulate(sizes))
    return tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))
