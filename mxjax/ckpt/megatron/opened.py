"""A Megatron checkpoint of either format, as tensors of single layers and experts with names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.locate import Kind, locate
from mxjax.ckpt.mapping.rules import Theirs
from mxjax.ckpt.megatron.dist import DistributedModel
from mxjax.ckpt.megatron.legacy import LegacyModel
from mxjax.ckpt.torch_format.values import TensorLike


class MegatronModel(Protocol):
    """What both formats offer.

    Attributes:
      common: iteration, scheduler and other plain values.
      args: Megatron's arguments.
      names: of all tensors of the model, as `mapping/megatron.py` spells them.
      moments: kinds of optimizer state that can be read, such as ``exp_avg``.
    """

    common: dict[str, Any]
    args: dict[str, Any]
    names: set[str]
    moments: tuple[str, ...]

    def tensor(self, name: str, theirs: Theirs, moment: str | None = None) -> TensorLike:
        """The whole tensor, read when asked.

        Args:
          theirs: what the table says of it.
          moment: a kind of `moments`, in place of the weight.

        Raises:
          CheckpointFormatError: a rank's part of it is missing.
        """


def open_megatron(path: str | Path) -> MegatronModel:
    """The Megatron checkpoint at `path`; of several the newest.

    Raises:
      CheckpointFormatError: there is none, it is of another format, or files are missing.
    """
    location = locate(path)
    match location.kind:
        case Kind.MEGATRON_TORCH:
            return LegacyModel(location.folder)
        case Kind.MEGATRON_DIST:
            return DistributedModel(location.folder)
    raise CheckpointFormatError(
        f"{location.folder} is of kind {location.kind!s}; imported are Megatron's formats torch and"
        " torch_dist. Save it in one of them (--ckpt-format torch_dist), or convert it with"
        " Megatron (--ckpt-convert-format)."
    )
