"""The corpus as one flat array of tokens, and the held-out part of it."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Iterable

import numpy as np

from mxjax.data.errors import DataError
from mxjax.data.random import Stream, random_permutation
from mxjax.data.tokenizer import Tokenizer

# Which documents are held out must not depend on the seed of a run: runs that differ only by seed
# are compared on the same held-out documents, and none trains on another's.
_SPLIT_SEED = 0


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStore:
    """Documents as ranges of one flat array, which may be a memory map.

    Selecting documents makes a new store on the same array, without copying.
    """

    tokens: np.ndarray
    """Token ids, uint16 or int32 [number of tokens]."""
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
        try:
            ids = tokenizer.encode(text)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{place}: not UTF-8 ({error}); convert the file, add it to data.exclude, or use "
                "data.tokenizer=byte, which takes any bytes"
            ) from error
        if len(ids):
            tokens.frombytes(ids.astype(dtype).tobytes())
            tokens.append(tokenizer.eod_id)
            lengths.append(len(ids) + 1)
    lengths = np.array(lengths, dtype=np.int64)
    return TokenStore(np.frombuffer(tokens, dtype), np.cumsum(lengths) - lengths, lengths)


def split(store: TokenStore, validation_fraction: float) -> tuple[TokenStore, TokenStore | None]:
    """(training part, held-out part), disjoint and together the whole store.

    A random `validation_fraction` of the documents is held out, at least one and not all. Adding
    documents at the end moves few of the old ones to the other side. Of a single document the
    tail is held out. Fraction 0 holds out nothing (None).

    Raises:
      DataError: a single document is too short to be cut in two.
    """
    if validation_fraction == 0:
        return store, None
    if store.num_documents == 1:
        return _split_document(store, validation_fraction)
    order = random_permutation(store.num_documents, _SPLIT_SEED, Stream.SPLIT)
    held_out = round(validation_fraction * store.num_documents)
    held_out = min(max(held_out, 1), store.num_documents - 1)
    return store.select(np.sort(order[held_out:])), store.select(np.sort(order[:held_out]))


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
