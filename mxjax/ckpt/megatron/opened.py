"""A Megatron checkpoint of either format, as tensors of single layers and experts with names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.locate import Kind, locate
from mxjax.ckpt.mapping.rules import Section, Theirs
from mxjax.ckpt.megatron.dist import DistributedModel
from mxjax.ckpt.megatron.legacy import LegacyModel
from mxjax.ckpt.megatron.saved_adam import SavedAdam
from mxjax.ckpt.torch_format.values import TensorLike


class MegatronModel(Protocol):
    """What both formats offer.

    Attributes:
      common: iteration, scheduler and other plain values.
      args: Megatron's arguments.
      names: of all tensors of the model, as `mapping/megatron.py` spells them.
    """

    common: dict[str, Any]
    args: dict[str, Any]
    names: set[str]

    def tensor(self, name: str, theirs: Theirs) -> TensorLike:
        """The whole tensor, read when asked.

        Args:
          theirs: what the table says of it.

        Raises:
          CheckpointFormatError: a rank's part of it is missing.
        """

    def optimizer_state(self, sections: Sequence[Section]) -> SavedAdam | None:
        """Adam's state; None: there is none.

        Args:
          sections: the table of the model.

        Raises:
          OptimizerStateError: there is one, and it cannot be read.
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
