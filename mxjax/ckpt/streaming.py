"""Writing a checkpoint of our own whose arrays are never whole in memory.

An array is made block by block and written in pieces of a block, in the same format as
`store.CheckpointStore` writes, with one stored chunk for each piece. Orbax itself wants all arrays
at once.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from orbax.checkpoint import future
from orbax.checkpoint._src.serialization import tensorstore_utils

from mxjax.ckpt.tree import nested

Index = tuple[int, ...]

_COMMIT_BYTES = 1 << 26
"""What is written at once; so much is held beside the block that is being made."""

_PIECE_BYTES = 1 << 26
"""Largest piece, unless a single row of a block is larger."""


@dataclass(frozen=True, eq=False)
class StreamedArray:
    """An array that is made when it is written.

    Attributes:
      lead: the first so many dims are walked through; a block is what lies below one index of them.
      read: index of these dims -> the block, of shape ``shape[lead:]``. It may be a view of a
        mapped file, of another dtype: what is written is converted piece by piece.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    lead: int
    read: Callable[[Index], np.ndarray] = field(repr=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of a stored chunk: some rows of one block."""
        block = self.shape[self.lead :]
        if not block:
            return (1,) * self.lead
        row = int(np.prod(block[1:], dtype=np.int64)) * self.dtype.itemsize
        rows = min(block[0], max(1, _PIECE_BYTES // max(row, 1)))
        return (*(1 for _ in range(self.lead)), rows, *block[1:])

    def pieces(self) -> Iterator[tuple[tuple[int | slice, ...], np.ndarray]]:
        """Each piece with its place in the array, in order.

        Raises:
          ValueError: `read` gives another shape.
        """
        for index in itertools.product(*map(range, self.shape[: self.lead])):
            block = np.asarray(self.read(index))
            if block.shape != self.shape[self.lead :]:
                raise ValueError(
                    f"A block of shape {block.shape} was made for an array of shape {self.shape},"
                    f" of which {self.lead} dims are walked through."
                )
            if not block.shape:
                yield index, np.asarray(block, self.dtype)
                continue
            rows = self.piece[self.lead]
            for first in range(0, block.shape[0], rows):
                part = slice(first, min(first + rows, block.shape[0]))
                yield (*index, part), np.asarray(block[part], self.dtype, order="C")


class _StreamHandler(ocp.type_handlers.NumpyHandler):
    """Writes one block after the other; reading is the base class's."""

    def __init__(self, written: Callable[[int], Any]) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._written = written

    async def serialize(
        self, values: Sequence[StreamedArray], infos: Sequence[Any], args: Any = None
    ) -> Sequence[future.Future]:
        return [
            future.CommitFutureAwaitingContractedSignals(
                self._write(values, infos), name="streamed_arrays"
            )
        ]

    async def _write(self, values: Sequence[StreamedArray], infos: Sequence[Any]) -> None:
        # Each commit makes files of its own: gather small blocks.
        transaction, gathered = ts.Transaction(), 0
        for value, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            array = await _open(value, info, transaction)
            for place, piece in value.pieces():
                await array[place].write(piece)
                self._written(piece.nbytes)
                gathered += piece.nbytes
                if gathered >= _COMMIT_BYTES:
                    await transaction.commit_async()
                    transaction, gathered = ts.Transaction(), 0
                    array = await _open(value, info, transaction)
        await transaction.commit_async()


async def _open(value: StreamedArray, info: Any, transaction: ts.Transaction) -> ts.TensorStore:
    """The stored array, with a chunk for each piece."""
    spec = tensorstore_utils.build_array_write_spec(
        info=info,
        global_shape=value.shape,
        local_shape=value.piece,
        dtype=value.dtype,
        use_ocdbt=info.is_ocdbt_checkpoint,
        process_index=0,
    )
    return await ts.open(
        ts.Spec(spec.json),
        create=True,
        open=True,
        context=info.ts_context,
        transaction=transaction,
    )


def write_streamed(
    run_dir: Path,
    step: int,
    arrays: Mapping[str, StreamedArray],
    metadata: Mapping[str, Any],
    written: Callable[[int], Any] = lambda nbytes: None,
) -> None:
    """Writes checkpoint `step` of a run as `store.CheckpointStore` does.

    Args:
      arrays: by the names of `tree.named_leaves`.
      metadata: what JSON can hold.
      written: called with the size of each piece when it is on disk.
    """
    json.dumps(metadata, allow_nan=False)
    registry = ocp.type_handlers.create_type_handler_registry(
        (StreamedArray, _StreamHandler(written))
    )
    handlers = ocp.DefaultCheckpointHandlerRegistry()
    state = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    handlers.add("state", ocp.args.PyTreeSave, state)
    options = ocp.CheckpointManagerOptions(
        save_root_metadata=False,
        step_name_format=ocp.path.step.standard_name_format(),
        enable_async_checkpointing=False,
    )
    folder = epath.Path(run_dir.absolute() / "checkpoints")
    with ocp.CheckpointManager(folder, options=options, handler_registry=handlers) as manager:
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(nested(arrays)), metadata=ocp.args.JsonSave(dict(metadata))
        )
        manager.save(step, args=items, force=True)
