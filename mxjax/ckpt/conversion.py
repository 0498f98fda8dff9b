"""Our training state out of a Megatron checkpoint, block by block."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.mapping.layouts import fit_rows
from mxjax.ckpt.mapping.matching import Place, match, places
from mxjax.ckpt.mapping.megatron import expert_bias_sections, megatron_table
from mxjax.ckpt.mapping.rules import Section
from mxjax.ckpt.megatron.opened import MegatronModel
from mxjax.ckpt.streaming import Index, StreamedArray
from mxjax.ckpt.torch_format.values import TensorLike
from mxjax.ckpt.tree import named_leaves
from mxjax.config import Config, ParallelConfig
from mxjax.sharding.mesh import build_mesh
from mxjax.training.programs import Programs

_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
"""Megatron's names of Adam's moments by optax's."""

_MASTER_WEIGHTS = ("param", "fp32_param")
"""fp32 weights within the optimizer state: of the distributed one, of the plain one under bf16."""

_MOMENT_LEAF = re.compile(r"opt_state\..*\.(mu|nu)\.(.+)")

Reader = Callable[[Index], np.ndarray]
Blocks = dict[str, dict[Index, tuple[Place, int]]]


class Conversion:
    """Arrays of the training state, made of Megatron's tensors when they are read.

    Attributes:
      num_tensors: how many of Megatron's are used, counting layers and experts.
      has_moments: Adam's moments come from the checkpoint; else they are zero.

    Raises:
      CheckpointFormatError: tensors are missing, unknown, or of another shape.
    """

    def __init__(self, megatron: MegatronModel, config: Config, zero_centred_gamma: bool) -> None:
        self._megatron = megatron
        self._config = config
        model, moe = config.model, config.moe
        sections = megatron_table(model, moe, zero_centred_gamma)
        has_bias = any(name.endswith("router.expert_bias") for name in megatron.names)
        if moe.num_experts and (has_bias or moe.expert_bias_update_rate):
            sections += expert_bias_sections(model, moe)
        # Tied models have a copy of the embedding in their last pipeline stage.
        copies = {"output_layer.weight"} if model.tie_embeddings else set()
        self._names = match(sections, megatron.names, megatron.tensor, copies)
        self._blocks = _blocks(sections)
        # Moments of norms are as they are, whatever the norm is stored as.
        self._moment_blocks = _blocks(megatron_table(model, moe))
        self._count = _adam_steps(megatron.common.get("optimizer"))
        self._master = next((m for m in _MASTER_WEIGHTS if m in megatron.moments), None)
        self.num_tensors = len(self._names)
        self.has_moments = (
            config.optimizer.name == "adamw"
            and self._count is not None
            and set(_MOMENTS.values()) <= set(megatron.moments)
        )

    def arrays(self, step: int) -> dict[str, StreamedArray]:
        """The whole training state by name."""
        config = replace(self._config, parallel=ParallelConfig(dp=1))
        state = Programs(config, build_mesh(config.parallel, jax.devices()[:1])).abstract_state
        return {
            name: self._array(name, tuple(leaf.shape), np.dtype(leaf.dtype), step)
            for name, leaf in named_leaves(state).items()
        }

    def _array(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, step: int
    ) -> StreamedArray:
        """The array of this name; what a checkpoint of Megatron does not have is zero."""
        moment = _MOMENT_LEAF.fullmatch(name) if self.has_moments else None
        if name in self._blocks:
            master = self._master if name.startswith("params.") else None
            lead, read = self._reader(self._blocks[name], master)
        elif moment is not None:
            blocks = self._moment_blocks[f"params.{moment[2]}"]
            lead, read = self._reader(blocks, _MOMENTS[moment[1]])
        elif name == "step" or (self.has_moments and name.endswith(".count")):
            value = step if name == "step" else self._count
            lead, read = 0, lambda _: np.asarray(value)
        else:
            lead = min(1, len(shape))
            read = lambda _: np.zeros(shape[lead:], dtype)  # noqa: E731
        return StreamedArray(shape, dtype, lead, read)

    def _reader(
        self, blocks: dict[Index, tuple[Place, int]], moment: str | None
    ) -> tuple[int, Reader]:
        """How many dims are walked through, and what gives a block."""

        def read(index: Index) -> np.ndarray:
            place, which = blocks[index]
            arrays = []
            for theirs in place.rule.theirs:
                name = self._names[place.names(theirs)[0]]
                tensor = self._megatron.tensor(name, theirs, moment)
                array = tensor.numpy().astype(np.float32)
                arrays.append(fit_rows(array, theirs.shape[0]) if theirs.vocabulary else array)
            return place.rule.to_ours(*arrays)[which]

        return len(next(iter(blocks))), read


def _blocks(sections: Sequence[Section]) -> Blocks:
    """For each array of ours and each index of its stacked dims: the rule, and which of its
    results."""
    found: Blocks = {}
    for place in places(sections):
        for which, leaf in enumerate(place.leaves()):
            found.setdefault(leaf, {})[place.index] = place, which
    return found


def _adam_steps(optimizer: Any) -> int | None:
    """Updates that Adam has made, somewhere within Megatron's optimizer state; None: not recorded.

    Raises:
      CheckpointFormatError: parameters differ in it.
    """
    steps = set(_steps_within(optimizer))
    if len(steps) > 1:
        raise CheckpointFormatError(
            f"The optimizer state has parameters after {sorted(steps)} updates; one count is kept"
            " here for all."
        )
    return steps.pop() if steps else None


def _steps_within(value: Any) -> set[int]:
    if isinstance(value, dict):
        found = set()
        for key, child in value.items():
            if key in ("step", "common_step"):
                number = child.numpy() if isinstance(child, TensorLike) else child
                found.add(int(number))
            else:
                found |= _steps_within(child)
        return found
    if isinstance(value, list | tuple):
        return {step for child in value for step in _steps_within(child)}
    return set()
