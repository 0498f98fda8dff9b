"""Text to token ids and back."""

import os
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from mxjax.data.errors import DataError


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer."""

    vocab_size: int
    """Ids are 0 .. vocab_size - 1."""
    eod_id: int
    """The id that ends a document; `encode` never produces it."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of a text, integers [length], without an end-of-document id. Bytes are the content
        of a file as it is; a tokenizer of characters raises `UnicodeError` if they are not
        UTF-8, or if the text holds half of a surrogate pair."""
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


class HuggingFaceTokenizer:
    """The tokenizer of a ``tokenizer.json``, read by the package ``tokenizers``.

    A text is only ever text: special tokens that are written out in it are encoded letter by
    letter, none is put around it, and nothing is cut off or padded, whatever the file says.

    Args:
      path: the file.
      eod_token: the special token that ends a document.

    Raises:
      DataError: the package or the file is missing, the file is damaged, or it has no such special
        token.
    """

    def __init__(self, path: str, eod_token: str):
        self._tokenizer = tokenizer = _read_tokenizer(path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        # Not the number of tokens: ids may have holes.
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        if self.vocab_size == 0:
            raise DataError(f"data.tokenizer: {path} has an empty vocabulary; name another file")
        added = tokenizer.get_added_tokens_decoder().items()
        special = {token.content: id for id, token in added if token.special}
        if eod_token not in special:
            exists = tokenizer.token_to_id(eod_token) is not None
            what = "an ordinary token, which texts may hold," if exists else "no token"
            raise DataError(
                f"data.eod_token: {eod_token!r} is {what} of {path}; name one of its special "
                f"tokens: {', '.join(map(repr, special)) or 'it has none'}"
            )
        self.eod_id = special[eod_token]

    def encode(self, text: str | bytes) -> np.ndarray:
        text = text if isinstance(text, str) else text.decode("utf-8")
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:
            text.encode("utf-8")  # tells what is wrong with half of a surrogate pair
            raise
        return np.array(ids, np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def _read_tokenizer(path: str) -> Any:
    try:
        from tokenizers import Tokenizer as Reader
    except ImportError as error:
        raise DataError(
            f"data.tokenizer: {path} is read by the package tokenizers, which is not installed; "
            "run: pip install 'mxjax[tokenizers]'"
        ) from error
    if not os.path.isfile(path):
        where = "" if os.path.isabs(path) else f" (seen from {os.getcwd()})"
        raise DataError(
            f"data.tokenizer: no file {path!r}{where}; write byte, or the path of a tokenizer.json"
        )
    try:
        return Reader.from_file(path)
    except Exception as error:  # the package raises nothing more specific
        raise DataError(f"data.tokenizer: {path} is no usable tokenizer.json: {error}") from error


def load_tokenizer(name: str, eod_token: str | None) -> Tokenizer:
    """The tokenizer that `data.tokenizer` and `data.eod_token` name.

    Raises:
      DataError: it cannot be read, or has no such end-of-document token.
    """
    if name == "byte":
        return ByteTokenizer()
    if eod_token is None:
        raise DataError(
            f"data.eod_token: name the token of {name} that ends a document, such as <|endoftext|>"
        )
    return HuggingFaceTokenizer(os.path.expanduser(name), eod_token)
