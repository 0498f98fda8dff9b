"""`remat.mode: save_memory`: the cheapest recompute with which a step fits a budget, by the plan.

Tensors are put in one order, the most bytes for the least time first (`MemoryModel.seconds_of`),
and each pipeline rank computes as many of them again as it must: the fewest are found by bisection,
for all ranks at once. Of these each rank gives up again what the last one, which may be large, has
made unnecessary. Executor one_program has the same buffers on all ranks, so there all ranks take
the same. What `remat` sets is a floor: it is never undone, tensors of `save` stay, and layers
with a rule of their own are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mxjax.config import Config, ConfigError, Problem
from mxjax.config.schema import RematConfig, RematRule
from mxjax.pipeline.configure import stage_layout
from mxjax.remat.cost import H200, Ceilings
from mxjax.remat.layers import expanded, places_of, section_at
from mxjax.remat.names import Group, groups_of, names_of
from mxjax.remat.sizes import gib
from mxjax.training.gradients import Objective
from mxjax.training.memory_plan import MemoryModel, StagePlan, keep_names


@dataclass(frozen=True)
class Candidate:
    """A tensor that layers of a group may compute again.

    Attributes:
      bytes, seconds: of one layer and microbatch.
      layers: how many of the group there are.
    """

    group: Group
    name: str
    bytes: int
    seconds: float
    layers: int


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
      config: with `mode: manual` and rules for what was chosen.
      lines: what and why, for people.
    """

    config: Config
    lines: tuple[str, ...]


def save_memory(
    model: MemoryModel,
    budget: int,
    build: Callable[[Config], Objective],
    ceilings: Ceilings = H200,
) -> Choice:
    """Policies with which every rank's `StagePlan.total` is at most `budget` bytes.

    Args:
      model: of the configuration without policies of this mode.
      build: the objective of the same configuration with other rules.

    Raises:
      ConfigError: there are none; it says what is the least, and what would be without the
        settings that stand in the way.
    """
    before = model.stages()
    search = _Search(model, budget, build, _candidates(model, ceilings))
    chosen = search.chosen(len(before))
    after = search.stages(chosen)
    if max(stage.total for stage in after) > budget:
        least = min(before, after, key=lambda stages: max(stage.total for stage in stages))
        raise ConfigError([_impossible(model, budget, build, ceilings, least)])
    return Choice(
        config=_recomputing(model.config, chosen),
        lines=tuple(_lines(budget, chosen, before, after)),
    )


def _candidates(model: MemoryModel, ceilings: Ceilings) -> list[Candidate]:
    """All tensors that may be computed again, in the order in which that pays."""
    config, remat = model.config, model.config.remat
    if remat.policy == "dots":
        return []
    settled = {*expanded(remat.save), *expanded(remat.recompute), *expanded(remat.offload)}
    found = []
    for group in groups_of(config):
        layers = sum(place.group == group for place in places_of(config))
        for name, size in model.bytes_by_name(group).items():
            # The choice of experts must not be made anew, see `names.TIERS`.
            if name in settled or name == "router_experts" or not size:
                continue
            seconds = model.seconds_of(group, keep_names(config, group), name, ceilings)
            found.append(Candidate(group, name, size, seconds, layers))
    return sorted(found, key=lambda c: c.seconds / c.bytes)


Chosen = list[list[Candidate]]
"""What each rank computes again."""


class _Search:
    """Which of the candidates each rank has to compute again."""

    def __init__(
        self,
        model: MemoryModel,
        budget: int,
        build: Callable[[Config], Objective],
        candidates: list[Candidate],
    ):
        self.model, self.budget, self.build = model, budget, build
        self.candidates = candidates

    def stages(self, chosen: Chosen) -> tuple[StagePlan, ...]:
        """Memory of each rank with this choice."""
        config = _recomputing(self.model.config, chosen)
        return self.model.with_objective(self.build(config)).stages()

    def chosen(self, num_ranks: int) -> Chosen:
        """The cheapest that fits; all candidates where nothing does."""
        chosen = [self.candidates[:level] for level in self._levels(num_ranks)]
        if not all(self._fits(chosen)):
            return chosen
        for given_up in sorted(self.candidates, key=lambda c: -c.seconds * c.layers):
            fewer = [[c for c in of_rank if c != given_up] for of_rank in chosen]
            if fewer != chosen:
                fits = self._fits(fewer)
                chosen = [a if fit else b for a, b, fit in zip(fewer, chosen, fits, strict=True)]
        return chosen

    def _fits(self, chosen: Chosen) -> list[bool]:
        """Of each rank; all or none where they have the same buffers."""
        fits = [stage.total <= self.budget for stage in self.stages(chosen)]
        return fits if self.model.stagewise else [all(fits)] * len(fits)

    def _levels(self, num_ranks: int) -> list[int]:
        """How many of the first candidates each rank needs; all of them where that does not do.

        None first: where tensors wait on the host, or until W, computing some of them again can
        take more memory than it gives.
        """
        most = len(self.candidates)
        fits = self._fits([[]] * num_ranks)
        low = [0 if fit else min(1, most) for fit in fits]
        high = [0 if fit else most for fit in fits]
        while any(a < b for a, b in zip(low, high, strict=True)):
            middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
            fits = self._fits([self.candidates[:level] for level in middle])
            for rank, (level, good) in enumerate(zip(middle, fits, strict=True)):
                if low[rank] == high[rank]:
                    continue
                low[rank], high[rank] = (low[rank], level) if good else (level + 1, high[rank])
        return low


def _recomputing(config: Config, chosen: Chosen) -> Config:
    """`config` with a rule for each group of each rank that computes something again; rules that
    were there come after them and win."""
    base, rules = config.remat, []
    # Stages may differ in what they offload.
    sections = {place.stage: section_at(config, place.stage) for place in places_of(config)}
    alike = all(c == chosen[0] for c in chosen) and len(set(sections.values())) == 1
    for rank in range(1 if alike else len(chosen)):
        for group in groups_of(config):
            names = tuple(c.name for c in chosen[rank] if c.group == group)
            of_group = {place.stage for place in places_of(config) if place.group == group}
            here = sorted(stage for stage in of_group if _rank_of(config, stage) == rank)
            parts = [(None, base)] if alike else _alike_stages(here, sections)
            for where, section in parts if names else ():
                rules.append(
                    RematRule(
                        stages=where,
                        group=group,
                        policy=base.policy,
                        tier=base.tier if "expert_rows" in names_of(config, group) else None,
                        save=_of_group(config, group, section.save),
                        recompute=(*_of_group(config, group, base.recompute), *names),
                        offload=_of_group(config, group, section.offload),
                    )
                )
    return replace(config, remat=replace(base, rules=(*rules, *base.rules)))


def _of_group(config: Config, group: Group, entries: Sequence[str]) -> tuple[str, ...]:
    """Those of the names and modules that layers of the group have: rules may name no others."""
    known = names_of(config, group)
    return tuple(entry for entry in entries if not set(expanded([entry])).isdisjoint(known))


def _alike_stages(
    stages: Sequence[int], sections: Mapping[int, RematConfig]
) -> list[tuple[str, RematConfig]]:
    """Stages that take `remat` alike, as a rule names them, and how they take it."""
    found: dict[RematConfig, list[str]] = {}
    for stage in stages:
        found.setdefault(sections[stage], []).append(str(stage))
    return [(",".join(numbers), section) for section, numbers in found.items()]


def _rank_of(config: Config, stage: int) -> int:
    return 0 if config.parallel.pp == 1 else stage_layout(config).rank_of(stage)


def _impossible(
    model: MemoryModel,
    budget: int,
    build: Callable[[Config], Objective],
    ceilings: Ceilings,
    least: Sequence[StagePlan],
) -> Problem:
    needed, config = max(stage.total for stage in least), model.config
    exact = f" ({needed - budget:,} bytes more)" if gib(needed) == gib(budget) else ""
    message = f"no recompute makes a step fit; the least by the plan is {gib(needed)}{exact}"
    bound = [key for key in ("policy", "save", "rules") if _binds(config.remat, key)]
    if bound:
        free = model.with_objective(build(replace(config, remat=RematConfig())))
        search = _Search(free, budget, build, _candidates(free, ceilings))
        everything = [search.candidates] * len(least)
        without = max(stage.total for stage in search.stages(everything))
        message += (
            f" with what {', '.join(f'remat.{key}' for key in bound)} sets, {gib(without)} without"
        )
    allowed = math.ceil(needed / 2**30 * 100) / 100
    message += (
        f"; allow {allowed:.2f}GiB, or use more microbatches, more parallel ranks or a higher "
        "parallel.zero_stage"
    )
    return Problem("remat.memory_budget", gib(budget), message)


def _binds(remat: RematConfig, key: str) -> bool:
    """Whether this key keeps something from being computed again."""
    return remat.policy == "dots" if key == "policy" else bool(getattr(remat, key))


def _lines(
    budget: int,
    chosen: Chosen,
    before: Sequence[StagePlan],
    after: Sequence[StagePlan],
) -> list[str]:
    lines = [f"save_memory: budget {gib(budget)} of each device"]
    if not any(chosen):
        most = max(stage.total for stage in before)
        return [*lines, f"  fits as it is: {gib(most)}"]
    for rank, candidates in enumerate(chosen):
        held = before[rank].total, after[rank].total
        lines.append(f"  rank {rank}: {gib(held[0])} -> {gib(held[1])}, computes again:")
        if not candidates:
            lines[-1] = f"  rank {rank}: {gib(held[1])}, nothing to do"
        for c in candidates:
            lines.append(
                f"    {c.group:<14} {c.name:<20} {gib(c.bytes):>12} and {1e6 * c.seconds:,.0f} us"
                " a layer and microbatch"
            )
    return lines
