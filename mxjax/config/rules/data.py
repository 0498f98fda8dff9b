"""Rules for the section `data`; see `registry.py`."""

from __future__ import annotations

from mxjax.config.rules.registry import Findings, rule
from mxjax.config.schema import Config

BYTE_TOKENIZER_SIZE = 257  # 256 bytes and the end of a document


@rule
def files_are_named_if_read(c: Config) -> Findings:
    source = c.data.source
    if source == "synthetic":
        for key in ("paths", "blend", "validation_paths", "exclude"):
            if getattr(c.data, key):
                yield (
                    f"data.{key}",
                    "does nothing with data.source: synthetic; set data.source to text, jsonl or "
                    "indexed, or remove this",
                )
    elif c.data.paths and c.data.blend:
        yield "data.blend", "names sources beside data.paths; move those into it, or remove one"
    elif not c.data.paths and not c.data.blend:
        yield "data.paths", f"data.source: {source} needs files; name files, folders or globs"


@rule
def blend_names_each_path_once(c: Config) -> Findings:
    paths = [path for _, path in c.data.blend]
    for path in dict.fromkeys(path for path in paths if paths.count(path) > 1):
        yield "data.blend", f"names {path!r} more than once; give it one entry with all its weight"


@rule
def blend_stop_has_an_end(c: Config) -> Findings:
    if c.data.blend_stop == "first_exhausted":
        return
    if not c.data.blend:
        yield "data.blend_stop", "does nothing without data.blend; remove it or set that"
    elif c.data.num_epochs is None:
        yield (
            "data.blend_stop",
            "no source is ever exhausted while data.num_epochs is null; set that, or remove this",
        )


@rule
def synthetic_data_has_no_epochs(c: Config) -> Findings:
    if c.data.source == "synthetic" and c.data.num_epochs is not None:
        yield (
            "data.num_epochs",
            "synthetic data has no end; set it to null and give training.num_steps",
        )


@rule
def evaluation_has_data(c: Config) -> Findings:
    if c.training.eval_interval == 0 or c.data.source == "synthetic":
        return
    if c.data.validation_fraction == 0 and not c.data.validation_paths:
        yield (
            "training.eval_interval",
            "there is nothing to evaluate on; raise data.validation_fraction, name "
            "data.validation_paths, or set this to 0",
        )


@rule
def tokenizer_file_has_an_end_of_document(c: Config) -> Findings:
    if c.data.tokenizer == "byte":
        if c.data.eod_token is not None:
            yield (
                "data.eod_token",
                "data.tokenizer: byte ends documents with an id of its own, 256; set this to null, "
                "or data.tokenizer to a tokenizer.json",
            )
    elif c.data.eod_token is None:
        yield (
            "data.eod_token",
            "a tokenizer.json does not say which token ends a document; name it, such as "
            "<|endoftext|>",
        )


@rule
def vocabulary_holds_bytes(c: Config) -> Findings:
    """How many ids a tokenizer.json has is known when it is read (`data/build.py`)."""
    has_text = c.data.source in ("text", "jsonl") or c.log.sample_tokens > 0
    if not has_text or c.data.tokenizer != "byte":
        return
    if c.model.vocab_size < BYTE_TOKENIZER_SIZE:
        yield (
            "model.vocab_size",
            f"must hold the {BYTE_TOKENIZER_SIZE} ids of the byte tokenizer; raise it to at least "
            f"{BYTE_TOKENIZER_SIZE} (a multiple of parallel.tp)",
        )
