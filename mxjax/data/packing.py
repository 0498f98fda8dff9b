"""Samples of fixed length: sample i is a pure function of (corpus, configuration, seed, i).

An epoch puts all documents into a random order, lays them end to end, and cuts this stream into
windows of seq_length + 1 tokens that overlap by one (the first seq_length are inputs, the last
seq_length are targets); the windows are then visited in a random order. This is the order of
Megatron-LM's GPTDataset, except that each epoch is shuffled on its own and the last, shorter
window of an epoch is padded instead of dropped.
"""

import dataclasses
import hashlib
import threading
from functools import cached_property
from typing import Protocol

import numpy as np

from mxjax.data.random import Stream, random_permutation
from mxjax.data.store import TokenStore

IGNORED_TARGET = -1
"""Target of a position that predicts nothing."""

Sample = dict[str, np.ndarray]
"""int32 [seq_length] each:

* ``tokens``: the input (0 in padding).
* ``targets``: the next token; `IGNORED_TARGET` in padding and, with a document mask, after an
  end-of-document token, because the next token belongs to another document.
* ``segment_ids``: the document within the sample, from 1; 0 in padding. Without a document mask
  one segment, 1.
* ``positions``: counted from 0 in each segment; 0 in padding.
"""


class Samples(Protocol):
    """A run's samples, in the order of training. Reading is thread-safe."""

    seq_length: int
    num_samples: int | None
    """Samples of the whole run; None: endless."""
    samples_per_epoch: int | None
    """None: no epochs. No sample ever comes again, or each source of a blend has its own."""
    fingerprint: str
    """Equal fingerprints mean equal samples at every index. An index stored in a checkpoint is
    only meaningful together with it, and all processes of a run must have the same."""

    def __getitem__(self, index: int) -> Sample: ...

    def epoch(self, index: int) -> int:
        """The pass over the data, from 0, that sample `index` belongs to (of a blend: over the
        sample's source)."""
        ...

    def describe(self) -> str:
        """One line for the log."""
        ...


def check_index(index: int, num_samples: int | None) -> None:
    """Raises IndexError if there is no sample `index`; `num_samples` None: there is no end."""
    if index < 0 or (num_samples is not None and index >= num_samples):
        end = "without end" if num_samples is None else f"to {num_samples - 1}"
        raise IndexError(f"no sample {index}: samples are numbered from 0 {end}")


def padding_sample(seq_length: int) -> Sample:
    """A sample of padding alone."""
    names = ("tokens", "targets", "segment_ids", "positions")
    sample = {name: np.zeros(seq_length, np.int32) for name in names}
    sample["targets"][:] = IGNORED_TARGET
    return sample


def fingerprint(settings: tuple, *arrays: np.ndarray) -> str:
    """A short digest of some settings (by their `repr`) and of the content of contiguous arrays."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=8)
    for array in arrays:
        digest.update(array)
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class _EpochOrder:
    documents: np.ndarray
    """Index of each document in the order of the stream, int64 [num_documents]."""
    bounds: np.ndarray
    """Where each document begins in the stream, and the end, int64 [num_documents + 1]."""
    windows: np.ndarray
    """Order in which windows are visited, int64 [samples_per_epoch]."""


class PackedSamples:
    """Documents of a `TokenStore` packed into samples; see `Samples`.

    Args:
      store: at least two tokens.
      seq_length: length of a sample.
      document_mask: whether documents of one sample are kept apart.
      shuffle_seed: of the order of documents and windows; None keeps the order of the store.
      num_epochs: passes over the documents; None: endless.
    """

    # Readers that run ahead are at most one epoch further than the batch being trained on.
    _EPOCHS_KEPT = 2

    def __init__(
        self,
        store: TokenStore,
        seq_length: int,
        *,
        document_mask: bool,
        shuffle_seed: int | None,
        num_epochs: int | None,
    ):
        self.store = store
        self.seq_length = seq_length
        self.document_mask = document_mask
        self.shuffle_seed = shuffle_seed
        self.num_tokens = store.num_tokens
        # The last token of the stream has no successor, so it is a target only.
        self.samples_per_epoch = -(-(self.num_tokens - 1) // seq_length)
        self.num_samples = None if num_epochs is None else num_epochs * self.samples_per_epoch
        self._orders: dict[int, _EpochOrder] = {}
        self._lock = threading.Lock()

    def epoch(self, index: int) -> int:
        return index // self.samples_per_epoch

    def describe(self) -> str:
        return (
            f"{self.store.num_documents:,} documents, {self.num_tokens:,} tokens, "
            f"{self.samples_per_epoch:,} samples per epoch"
        )

    @cached_property
    def fingerprint(self) -> str:
        store = self.store
        settings = (self.seq_length, self.document_mask, self.shuffle_seed)
        return fingerprint(settings, store.starts, store.lengths, store.probe())

    def __getitem__(self, index: int) -> Sample:
        check_index(index, self.num_samples)
        epoch, visit = divmod(index, self.samples_per_epoch)
        order = self._order(epoch)
        begin = int(order.windows[visit]) * self.seq_length
        end = min(begin + self.seq_length + 1, self.num_tokens)

        first, last = np.searchsorted(order.bounds, (begin, end - 1), side="right") - 1
        pieces = slice(first, last + 1)  # the documents that the window touches
        cuts = np.clip(order.bounds[first : last + 2], begin, end)
        lengths = np.diff(cuts)
        stream = np.arange(begin, end)
        skipped = cuts[:-1] - order.bounds[pieces]  # of the first document, by earlier windows
        starts = self.store.starts[order.documents[pieces]] + skipped
        tokens = self.store.read(starts, lengths)
        segment = np.repeat(np.arange(1, len(lengths) + 1), lengths)

        real = slice(0, len(stream) - 1)
        sample = padding_sample(self.seq_length)
        sample["tokens"][real] = tokens[:-1]
        sample["targets"][real] = tokens[1:]
        if self.document_mask:
            sample["targets"][real][segment[1:] != segment[:-1]] = IGNORED_TARGET
            sample["segment_ids"][real] = segment[:-1]
            sample["positions"][real] = (stream - np.repeat(cuts[:-1], lengths))[:-1]
        else:
            sample["segment_ids"][real] = 1
            sample["positions"][real] = np.arange(real.stop)
        return sample

    def _order(self, epoch: int) -> _EpochOrder:
        with self._lock:
            if epoch not in self._orders:
                if len(self._orders) == self._EPOCHS_KEPT:
                    del self._orders[next(iter(self._orders))]
                self._orders[epoch] = self._make_order(epoch)
            return self._orders[epoch]

    def _make_order(self, epoch: int) -> _EpochOrder:
        num_documents, num_windows = self.store.num_documents, self.samples_per_epoch
        if self.shuffle_seed is None:
            documents, windows = np.arange(num_documents), np.arange(num_windows)
        else:
            seed = self.shuffle_seed
            documents = random_permutation(num_documents, seed, Stream.DOCUMENTS, epoch)
            windows = random_permutation(num_windows, seed, Stream.WINDOWS, epoch)
        bounds = np.concatenate([[0], np.cumsum(self.store.lengths[documents])])
        return _EpochOrder(documents, bounds, windows)
