"""Adam's state as a Megatron checkpoint has it, by the names of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.mapping.rules import Theirs
from mxjax.ckpt.torch_format.values import TensorLike

MOMENTS = ("exp_avg", "exp_avg_sq")

_MASTER_WEIGHTS = ("param", "fp32_param")
"""fp32 weights within the optimizer state: of the distributed one, of the plain one under bf16."""

WITHOUT = "To take the weights alone: --no-optimizer (init_from.training_state: false)."


class OptimizerStateError(CheckpointFormatError):
    """Adam's state is there and cannot be told apart by parameters."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} {WITHOUT}")


@dataclass(frozen=True)
class SavedAdam:
    """Moments and fp32 weights, opened without being read.

    Attributes:
      count: updates that Adam has made.
      names: of the parameters that have each kind of tensor, such as ``exp_avg``.
      open_tensor: (name, what the table says of it, kind) -> the whole tensor.
    """

    count: int
    names: Mapping[str, Set[str]]
    open_tensor: Callable[[str, Theirs, str], TensorLike] = field(repr=False)

    def moment(self, name: str, theirs: Theirs, kind: str) -> TensorLike:
        """One of `MOMENTS` of a parameter.

        Raises:
          OptimizerStateError: it is not there.
        """
        if name not in self.names[kind]:
            raise OptimizerStateError(f"The optimizer state has no {kind} of {name}.")
        return self._opened(name, theirs, kind)

    def master_weight(self, name: str, theirs: Theirs, weight: TensorLike) -> np.ndarray:
        """The fp32 weight that Adam updates; `weight` itself if no other was kept.

        Raises:
          OptimizerStateError: it does not round to `weight`: the two are of different parameters.
        """
        kind = next((kind for kind in _MASTER_WEIGHTS if name in self.names.get(kind, ())), None)
        if kind is None:
            return weight.numpy()
        master = self._opened(name, theirs, kind).numpy()
        if not rounds_to(master, weight.numpy()):
            raise OptimizerStateError(
                f"The fp32 weights of {name} in the optimizer state are not those of the model:"
                " the parts of the checkpoint do not belong together, or the state is laid out in"
                " a way that is not known."
            )
        return master

    def _opened(self, name: str, theirs: Theirs, kind: str) -> TensorLike:
        try:
            return self.open_tensor(name, theirs, kind)
        except CheckpointFormatError as error:
            raise OptimizerStateError(f"Of the optimizer state: {error}") from error


def rounds_to(master: np.ndarray, weight: np.ndarray) -> bool:
    """Whether `weight` is `master` in its own precision, bit for bit."""
    bits = np.dtype(f"u{weight.dtype.itemsize}")
    rounded = np.ascontiguousarray(master.astype(weight.dtype))
    return np.array_equal(rounded.view(bits), np.ascontiguousarray(weight).view(bits))


def adam_count(optimizer: Any) -> int:
    """Updates that Adam has made, somewhere within Megatron's optimizer state.

    Raises:
      OptimizerStateError: it is not recorded, or parameters differ in it.
    """
    counts = set(_counts_within(optimizer))
    if len(counts) != 1:
        what = f"parameters after {sorted(counts)} updates" if counts else "no count of updates"
        raise OptimizerStateError(f"The optimizer state has {what}; one is kept here for all.")
    return counts.pop()


def _counts_within(value: Any) -> set[int]:
    if isinstance(value, dict):
        found = set()
        for key, child in value.items():
            if key in ("step", "common_step"):
                number = child.numpy() if isinstance(child, TensorLike) else child
                found |= set() if number is None else {int(number)}
            else:
                found |= _counts_within(child)
        return found
    if isinstance(value, list | tuple):
        return {count for child in value for count in _counts_within(child)}
    return set()
