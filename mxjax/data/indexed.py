r"""Megatron-LM's indexed datasets: token ids in ``PREFIX.bin``, their index in ``PREFIX.idx``.

The index, little-endian and without gaps (``indexed_dataset.py`` of megatron-core 0.19.2):

    9 bytes       "MMIDIDX\0\0"
    uint64        version, 1
    uint8         dtype code of the token ids
    uint64        S, the number of sequences
    uint64        D + 1, one more than the number of documents
    int32 [S]     tokens of each sequence
    int64 [S]     first byte of each sequence in PREFIX.bin
    int64 [D+1]   first sequence of each document, and S
    int8  [S]     multimodal only: the mode of each sequence; 0 is text

A document of plain text is one sequence; a multimodal one alternates text and other sequences.
"""

import array
import dataclasses
import os
import struct
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from mxjax.data.errors import DataError
from mxjax.data.store import TokenStore

DTYPES = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
"""Token ids by the dtype code of the index."""

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_SEQUENCES_AT_A_TIME = 2**24


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype that Megatron's preprocessing picks for ids below `vocab_size`."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


@dataclasses.dataclass(frozen=True, eq=False)
class IndexedDataset:
    """An open dataset. All arrays are memory maps: nothing is read before it is used."""

    prefix: str
    tokens: np.ndarray
    """Content of the ``.bin`` file, one of `DTYPES` [number of tokens]."""
    sequence_lengths: np.ndarray
    """int32 [S]."""
    sequence_pointers: np.ndarray
    """First byte of each sequence, int64 [S]."""
    document_indices: np.ndarray
    """First sequence of each document, and S, int64 [D + 1]."""
    sequence_modes: np.ndarray | None
    """int8 [S]; None: not multimodal."""

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    def document_ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """First token and number of tokens of each document that has any, int64 [documents]."""
        first, last = self.document_indices[:-1], self.document_indices[1:] - 1
        has_sequences = last >= first
        first, last = first[has_sequences], last[has_sequences]
        starts = self.sequence_pointers[first] // self.tokens.itemsize
        ends = self.sequence_pointers[last] // self.tokens.itemsize + self.sequence_lengths[last]
        has_tokens = ends > starts
        return starts[has_tokens], (ends - starts)[has_tokens]


def open_indexed(prefix: str) -> IndexedDataset:
    """Opens ``prefix.idx`` and ``prefix.bin`` and checks one against the other.

    Raises:
      DataError: a file is missing, is not what its header says, or does not fit the other one.
    """
    index_path, bin_path = f"{prefix}.idx", f"{prefix}.bin"
    for path in (index_path, bin_path):
        if not os.path.isfile(path):
            raise DataError(
                f"{path}: no such file; an indexed dataset is a pair PREFIX.idx and PREFIX.bin, "
                "and data.paths names the PREFIX"
            )
    try:
        dtype, arrays = _read_index(index_path)
        bin_size = os.path.getsize(bin_path)
        num_tokens = bin_size // dtype.itemsize
        # A file of no bytes cannot be mapped.
        tokens = np.memmap(bin_path, dtype, "r", shape=num_tokens) if num_tokens else np.empty(0)
    except OSError as error:
        place = error.filename or prefix
        raise DataError(f"{place}: cannot be read ({error.strerror}); mend the file") from error
    dataset = IndexedDataset(prefix, tokens.astype(dtype, copy=False), *arrays)
    _check_documents(dataset, index_path)
    _check_sequences(dataset, index_path, bin_path, bin_size)
    return dataset


def _read_index(path: str) -> tuple[np.dtype, tuple[np.ndarray | None, ...]]:
    """The dtype of the tokens; lengths, pointers, document indices and modes of the sequences."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise DataError(
            f"{path}: not the index of an indexed dataset: it begins with {header[:9]!r} instead "
            f"of {_MAGIC!r}"
        )
    if len(header) < _HEADER.size:
        raise DataError(
            f"{path}: cut off inside its header ({size} of {_HEADER.size} bytes); copy it again"
        )
    _, version, code, num_sequences, num_indices = _HEADER.unpack(header)
    if version != _VERSION:
        raise DataError(f"{path}: version {version} of the format; only {_VERSION} is known")
    if code not in DTYPES:
        raise DataError(f"{path}: dtype code {code} is unknown; known are 1 to {max(DTYPES)}")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_indices
    if size not in (expected, expected + num_sequences):
        what = "cut off" if size < expected else "not what its header says"
        raise DataError(
            f"{path}: {what}: {num_sequences} sequences and {num_indices} document indices take "
            f"{expected} bytes ({expected + num_sequences} if multimodal), and it has {size}; copy "
            "or make it again"
        )
    content = np.memmap(path, np.uint8, "r")
    offset = _HEADER.size

    def take(dtype: str, count: int) -> np.ndarray:
        nonlocal offset
        values = np.frombuffer(content, dtype, count, offset)
        offset += values.nbytes
        return values

    lengths, pointers = take("<i4", num_sequences), take("<i8", num_sequences)
    indices = take("<i8", num_indices)
    modes = take("<i1", num_sequences) if size > expected else None
    return DTYPES[code], (lengths, pointers, indices, modes)


def _check_documents(dataset: IndexedDataset, index_path: str) -> None:
    indices, num_sequences = dataset.document_indices, len(dataset.sequence_lengths)
    if not len(indices) or indices[0] != 0 or indices[-1] != num_sequences:
        ends = f"runs from {indices[0]} to {indices[-1]}" if len(indices) else "is empty"
        raise DataError(
            f"{index_path}: its document index {ends} and should run from 0 to {num_sequences}, "
            "the number of sequences; make it again"
        )
    if np.any(indices[1:] < indices[:-1]):
        raise DataError(f"{index_path}: its document index goes backwards; make it again")


def _check_sequences(
    dataset: IndexedDataset, index_path: str, bin_path: str, bin_size: int
) -> None:
    """Sequences lie inside of the ``.bin`` file, and those of one document end to end."""
    itemsize = dataset.tokens.itemsize
    for first in range(0, len(dataset.sequence_lengths), _SEQUENCES_AT_A_TIME):
        # One more than a chunk, so that the seam between two chunks is looked at too.
        chunk = slice(first, first + _SEQUENCES_AT_A_TIME + 1)
        lengths, pointers = dataset.sequence_lengths[chunk], dataset.sequence_pointers[chunk]
        ends = pointers + lengths.astype(np.int64) * itemsize
        if lengths.min() < 0 or pointers.min() < 0 or np.any(pointers % itemsize):
            raise DataError(
                f"{index_path}: damaged: a sequence has a negative length, or does not begin at a "
                "token; make it again"
            )
        if ends.max() > bin_size:
            raise DataError(
                f"{bin_path}: has {bin_size} bytes, and {index_path} names tokens up to byte "
                f"{ends.max()}; one of the two is cut off or belongs to another dataset"
            )
        breaks = np.flatnonzero(pointers[1:] != ends[:-1]) + 1 + first
        new_document = np.searchsorted(dataset.document_indices, breaks)
        inside = breaks[dataset.document_indices[new_document] != breaks]
        if len(inside):
            raise DataError(
                f"{index_path}: sequence {inside[0]} does not follow the one before it in the "
                "same document; documents in pieces are not supported"
            )


class IndexedTokens:
    """Token ids of datasets laid end to end; read, as int32, where they are sliced.

    Slicing raises `DataError` if an id is not below `vocab_size`: an array on disk is too large to
    be checked as a whole before it is trained on.
    """

    def __init__(self, datasets: Sequence[IndexedDataset], vocab_size: int):
        self._datasets = datasets
        self._vocab_size = vocab_size
        self.bounds = np.cumsum([0, *(len(dataset.tokens) for dataset in datasets)])
        """Position of the first token of each dataset, and the number of all tokens."""

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, positions: slice) -> np.ndarray:
        start, stop, _ = positions.indices(len(self))
        first = int(np.searchsorted(self.bounds, start, side="right")) - 1
        pieces = []
        for which in range(first, len(self._datasets)):
            base = int(self.bounds[which])
            if base >= stop:
                break
            tokens = self._datasets[which].tokens[max(start - base, 0) : stop - base]
            self._check(tokens, self._datasets[which].prefix)
            pieces.append(tokens.astype(np.int32))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

    def _check(self, tokens: np.ndarray, prefix: str) -> None:
        for found in (tokens.min(initial=0), tokens.max(initial=0)):
            if not 0 <= found < self._vocab_size:
                raise DataError(
                    f"{prefix}.bin: holds the id {found}, and model.vocab_size is "
                    f"{self._vocab_size}; raise that to what the corpus was made with"
                )


def read_indexed(prefixes: Sequence[str], vocab_size: int) -> TokenStore:
    """The documents of some datasets, in order, on disk.

    Raises:
      DataError: a dataset cannot be used (see `open_indexed`), holds numbers that are no token ids,
        or sequences that are not text.
    """
    datasets = [open_indexed(prefix) for prefix in prefixes]
    for dataset in datasets:
        if dataset.tokens.dtype.kind == "f":
            raise DataError(
                f"{dataset.prefix}.idx: holds {dataset.tokens.dtype} numbers, which are no token "
                "ids; name a dataset of integers"
            )
        modes = dataset.sequence_modes
        if modes is not None and np.any(modes):
            raise DataError(
                f"{dataset.prefix}.idx: {np.count_nonzero(modes)} of {len(modes)} sequences are "
                "not text (multimodal mode other than 0); name a dataset of text alone"
            )
    tokens = IndexedTokens(datasets, vocab_size)
    ranges = [dataset.document_ranges() for dataset in datasets]
    starts = [base + starts for base, (starts, _) in zip(tokens.bounds, ranges, strict=False)]
    return TokenStore(tokens, np.concatenate(starts), np.concatenate([n for _, n in ranges]))


class IndexedWriter:
    """Writes a dataset document by document; the files get their names when all of it is there.

    Use it in a ``with`` block: leaving it normally finishes the files, an exception removes them.
    The files are those that Megatron's ``IndexedDatasetBuilder`` writes, byte for byte.

    Args:
      prefix: of the files; the folder is made if need be.
      dtype: of the token ids, one of `DTYPES`.
      multimodal: write the mode of each sequence.
      overwrite: replace a dataset of this name.

    Raises:
      DataError: the dataset exists already, or a token id does not fit.
    """

    def __init__(
        self, prefix: str, dtype: np.dtype, *, multimodal: bool = False, overwrite: bool = False
    ):
        existing = [f"{prefix}{s}" for s in (".idx", ".bin") if os.path.lexists(f"{prefix}{s}")]
        if existing and not overwrite:
            raise DataError(
                f"{existing[0]}: exists already; choose another name or overwrite it (--overwrite)"
            )
        self.prefix = prefix
        self.num_tokens = 0
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, known in DTYPES.items() if known == self._dtype)
        self._lengths = array.array("i")
        self._document_indices = array.array("q", [0])
        self._modes = array.array("b") if multimodal else None
        self._temporary = {s: f"{prefix}{s}.unfinished-{os.getpid()}" for s in (".bin", ".idx")}
        os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
        self._bin = open(self._temporary[".bin"], "wb")  # noqa: SIM115 - closed by __exit__

    @property
    def num_documents(self) -> int:
        return len(self._document_indices) - 1

    def add_document(self, *sequences: np.ndarray, modes: Sequence[int] | None = None) -> None:
        """Appends a document of one or more sequences; `modes` (multimodal) has one for each."""
        for sequence in sequences:
            values = np.asarray(sequence)
            stored = values.astype(self._dtype)
            if not np.array_equal(values, stored):
                raise DataError(f"{self.prefix}.bin: a token id does not fit into {self._dtype}")
            if len(stored) >= 2**31:
                raise DataError(f"{self.prefix}.idx: a sequence has more than 2**31 - 1 tokens")
            self._bin.write(stored.tobytes())
            self._lengths.append(len(stored))
            self.num_tokens += len(stored)
        if self._modes is not None:
            self._modes.extend(modes if modes is not None else [0] * len(sequences))
        self._document_indices.append(len(self._lengths))

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._bin.close()
            for path in self._temporary.values():
                if os.path.exists(path):
                    os.remove(path)

    def _finish(self) -> None:
        lengths = np.frombuffer(self._lengths, "<i4")
        sizes = lengths.astype(np.int64) * self._dtype.itemsize
        with open(self._temporary[".idx"], "wb") as index:
            counts = len(self._lengths), len(self._document_indices)
            index.write(_HEADER.pack(_MAGIC, _VERSION, self._code, *counts))
            index.write(lengths.tobytes())
            index.write((np.cumsum(sizes) - sizes).astype("<i8").tobytes())
            index.write(np.frombuffer(self._document_indices, "<i8").tobytes())
            if self._modes is not None:
                index.write(self._modes.tobytes())
            for file in (self._bin, index):
                file.flush()
                os.fsync(file.fileno())
        # Readers look for the index: it must never stand beside another dataset's tokens.
        if os.path.lexists(f"{self.prefix}.idx"):
            os.remove(f"{self.prefix}.idx")
        for suffix in (".bin", ".idx"):
            os.replace(self._temporary[suffix], f"{self.prefix}{suffix}")
