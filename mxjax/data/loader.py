"""Batches of samples as global arrays on a mesh."""

import sys
from collections.abc import Iterator

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from mxjax.data.errors import DataError
from mxjax.data.mtp import with_mtp
from mxjax.data.packing import Sample, Samples, padding_sample


class BatchLoader(Iterator[dict[str, jax.Array]]):
    """Iterates over batches: the fields of `Sample`, int32 [num_microbatches, rows, seq_length],
    and those of multi-token prediction (`data/mtp.py`) if asked for.

    `rows` is global_batch_size / num_microbatches. Row r of microbatch m of a batch is sample
    ``next_sample_index + m * rows + r``, so which samples a batch holds depends neither on the
    mesh nor on the number of processes. A process reads only the rows that its own devices hold.
    Threads read ahead; an exception in one of them is raised by `next`, with the index of the
    sample and its cause, and closes the loader.

    Iteration ends when fewer samples than a batch are left.

    Args:
      samples: what to read.
      global_batch_size: samples of a batch, over all processes.
      num_microbatches: must divide the batch.
      sharding: of arrays [num_microbatches, rows, seq_length].
      start: index of the first sample; where a resumed run goes on.
      num_threads: reader threads of this process.
      prefetch: batches read ahead.
      mtp_num_layers: modules of multi-token prediction to make inputs and targets for.
      sequence_order: [seq_length] which token goes where, for a sequence that is split in another
        order than its own (`sharding/context_parallel.py`); None: in order.
      pad_last_batch: fill up the last batch with padding instead of leaving its samples out, so
        that an evaluation sees every held-out token once.
    """

    next_sample_index: int
    """Samples handed out so far, those before `start` included: the state of the data."""

    def __init__(
        self,
        samples: Samples,
        *,
        global_batch_size: int,
        num_microbatches: int,
        sharding: NamedSharding,
        start: int = 0,
        num_threads: int = 2,
        prefetch: int = 4,
        mtp_num_layers: int = 0,
        sequence_order: np.ndarray | None = None,
        pad_last_batch: bool = False,
    ):
        if global_batch_size % num_microbatches:
            raise ValueError(
                f"training.global_batch_size: {global_batch_size} is not a multiple of "
                f"training.num_microbatches = {num_microbatches}; change one of them"
            )
        self.next_sample_index = start
        self._global_batch_size = global_batch_size
        self._shape = (
            num_microbatches,
            global_batch_size // num_microbatches,
            samples.seq_length,
        )
        self._sharding = sharding
        self._sequence_order = sequence_order
        self._rows = _local_rows(sharding, self._shape)
        source = _LocalBatches(
            samples, start, self._shape, self._rows, mtp_num_layers, pad_last_batch
        )
        read_options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch)
        self._batches = iter(grain.MapDataset.source(source).to_iter_dataset(read_options))

    def __next__(self) -> dict[str, jax.Array]:
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except Exception:
            # grain would go on behind the failed batch, and its samples would be lost.
            self.close()
            raise
        self.next_sample_index += self._global_batch_size
        return {name: self._to_devices(array) for name, array in batch.items()}

    def close(self) -> None:
        """Stops reading ahead. The loader cannot be used afterwards."""
        self._batches.close()

    def _to_devices(self, local: np.ndarray) -> jax.Array:
        def shard(index: tuple[slice, ...]) -> np.ndarray:
            microbatches, rows, sequence = index
            start, stop, _ = rows.indices(self._shape[1])
            # The rows of a shard are consecutive, hence also among the sorted local rows.
            first = np.searchsorted(self._rows, start)
            columns = sequence if self._sequence_order is None else self._sequence_order[sequence]
            return local[microbatches, first : first + stop - start, columns]

        return jax.make_array_from_callback(self._shape, self._sharding, shard)


def _local_rows(sharding: NamedSharding, shape: tuple[int, int, int]) -> np.ndarray:
    """Sorted indices, within a microbatch, of the rows that this process's devices hold."""
    shards = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([np.arange(shape[1])[rows] for _, rows, _ in shards]))


class _LocalBatches:
    """This process's rows of each batch, random access, as grain's readers want it."""

    def __init__(
        self,
        samples: Samples,
        start: int,
        shape: tuple[int, int, int],
        rows: np.ndarray,
        mtp_num_layers: int,
        pad_last_batch: bool,
    ):
        self._samples = samples
        self._start = start
        self._shape = shape
        self._rows = rows
        self._mtp_num_layers = mtp_num_layers
        self._pad_last_batch = pad_last_batch

    def __len__(self) -> int:
        if self._samples.num_samples is None:
            return sys.maxsize
        size = self._shape[0] * self._shape[1]
        left = max(self._samples.num_samples - self._start, 0)
        return (left + size - 1) // size if self._pad_last_batch else left // size

    def __getitem__(self, batch: int) -> Sample:
        num_microbatches, rows_per_microbatch, seq_length = self._shape
        first = self._start + batch * num_microbatches * rows_per_microbatch
        read = [
            self._read(first + m * rows_per_microbatch + int(row))
            for m in range(num_microbatches)
            for row in self._rows
        ]
        shape = (num_microbatches, len(self._rows), seq_length)
        arrays = {name: np.stack([s[name] for s in read]).reshape(shape) for name in read[0]}
        return with_mtp(arrays, self._mtp_num_layers)

    def _read(self, index: int) -> Sample:
        end = self._samples.num_samples
        if end is not None and index >= end:
            return padding_sample(self._shape[2])
        try:
            return self._samples[index]
        except DataError:
            raise
        except Exception as error:
            raise RuntimeError(f"reading sample {index} failed: {error}") from error
