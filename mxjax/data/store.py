"""The corpus as one flat array of tokens, and the held-out part of it."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from mxjax.data.errors import DataError
from mxjax.data.random import Stream, random_permutation
from mxjax.data.tokenizer import Tokenizer

# Which documents are held out must not depend on the seed of a run: runs that differ only by seed
# are compared on the same held-out documents, and none trains on another's.
_SPLIT_SEED = 0

_PROBES = 64
_PROBE_LENGTH = 16384


class Tokens(Protocol):
    """Token ids one after the other: a NumPy array, or files that are read where sliced."""

    def __len__(self) -> int: ...

    def __getitem__(self, positions: slice) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStore:
    """Documents as ranges of one flat array, in memory or on disk.

    Selecting documents makes a new store on the same array, without copying.
    """

    tokens: Tokens
    """Token ids, integers [number of tokens]."""
    starts: np.ndarray
    """First token of each document, int64 [number of documents]."""
    lengths: np.ndarray
    """Tokens of each document, its end-of-document token included, int64 [number of documents]."""

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, end-of-document tokens included."""
        return int(self.lengths.sum())

    def select(self, documents: np.ndarray) -> TokenStore:
        """The store of some documents, by index, in the given order."""
        return TokenStore(self.tokens, self.starts[documents], self.lengths[documents])

    def read(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Some ranges of tokens, end to end, integers [sum of lengths]."""
        ranges = zip(starts.tolist(), lengths.tolist(), strict=True)
        return np.concatenate([self.tokens[start : start + length] for start, length in ranges])

    def probe(self) -> np.ndarray:
        """Tokens by which two stores of equal documents are told apart.

        All of them if they are in memory or few. Of a large array on disk, which would take hours
        to read, evenly spaced pieces, the first and the last tokens among them.
        """
        size = len(self.tokens)
        if isinstance(self.tokens, np.ndarray) or size <= _PROBES * _PROBE_LENGTH:
            return self.tokens[:]
        starts = np.linspace(0, size - _PROBE_LENGTH, _PROBES).astype(np.int64)
        return self.read(starts, np.full(_PROBES, _PROBE_LENGTH))


def tokenize(documents: Iterable[tuple[str, str | bytes]], tokenizer: Tokenizer) -> TokenStore:
    """The store of (place, text) documents, each with an end-of-document token appended.

    Empty documents are skipped: they would be an end-of-document token alone.

    Raises:
      DataError: the tokenizer needs UTF-8 and a document is not.
    """
    # array.array grows in place: no second copy of the corpus, and no Python object per document.
    typecode, dtype = ("H", np.uint16) if tokenizer.vocab_size <= 2**16 else ("i", np.int32)
    tokens, lengths = array.array(typecode), array.array("q")
    for place, text in documents:
        ids = encode(place, text, tokenizer)
        if len(ids):
            tokens.frombytes(ids.astype(dtype).tobytes())
            tokens.append(tokenizer.eod_id)
            lengths.append(len(ids) + 1)
    lengths = np.array(lengths, dtype=np.int64)
    return TokenStore(np.frombuffer(tokens, dtype), np.cumsum(lengths) - lengths, lengths)


def encode(place: str, text: str | bytes, tokenizer: Tokenizer) -> np.ndarray:
    """Ids of a document, integers [length]; `place` is for the message of the error.

    Raises:
      DataError: the tokenizer needs UTF-8 and the document is not.
    """
    try:
        return tokenizer.encode(text)
    except UnicodeError as error:
        raise DataError(
            f"{place}: not UTF-8 ({error}); convert the file, add it to data.exclude, or use "
            "data.tokenizer=byte, which takes any bytes"
        ) from error


def split(store: TokenStore, validation_fraction: float) -> tuple[TokenStore, TokenStore | None]:
    """(training part, held-out part), disjoint and together the whole store.

    A random `validation_fraction` of the documents is held out, at least one and not all. Adding
    documents at the end moves few of the old ones to the other side. Of a single document the
    tail is held out. Fraction 0 holds out nothing (None).

    Raises:
      DataError: the documents are too short to be divided.
    """
    if validation_fraction == 0:
        return store, None
    if store.num_documents == 1:
        return _split_document(store, validation_fraction)
    order = random_permutation(store.num_documents, _SPLIT_SEED, Stream.SPLIT)
    held_out = round(validation_fraction * store.num_documents)
    held_out = min(max(held_out, 1), store.num_documents - 1)
    parts = store.select(np.sort(order[held_out:])), store.select(np.sort(order[:held_out]))
    if min(part.num_tokens for part in parts) < 2:  # a token and its target
        raise DataError(
            f"data.validation_fraction: {validation_fraction:g} of the {store.num_documents} "
            "documents leaves a single token on one side; change it, give data.validation_paths, "
            "or add data"
        )
    return parts


def _split_document(store: TokenStore, fraction: float) -> tuple[TokenStore, TokenStore]:
    start, length = int(store.starts[0]), int(store.lengths[0])
    text_length = length - 1  # the end-of-document token goes with the tail
    head = text_length - max(round(fraction * text_length), 1)
    if head < 2:  # a token and its target
        raise DataError(
            f"data.validation_fraction: the only document has {text_length} tokens, too few to "
            f"hold out {fraction:g} of it; set it to 0, give data.validation_paths, or add data"
        )
    ranges = [(start, head), (start + head, length - head)]
    return tuple(TokenStore(store.tokens, np.array([s]), np.array([n])) for s, n in ranges)
