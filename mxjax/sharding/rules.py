"""From logical axis names on Flax parameters to mesh axes: one table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mxjax.config.schema import ModelConfig, ParallelConfig
from mxjax.sharding.mesh import DATA_AXES, EXPERT_DATA_AXES

MeshAxes = tuple[str, ...]


@dataclass(frozen=True)
class ParamInfo:
    """Shape, precision and logical dims of one parameter.

    `keep_precision`: computed with in its stored precision (router weights), never cast down.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]
    keep_precision: bool = False


@dataclass(frozen=True)
class ShardingRules:
    """Mesh axes of each logical dim of a parameter. A dim named `None` is never split.

    Every non-expert matrix has exactly one `hidden` or `latent` dim and every expert matrix one
    `expert_hidden` dim: ZeRO splits these, so that it composes with any tensor split.
    """

    layers: MeshAxes = ()
    modules: MeshAxes = ()
    """Modules of multi-token prediction, which all lie on the last pipeline stage."""
    vocab: MeshAxes = ("tp",)
    position: MeshAxes = ()
    hidden: MeshAxes = ()
    latent: MeshAxes = ()
    """The narrow vector of multi-head latent attention, where it is a matrix's input."""
    latent_out: MeshAxes = ()
    """The same where it is made of the hidden state."""
    joined: MeshAxes = ()
    """Embedding and hidden state end to end (multi-token prediction)."""
    heads: MeshAxes = ("tp",)
    kv_heads: MeshAxes = ("tp",)
    head_dim: MeshAxes = ()
    branch: MeshAxes = ()
    """Matrices of one kind side by side: key and value, gate and up."""
    ffn: MeshAxes = ("tp",)
    expert: MeshAxes = ("ep",)
    expert_hidden: MeshAxes = ()
    expert_ffn: MeshAxes = ("tp",)

    def spec(self, logical: tuple[str | None, ...]) -> PartitionSpec:
        """Placement of a parameter with these logical dims; errors as `mesh_axes`."""
        return PartitionSpec(*(axes or None for axes in self.mesh_axes(logical)))

    def mesh_axes(self, logical: tuple[str | None, ...]) -> tuple[MeshAxes, ...]:
        """Mesh axes of each dim of a parameter with these logical dims.

        Raises:
          ValueError: a mesh axis would split two dims of one parameter, or a name is unknown.
        """
        known = dataclasses.asdict(self)
        used: dict[str, str] = {}
        dims: list[MeshAxes] = []
        for name in logical:
            if name is not None and name not in known:
                raise ValueError(f"unknown logical axis {name!r}; known: {', '.join(known)}")
            axes = () if name is None else known[name]
            for axis in axes:
                if axis in used:
                    raise ValueError(
                        f"mesh axis {axis!r} splits both {used[axis]!r} and {name!r} of a "
                        f"parameter with dims {logical}"
                    )
                used[axis] = name
            dims.append(axes)
        return tuple(dims)


def compute_rules(parallel: ParallelConfig, model: ModelConfig) -> ShardingRules:
    """Placement of the weights that a layer computes with."""
    folded = not parallel.expert_tensor_parallel
    return ShardingRules(
        layers=("pp",) if parallel.pp > 1 else (),
        # With fewer groups than ranks every rank holds all groups and takes the one it needs.
        kv_heads=("tp",) if model.attention_groups >= parallel.tp else (),
        expert=("ep", "tp") if folded else ("ep",),
        expert_ffn=() if folded else ("tp",),
    )


def stored_rules(
    parallel: ParallelConfig, model: ModelConfig, *, of_layers: bool = True
) -> ShardingRules:
    """Placement of master weights, gradients and optimizer state between steps.

    `of_layers`: else of what is outside of them (embedding, head, multi-token prediction): every
    pipeline rank computes with room for it, so that ZeRO shards it over `pp` too.
    """
    rules = compute_rules(parallel, model)
    if parallel.zero_stage == 0:
        return rules
    more = ("pp",) if parallel.pp > 1 and not of_layers else ()
    data, expert_data = more + DATA_AXES, more + EXPERT_DATA_AXES
    return dataclasses.replace(rules, hidden=data, latent=data, expert_hidden=expert_data)
