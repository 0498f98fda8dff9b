"""From a `DataConfig` to samples."""

import dataclasses
import os
from collections.abc import Sequence
from typing import NamedTuple

from mxjax.config.schema import DataConfig
from mxjax.data.blend import BlendedSamples
from mxjax.data.errors import DataError
from mxjax.data.indexed import read_indexed
from mxjax.data.packing import PackedSamples, Samples
from mxjax.data.random import Stream
from mxjax.data.sources import find_files, read_documents, strip_suffix
from mxjax.data.store import TokenStore, split, tokenize
from mxjax.data.synthetic import SyntheticSamples
from mxjax.data.tokenizer import Tokenizer, load_tokenizer

_VALIDATION_SEED = 0


class Data(NamedTuple):
    """What a run trains and is evaluated on."""

    train: Samples
    validation: Samples | None
    """Held-out samples, one pass (of a blend: until every source is through, the others repeating;
    synthetic: endless), in an order that `seed` does not change. None: nothing is held out."""
    tokenizer: Tokenizer
    """As configured. Synthetic and indexed tokens may be none of its ids."""


def build_data(config: DataConfig, seq_length: int, vocab_size: int, seed: int) -> Data:
    """Reads the configured data.

    Args:
      config: the section `data`, already checked against the rest (`config/checks.py`).
      seq_length: tokens of one sample.
      vocab_size: the model's; synthetic tokens fill it.
      seed: of the order of samples (and of synthetic tokens); not of the held-out split.

    Raises:
      DataError: a path, a file or its content cannot be used, or the vocabulary is too small.
    """
    tokenizer = load_tokenizer(config.tokenizer, config.eod_token)
    _check_vocabulary(config, tokenizer, vocab_size)
    if config.source == "synthetic":
        train, validation = (
            SyntheticSamples(seq_length, vocab_size, seed=seed, stream=stream)
            for stream in (Stream.SYNTHETIC_TRAIN, Stream.SYNTHETIC_VALIDATION)
        )
        return Data(train, validation, tokenizer)

    sources, held_out = _find_sources(config)
    stores = [_read(source, config, tokenizer, vocab_size) for source in sources]
    validation_stores: list[TokenStore] = []
    if held_out:
        validation_stores = [_read(held_out, config, tokenizer, vocab_size)]
    elif config.validation_fraction:
        parts = [split(store, config.validation_fraction) for store in stores]
        stores, validation_stores = ([part[i] for part in parts] for i in range(2))

    train = _samples(stores, config, seq_length, seed)
    validation = None
    if validation_stores:
        # One pass over all, in proportion. With a seed of its own, the first few batches stand for
        # all of the text, and for any run's seed alike.
        once = dataclasses.replace(config, num_epochs=1, blend_stop="all_exhausted")
        validation = _samples(validation_stores, once, seq_length, _VALIDATION_SEED)
    return Data(train, validation, tokenizer)


def _check_vocabulary(config: DataConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
    encodes = config.source in ("text", "jsonl") or config.tokenizer != "byte"
    if encodes and vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"model.vocab_size: {vocab_size} does not hold the {tokenizer.vocab_size} ids of "
            f"data.tokenizer {config.tokenizer}; raise it to at least {tokenizer.vocab_size} (a "
            "multiple of parallel.tp)"
        )


class _Source(NamedTuple):
    name: str
    """For messages."""
    files: list[str]


def _find_sources(config: DataConfig) -> tuple[list[_Source], _Source | None]:
    """What to train on, several sources if it is a blend, and the files of `validation_paths`."""

    def find(patterns: Sequence[str], key: str) -> list[str]:
        return find_files(patterns, config.exclude, config.source, key)

    if config.blend:
        sources = [
            _Source(f"data.blend ({path})", find([path], "data.blend")) for _, path in config.blend
        ]
    else:
        sources = [_Source("data.paths", find(config.paths, "data.paths"))]
    held_out = None
    if config.validation_paths:
        key = "data.validation_paths"
        held_out = _Source(key, find(config.validation_paths, key))
        sources = [_without(source, held_out) for source in sources]
    _check_disjoint(sources)
    return sources, held_out


def _without(source: _Source, held_out: _Source) -> _Source:
    """The source may be a folder that contains the held-out files: those are never trained on."""
    real_held_out = set(map(os.path.realpath, held_out.files))
    files = [path for path in source.files if os.path.realpath(path) not in real_held_out]
    if not files:
        raise DataError(
            f"{held_out.name}: takes every file of {source.name}; leave some to train on"
        )
    return _Source(source.name, files)


def _check_disjoint(sources: Sequence[_Source]) -> None:
    """Else a document could be held out from one source and trained on in another."""
    owners: dict[str, str] = {}
    for source in sources:
        for path in source.files:
            owner = owners.setdefault(os.path.realpath(path), source.name)
            if owner != source.name:
                raise DataError(
                    f"{source.name}: {path} is in {owner} too; a file may be in one source only, "
                    "so narrow one of the two"
                )


def _read(source: _Source, config: DataConfig, tokenizer: Tokenizer, vocab_size: int) -> TokenStore:
    if config.source == "indexed":
        store = read_indexed([strip_suffix(path) for path in source.files], vocab_size)
    else:
        store = tokenize(read_documents(source.files, config.source, config.text_key), tokenizer)
    if store.num_tokens < 2:
        what = "no text at all" if store.num_tokens == 0 else "a single token"
        raise DataError(
            f"{source.name}: the files hold {what} ({len(source.files)} files, the first is "
            f"{source.files[0]}); name others"
        )
    if config.document_mask and store.lengths.max() < 2:
        raise DataError(
            f"{source.name}: every document is a single token, so with data.document_mask nothing "
            "can be predicted; set that to false or name other files"
        )
    return store


def _samples(
    stores: Sequence[TokenStore], config: DataConfig, seq_length: int, seed: int
) -> Samples:
    """Samples of one store, or of one for each source of the blend."""
    is_blend = len(stores) > 1
    packed = [
        PackedSamples(
            store,
            seq_length,
            document_mask=config.document_mask,
            shuffle_seed=seed if config.shuffle else None,
            num_epochs=None if is_blend else config.num_epochs,
        )
        for store in stores
    ]
    if not is_blend:
        return packed[0]
    weights = [weight for weight, _ in config.blend]
    return BlendedSamples(packed, weights, num_epochs=config.num_epochs, stop=config.blend_stop)
