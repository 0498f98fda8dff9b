"""Our training state out of a Megatron checkpoint, block by block."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from mxjax.ckpt.mapping.layouts import fit_rows
from mxjax.ckpt.mapping.matching import Blocks, blocks_of, match
from mxjax.ckpt.mapping.megatron import expert_bias_sections, megatron_table
from mxjax.ckpt.mapping.rules import Theirs
from mxjax.ckpt.megatron.opened import MegatronModel
from mxjax.ckpt.megatron.saved_adam import MOMENTS, OptimizerStateError
from mxjax.ckpt.new_run import state_of, zeros
from mxjax.ckpt.streaming import Index, StreamedArray
from mxjax.config import Config

_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
"""Megatron's names of Adam's moments by optax's."""

_MOMENT_LEAF = re.compile(r"opt_state\..*\.(mu|nu)\.(.+)")

Reader = Callable[[Index], np.ndarray]
Source = Callable[[str, Theirs], np.ndarray]
"""Gives Megatron's tensor of this name."""


class Conversion:
    """Arrays of the training state, made of Megatron's tensors when they are read.

    Attributes:
      num_tensors: how many of Megatron's are used, counting layers and experts.
      has_moments: Adam's moments come from the checkpoint; else they are zero.

    Args:
      optimizer: read its state, if there is one; else only the weights in their own precision.

    Raises:
      CheckpointFormatError: tensors are missing, unknown, or of another shape.
      OptimizerStateError: there is optimizer state, and it cannot be read.
    """

    def __init__(
        self,
        megatron: MegatronModel,
        config: Config,
        zero_centred_gamma: bool,
        optimizer: bool = True,
    ) -> None:
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
        self._blocks = blocks_of(sections)
        # Moments of norms are as they are, whatever the norm is stored as.
        self._moment_blocks = blocks_of(megatron_table(model, moe))
        self._adam = megatron.optimizer_state(sections) if optimizer else None
        self.num_tensors = len(self._names)
        self.has_moments = self._adam is not None and config.optimizer.name == "adamw"
        if self.has_moments:
            self._require_moments()

    def arrays(self, step: int) -> dict[str, StreamedArray]:
        """The whole training state by name."""
        return {
            name: self._array(name, tuple(leaf.shape), np.dtype(leaf.dtype), step)
            for name, leaf in state_of(self._config).items()
        }

    def _array(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, step: int
    ) -> StreamedArray:
        """The array of this name; what a checkpoint of Megatron does not have is zero."""
        moment = _MOMENT_LEAF.fullmatch(name) if self.has_moments else None
        if name in self._blocks:
            of_parameter = name.startswith("params.")
            lead, read = self._reader(
                self._blocks[name], self._weight if of_parameter else self._buffer
            )
        elif moment is not None:
            kind = _MOMENTS[moment[1]]
            blocks = self._moment_blocks[f"params.{moment[2]}"]
            lead, read = self._reader(
                blocks, lambda name, theirs: self._adam.moment(name, theirs, kind).numpy()
            )
        elif name == "step" or (self.has_moments and name.endswith(".count")):
            value = step if name == "step" else self._adam.count
            lead, read = 0, lambda _: np.asarray(value)
        else:
            return zeros(shape, dtype)
        return StreamedArray(shape, dtype, lead, read)

    def _reader(self, blocks: Blocks, source: Source) -> tuple[int, Reader]:
        """How many dims are walked through, and what gives a block."""

        def read(index: Index) -> np.ndarray:
            place, which = blocks[index]
            arrays = []
            for theirs in place.rule.theirs:
                array = source(self._names[place.names(theirs)[0]], theirs).astype(np.float32)
                arrays.append(fit_rows(array, theirs.shape[0]) if theirs.vocabulary else array)
            return place.rule.to_ours(*arrays)[which]

        return len(next(iter(blocks))), read

    def _buffer(self, name: str, theirs: Theirs) -> np.ndarray:
        return self._megatron.tensor(name, theirs).numpy()

    def _weight(self, name: str, theirs: Theirs) -> np.ndarray:
        weight = self._megatron.tensor(name, theirs)
        return self._adam.master_weight(name, theirs, weight) if self._adam else weight.numpy()

    def _require_moments(self) -> None:
        """Opens all moments: what is missing is said before anything is written."""
        for blocks in self._moment_blocks.values():
            for place, _ in blocks.values():
                for theirs in place.rule.theirs:
                    name = self._names[place.names(theirs)[0]]
                    shape = self._megatron.tensor(name, theirs).shape
                    for kind in MOMENTS:
                        moment = self._adam.moment(name, theirs, kind)
                        if moment.shape != shape:
                            raise OptimizerStateError(
                                f"{kind} of {name} has shape {moment.shape}, the weight {shape}."
                            )
