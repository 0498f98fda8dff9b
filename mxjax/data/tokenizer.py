"""Text to token ids and back."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer."""

    vocab_size: int
    """Ids are 0 .. vocab_size - 1."""
    eod_id: int
    """The id that ends a document; `encode` never produces it."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of a text, integers [length], without an end-of-document id. Bytes are the content
        of a file as it is; a tokenizer of characters raises `UnicodeDecodeError` if they are not
        UTF-8."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, end-of-document and unknown ids left out."""
        ...


class ByteTokenizer:
    """Ids 0-255 are the bytes of the text, 256 ends a document."""

    vocab_size = 257
    eod_id = 256

    def encode(self, text: str | bytes) -> np.ndarray:
        # JSON can hold half of a surrogate pair; passing it on loses nothing.
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < self.eod_id).decode("utf-8", "replace")


TOKENIZERS: dict[str, type[Tokenizer]] = {"byte": ByteTokenizer}
"""By the names that `data.tokenizer` accepts."""
