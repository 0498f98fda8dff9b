"""Which layer keeps, computes again or offloads what: `remat` of a configuration, layer by layer.

No JAX: the configuration's rules read it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from mxjax.pipeline.configure import stage_layout
from mxjax.remat.names import MODULES, TIERS, Group, groups_of, names_of

if TYPE_CHECKING:  # the configuration's rules import this module
    from mxjax.config.schema import Config, RematConfig, RematRule


@dataclass(frozen=True)
class LayerPolicy:
    """What one layer leaves for its backward pass.

    Attributes:
      kind: `all`: whatever autodiff wants; `dots`: results of matrix products and attention;
        `names`: the tensors of `save` and `offload`, and the layer's input.
      offload: those that wait in the host's memory.
    """

    kind: Literal["all", "dots", "names"] = "all"
    save: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()

    @property
    def on_device(self) -> LayerPolicy:
        """The same with nothing on the host."""
        return replace(self, save=self.save | self.offload, offload=frozenset())


KEEP_ALL = LayerPolicy()


class RangeError(ValueError):
    """A text that names no numbers."""


def numbers(text: str) -> list[range]:
    """ "0,2-3" -> 0 to 0 and 2 to 3.

    Raises:
      RangeError: the text is not of this form.
    """
    found = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() for end in ends) or int(ends[0]) > int(ends[1]):
            raise RangeError(f"{part.strip()!r} is neither a number nor a range such as 4-7")
        found.append(range(int(ends[0]), int(ends[1]) + 1))
    return found


def _has(text: str, number: int) -> bool:
    return any(number in some for some in numbers(text))


def expanded(entries: Sequence[str]) -> tuple[str, ...]:
    """Names of tensors, with modules replaced by theirs."""
    return tuple(name for entry in entries for name in MODULES.get(entry, (entry,)))


def policy_of(choice: RematConfig | RematRule, config: Config, group: Group) -> LayerPolicy:
    """What `choice` says of a layer of this group. Names that the group does not have say nothing:
    a list may be for several groups."""
    if choice.policy == "dots":
        return LayerPolicy("dots")
    names = names_of(config, group)
    tier = choice.tier if "expert_rows" in names else None
    if choice.policy == "none" and tier is None and not (choice.recompute or choice.offload):
        return KEEP_ALL
    if choice.policy in ("full", "full_layer"):
        kept: set[str] = set()
    else:
        kept = set(names) - set(MODULES.get(choice.policy, ()))
    if tier is not None:
        kept -= set(TIERS[tier])
    kept |= set(expanded(choice.save))
    kept -= set(expanded(choice.recompute))
    offload = set(expanded(choice.offload))
    # The input of a layer is there in any case; a name for it would keep a copy.
    kept -= offload | {"layer_input"}
    return LayerPolicy("names", frozenset(kept & set(names)), frozenset(offload & set(names)))


@dataclass(frozen=True)
class Place:
    """Where a layer is.

    Attributes:
      layer: its number in the model; modules of multi-token prediction follow the last layer.
      stage: pipeline stage, along the model.
    """

    layer: int
    group: Group
    stage: int


def places_of(config: Config) -> list[Place]:
    """All layers, modules of multi-token prediction included.

    Raises:
      LayoutError: the layers do not fit the stages.
    """
    model = config.model
    stages = [0] * model.num_layers
    if config.parallel.pp > 1:
        layout = stage_layout(config)
        stages = [stage for stage, layers in enumerate(layout.layers) for _ in layers]
        last = layout.num_stages - 1
    else:
        last = 0
    num_dense = model.num_layers
    if "moe_layers" in groups_of(config):
        num_dense = config.moe.first_k_dense
    places = [
        Place(layer, "dense_layers" if layer < num_dense else "moe_layers", stage)
        for layer, stage in enumerate(stages)
    ]
    ahead = range(model.num_layers, model.num_layers + model.mtp_num_layers)
    return places + [Place(layer, "mtp_layers", last) for layer in ahead]


def matches(rule: RematRule, place: Place) -> bool:
    """Whether a rule is for the layer at this place.

    Raises:
      RangeError: see `numbers`.
    """
    return (
        (rule.stages is None or _has(rule.stages, place.stage))
        and (rule.layers is None or _has(rule.layers, place.layer))
        and (rule.group is None or place.group == rule.group)
    )


def choice_of(config: Config, place: Place) -> RematConfig | RematRule:
    """The rule that decides for the layer at this place, or the section itself."""
    found = [rule for rule in config.remat.rules if matches(rule, place)]
    return found[-1] if found else section_at(config, place.stage)


def section_at(config: Config, stage: int) -> RematConfig:
    """The section as layers of a stage take it. In a pipeline those of the second half of the
    stages keep on the device what others offload: they hold few microbatches, and not for long."""
    remat = config.remat
    if config.parallel.pp == 1 or not remat.offload:
        return remat
    if stage < (stage_layout(config).num_stages + 1) // 2:
        return remat
    return replace(remat, offload=(), save=(*remat.save, *remat.offload))


def layer_policies(config: Config) -> list[LayerPolicy]:
    """The policy of each layer, modules of multi-token prediction last."""
    return [policy_of(choice_of(config, place), config, place.group) for place in places_of(config)]


def offloads_activations(config: Config) -> bool:
    """Whether some layer leaves tensors in the host's memory."""
    return any(policy.offload for policy in layer_policies(config))


def runs(policies: Sequence[LayerPolicy]) -> list[range]:
    """Layers that follow each other and have equal policies."""
    n = len(policies)
    changes = [i for i in range(1, n) if policies[i] != policies[i - 1]]
    edges = [0, *changes, n] if n else [0]
    return [range(a, b) for a, b in pairwise(edges)]
