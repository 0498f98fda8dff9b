"""The tokenizer beside a model: which of its tokens ends a document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mxjax.ckpt.errors import CheckpointFormatError

FILE = "tokenizer.json"

_OTHERS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def files_of(path: Path) -> list[Path]:
    """A ``tokenizer.json`` and what belongs to it in its folder."""
    others = [path.with_name(name) for name in _OTHERS]
    return [path, *(other for other in others if other.is_file())]


def data_settings(folder: Path, eos_token_id: int | list[int] | None) -> dict[str, Any]:
    """The section `data` with the folder's tokenizer; empty if it is not clear what ends a
    document."""
    path = folder / FILE
    if eos_token_id is None or not path.is_file():
        return {}
    contents = {id: content for content, id in _added_tokens(path).items()}
    ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    ends = [contents[id] for id in ids if id in contents]
    return {"tokenizer": str(path.absolute()), "eod_token": ends[0]} if ends else {}


def end_of_document(path: Path, token: str | None) -> int | None:
    """Its id, by what the file says of added tokens."""
    return _added_tokens(path).get(token)


def _added_tokens(path: Path) -> dict[str, int]:
    try:
        tokens = json.loads(path.read_text("utf-8"))["added_tokens"]
        return {token["content"]: token["id"] for token in tokens}
    except (ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointFormatError(f"{path} is no usable tokenizer.json ({reason}).") from error
