"""From a `DataConfig` to samples."""

import os
from typing import NamedTuple

from mxjax.config.schema import DataConfig
from mxjax.data.errors import DataError
from mxjax.data.packing import PackedSamples, Samples
from mxjax.data.random import Stream
from mxjax.data.sources import find_files, read_documents
from mxjax.data.store import TokenStore, split, tokenize
from mxjax.data.synthetic import SyntheticSamples
from mxjax.data.tokenizer import TOKENIZERS, Tokenizer

_VALIDATION_SEED = 0


class Data(NamedTuple):
    """What a run trains and is evaluated on."""

    train: Samples
    validation: Samples | None
    """Held-out samples, one pass (synthetic: endless), in an order that `seed` does not change.
    None: nothing is held out."""
    tokenizer: Tokenizer
    """Of text sources; synthetic tokens have no text, and their ids may lie outside of it."""


def build_data(config: DataConfig, seq_length: int, vocab_size: int, seed: int) -> Data:
    """Reads the configured data.

    Args:
      config: the section `data`, already checked against the rest (`config/checks.py`).
      seq_length: tokens of one sample.
      vocab_size: the model's; synthetic tokens fill it.
      seed: of the order of samples (and of synthetic tokens); not of the held-out split.

    Raises:
      DataError: a path, a file or its content cannot be used.
    """
    tokenizer = TOKENIZERS[config.tokenizer]()
    if config.source == "synthetic":
        train, validation = (
            SyntheticSamples(seq_length, vocab_size, seed=seed, stream=stream)
            for stream in (Stream.SYNTHETIC_TRAIN, Stream.SYNTHETIC_VALIDATION)
        )
        return Data(train, validation, tokenizer)

    train_store, validation_store = _read_stores(config, tokenizer)
    train = PackedSamples(
        train_store,
        seq_length,
        document_mask=config.document_mask,
        shuffle_seed=seed if config.shuffle else None,
        num_epochs=config.num_epochs,
    )
    validation = None
    if validation_store is not None:
        validation = PackedSamples(
            validation_store,
            seq_length,
            document_mask=config.document_mask,
            # The first few batches then stand for all of the text, and for any run's seed alike.
            shuffle_seed=_VALIDATION_SEED if config.shuffle else None,
            num_epochs=1,
        )
    return Data(train, validation, tokenizer)


def _read_stores(config: DataConfig, tokenizer: Tokenizer) -> tuple[TokenStore, TokenStore | None]:
    def read(files: list[str], key: str) -> TokenStore:
        documents = read_documents(files, config.source, config.text_key)
        store = tokenize(documents, tokenizer)
        if store.num_documents == 0:
            raise DataError(f"data.{key}: the {len(files)} files hold no text at all")
        return store

    files = find_files(config.paths, config.exclude, config.source, "data.paths")
    if not config.validation_paths:
        return split(read(files, "paths"), config.validation_fraction)
    held_out = find_files(
        config.validation_paths, config.exclude, config.source, "data.validation_paths"
    )
    # `paths` may be a folder that contains the held-out files: those are never trained on.
    real_held_out = set(map(os.path.realpath, held_out))
    files = [path for path in files if os.path.realpath(path) not in real_held_out]
    if not files:
        raise DataError(
            "data.validation_paths: takes every file of data.paths; leave some to train on"
        )
    return read(files, "paths"), read(held_out, "validation_paths")
