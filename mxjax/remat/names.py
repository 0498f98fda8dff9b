"""The names of what a layer computes: the one list that policies, the plan and docs/memory.md read.

Each tensor that is worth keeping for the backward pass goes through `named` under its name. What
has no name is cheap to make again of what has: elementwise work, dropout masks, reshapes, and the
gathers of tensor parallelism, which Megatron repeats too. No JAX before a layer is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mxjax.scoped import scoped

if TYPE_CHECKING:  # the configuration's rules import this module
    from mxjax.config.schema import Config

Group = str
"""`dense_layers`, `moe_layers` or `mtp_layers`, as in the parameter tree."""


@dataclass(frozen=True)
class TensorName:
    """One name.

    Attributes:
      what: what it stands for.
      where: which layers have it, in words.
      exists: the same as a function of configuration and group.
    """

    what: str
    where: str
    exists: Callable[[Config, Group], bool]


def _every(c: Config, group: Group) -> bool:
    return True


def _grouped_query(c: Config, group: Group) -> bool:
    return c.model.mla is None


def _head_norms(c: Config, group: Group) -> bool:
    return c.model.mla is None and c.model.qk_layernorm


def _latent(c: Config, group: Group) -> bool:
    return c.model.mla is not None


def _query_latent(c: Config, group: Group) -> bool:
    return c.model.mla is not None and c.model.mla.q_lora_rank is not None


def _has_experts(c: Config, group: Group) -> bool:
    num_dense = c.model.num_layers if c.moe.num_experts == 0 else c.moe.first_k_dense
    # Modules of multi-token prediction have a layer like the model's last.
    return group == "moe_layers" or (group == "mtp_layers" and num_dense < c.model.num_layers)


def _dense(c: Config, group: Group) -> bool:
    return not _has_experts(c, group)


def _shared_expert(c: Config, group: Group) -> bool:
    return _has_experts(c, group) and c.moe.shared_expert_intermediate_size > 0


def _mtp(c: Config, group: Group) -> bool:
    return group == "mtp_layers"


NAMES: dict[str, TensorName] = {
    name: TensorName(what, where, exists)
    for name, what, where, exists in (
        ("layer_input", "residual stream, input of the layer", "every layer", _every),
        ("attention_norm", "output of the norm before attention", "every layer", _every),
        ("query_projection", "queries before their norm", "`qk_layernorm`", _head_norms),
        ("key_projection", "keys before their norm", "`qk_layernorm`", _head_norms),
        ("query", "queries as attention takes them", "without `mla`", _grouped_query),
        ("key", "keys as attention takes them", "without `mla`", _grouped_query),
        ("value", "values as attention takes them", "without `mla`", _grouped_query),
        ("query_latent", "latent of the queries", "`mla.q_lora_rank`", _query_latent),
        ("query_latent_norm", "the same after its norm", "`mla.q_lora_rank`", _query_latent),
        ("kv_latent", "latent of keys and values, and the shared rotary key", "`mla`", _latent),
        ("kv_latent_norm", "the same after the norm of the latent", "`mla`", _latent),
        ("mla_query", "queries of all heads, made of their latent", "`mla`", _latent),
        ("mla_key", "keys of all heads, made of the latent", "`mla`", _latent),
        ("mla_value", "values of all heads, made of the latent", "`mla`", _latent),
        (
            "attention_out",
            "result of attention before the output matrix, and what its backward pass needs of"
            " the softmax",
            "every layer",
            _every,
        ),
        ("attention_residual", "residual stream after attention", "every layer", _every),
        ("mlp_norm", "output of the norm before the MLP or the experts", "every layer", _every),
        ("mlp_up", "gate and up, before the activation", "dense layers", _dense),
        ("mlp_act", "output of the activation", "dense layers", _dense),
        ("router_logits", "affinity of tokens to experts, fp32", "MoE layers", _has_experts),
        ("router_experts", "chosen experts of each token", "MoE layers", _has_experts),
        ("permute_plan", "places of tokens in buffers, int32", "MoE layers", _has_experts),
        ("dispatched_rows", "rows that came to this rank's experts", "MoE layers", _has_experts),
        ("expert_rows", "the same in the order of the experts", "MoE layers", _has_experts),
        ("expert_up", "gate and up of the experts", "MoE layers", _has_experts),
        (
            "expert_act",
            "output of the experts' activation, times the weight of the row",
            "MoE layers",
            _has_experts,
        ),
        ("shared_expert_up", "gate and up of the shared expert", "shared expert", _shared_expert),
        (
            "shared_expert_act",
            "output of the shared expert's activation",
            "shared expert",
            _shared_expert,
        ),
        ("mtp_joined", "normed inputs of a module, side by side", "`mtp_layers`", _mtp),
        ("mtp_residual", "residual stream after a module's layer", "`mtp_layers`", _mtp),
    )
}

MODULES: dict[str, tuple[str, ...]] = {
    "norm": (
        "attention_norm",
        "query_latent_norm",
        "kv_latent_norm",
        "mlp_norm",
        "mtp_joined",
    ),
    "activation": ("mlp_act", "expert_act", "shared_expert_act"),
    "attention": ("attention_out",),
    "mla_up_proj": ("mla_query", "mla_key", "mla_value"),
}
"""Granular policies: what each computes again. They stand for their names in lists too."""

_LIGHT = ("router_logits", "expert_rows", "expert_act", "shared_expert_act")
_MEDIUM = (*_LIGHT, "expert_up", "shared_expert_up")

TIERS: dict[str, tuple[str, ...]] = {
    "light": _LIGHT,
    "medium": _MEDIUM,
    "full": (*_MEDIUM, "dispatched_rows", "permute_plan"),
}
"""What the tiers of MoE layers compute again. None makes the choice of experts anew: rounded
otherwise, it could be another one than the forward pass made."""


def named(tree: Any, name: str) -> Any:
    """Every array of `tree` under this name, unchanged.

    Raises:
      KeyError: it is not one of `NAMES`.
    """
    from jax.ad_checkpoint import checkpoint_name

    NAMES[name]
    return checkpoint_name(tree, name)


_kept: ContextVar[Set[str] | None] = ContextVar("kept", default=None)


def keeping(names: Set[str]) -> AbstractContextManager[None]:
    """What is traced inside has these names in its backward pass, and makes others again."""
    return scoped(_kept, names)


def is_kept(name: str) -> bool:
    """Whether a tensor of the layer that is traced is there in the backward pass."""
    names = _kept.get()
    return names is None or name in names


def groups_of(config: Config) -> tuple[Group, ...]:
    """The groups of layers that the model has, in the order in which they run."""
    num_dense = config.model.num_layers
    if config.moe.num_experts:
        num_dense = min(config.moe.first_k_dense, config.model.num_layers)
    sizes = {
        "dense_layers": num_dense,
        "moe_layers": config.model.num_layers - num_dense,
        "mtp_layers": config.model.mtp_num_layers,
    }
    return tuple(group for group, size in sizes.items() if size)


def names_of(config: Config, group: Group) -> tuple[str, ...]:
    """Names of the tensors of one layer of a group, in the order in which they are made."""
    return tuple(name for name, entry in NAMES.items() if entry.exists(config, group))
