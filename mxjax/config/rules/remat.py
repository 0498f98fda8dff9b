"""Rules for the section `remat`; see `registry.py`."""

from __future__ import annotations

from collections.abc import Iterator

from mxjax.config.rules.registry import Findings, rule
from mxjax.config.schema import Config, RematConfig, RematRule
from mxjax.pipeline.layout import LayoutError
from mxjax.remat.layers import RangeError, expanded, matches, numbers, places_of
from mxjax.remat.names import MODULES, groups_of, names_of
from mxjax.remat.sizes import SizeError, parse_size

_LISTS = ("save", "recompute", "offload")


def _choices(c: Config) -> Iterator[tuple[str, RematConfig | RematRule, tuple[str, ...]]]:
    """Where it stands, a choice, and the groups of layers that it is for."""
    groups = groups_of(c)
    yield "remat", c.remat, groups
    for choice in c.remat.rules:
        yield "remat.rules", choice, _groups_of_its_layers(c, choice)


def _groups_of_its_layers(c: Config, choice: RematRule) -> tuple[str, ...]:
    named = groups_of(c) if choice.group is None else (choice.group,)
    try:
        found = {place.group for place in places_of(c) if matches(choice, place)}
    except (LayoutError, RangeError):
        return named  # other rules report these, and that it is for no layer
    return tuple(group for group in named if group in found) or named


def _key(path: str, key: str) -> tuple[str, str]:
    """The path that a finding is of, and how its message starts: rules are one field."""
    return (f"{path}.{key}", "") if path == "remat" else (path, f"{key}: ")


@rule
def names_are_those_of_the_model(c: Config) -> Findings:
    for where, choice, groups in _choices(c):
        known = sorted({name for group in groups for name in names_of(c, group)})
        for key in _LISTS:
            path, start = _key(where, key)
            for entry in getattr(choice, key):
                if set(expanded([entry])).isdisjoint(known):
                    modules = [name for name, of in MODULES.items() if set(of) & set(known)]
                    yield (
                        path,
                        f"{start}{entry} is no tensor of {' or '.join(groups)} of this model, nor "
                        f"a module that has one; tensors: {', '.join(known)}; modules: "
                        f"{', '.join(modules)}",
                    )


@rule
def policies_have_something_to_do(c: Config) -> Findings:
    for where, choice, groups in _choices(c):
        known = {name for group in groups for name in names_of(c, group)}
        path, start = _key(where, "policy")
        module = MODULES.get(choice.policy)
        if module is not None and known.isdisjoint(module):
            yield (
                path,
                f"{start}{choice.policy} computes {', '.join(module)} again, which "
                f"{' or '.join(groups)} of this model do not have; use another policy",
            )
        path, start = _key(where, "tier")
        if choice.tier is not None and "expert_rows" not in known:
            yield (
                path,
                f"{start}{choice.tier} is for MoE layers, which {' or '.join(groups)} are not; "
                "set it to null",
            )


@rule
def dots_stand_alone(c: Config) -> Findings:
    for where, choice, _ in _choices(c):
        set_too = [key for key in ("tier", *_LISTS) if getattr(choice, key)]
        if choice.policy == "dots" and set_too:
            path, start = _key(where, "policy")
            yield (
                path,
                f"{start}dots goes by operation, not by name, and cannot be combined with "
                f"{', '.join(set_too)}; use none and name what to compute again",
            )


@rule
def a_name_has_one_fate(c: Config) -> Findings:
    for where, choice, _ in _choices(c):
        fates = [(key, set(expanded(getattr(choice, key)))) for key in _LISTS]
        for i, (key, names) in enumerate(fates):
            for other, others in fates[i + 1 :]:
                if names & others:
                    path, start = _key(where, other)
                    both = ", ".join(sorted(names & others))
                    yield path, f"{start}{both} is in {key} too; remove it from one of them"


@rule
def the_input_of_a_layer_is_kept(c: Config) -> Findings:
    for where, choice, _ in _choices(c):
        if "layer_input" in choice.recompute:
            path, start = _key(where, "recompute")
            yield (
                path,
                f"{start}layer_input is what a layer is computed again from; it can only be saved "
                "(it always is) or offloaded",
            )


@rule
def rules_are_for_layers_of_the_model(c: Config) -> Findings:
    try:
        places = places_of(c)
    except LayoutError:
        return  # which a rule of the pipeline reports
    for number, choice in enumerate(c.remat.rules):
        texts = {key: getattr(choice, key) for key in ("stages", "layers")}
        try:
            for key, text in texts.items():  # noqa: B007 -- named in the message below
                if text is not None:
                    numbers(text)
        except RangeError as error:
            yield "remat.rules", f"rule {number}, {key}: {error}"
            continue
        if not any(matches(choice, place) for place in places):
            stages = 1 + max(place.stage for place in places)
            yield (
                "remat.rules",
                f"rule {number} is for no layer: stages are 0-{stages - 1}, layers "
                f"0-{len(places) - 1} (multi-token prediction last), groups "
                f"{', '.join(groups_of(c))}; change or remove it",
            )


@rule
def rings_of_a_pipeline_are_on_the_device(c: Config) -> Findings:
    for where, choice, _ in _choices(c):
        if choice.offload and c.parallel.pp > 1 and c.pipeline.executor != "stagewise":
            path, start = _key(where, "offload")
            yield (
                path,
                f"{start}pipeline.executor: {c.pipeline.executor} has, or may have, activations in "
                "ring buffers on the device; set pipeline.executor to stagewise, set parallel.pp "
                "to 1, or recompute these",
            )


@rule
def without_a_pipeline_offloading_takes_a_scan(c: Config) -> Findings:
    for where, choice, _ in _choices(c):
        if choice.offload and c.parallel.pp == 1 and not c.training.scan_layers:
            path, start = _key(where, "offload")
            yield (
                path,
                f"{start}of unrolled layers XLA sends tensors so late that nothing is freed; set "
                "training.scan_layers to true, or recompute these",
            )


@rule
def sizes_are_sizes(c: Config) -> Findings:
    for key in ("memory_budget", "host_memory"):
        text = getattr(c.remat, key)
        try:
            if text is not None:
                parse_size(text)
        except SizeError as error:
            yield f"remat.{key}", str(error)


@rule
def a_budget_is_used(c: Config) -> Findings:
    if c.remat.memory_budget is not None and c.remat.mode == "manual":
        yield (
            "remat.memory_budget",
            "does nothing with remat.mode: manual; set that to save_memory or remove this",
        )
