"""Text and JSONL files to an indexed dataset, with several processes."""

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np

from mxjax.data.errors import DataError
from mxjax.data.indexed import IndexedWriter, token_dtype
from mxjax.data.sources import FileFormat, read_records, text_of
from mxjax.data.store import encode
from mxjax.data.tokenizer import Tokenizer, load_tokenizer

_BATCH_BYTES = 2**20
_BATCHES_PER_WORKER = 4
"""Batches under way: enough to keep all busy, few enough to hold in memory."""

_Record = tuple[str, bytes]


class Encoding(NamedTuple):
    """How records become token ids."""

    file_format: FileFormat
    """``text`` or ``jsonl``."""
    text_key: str
    """jsonl: the field that holds the text."""
    tokenizer: str
    """`data.tokenizer`."""
    eod_token: str | None
    """`data.eod_token`."""
    append_eod: bool
    """End each document with the tokenizer's end-of-document id."""


def preprocess(
    files: Sequence[str],
    encoding: Encoding,
    prefix: str,
    *,
    num_workers: int = 1,
    overwrite: bool = False,
) -> tuple[int, int, np.dtype]:
    """Writes the documents of `files`, in order, to ``prefix.bin`` and ``prefix.idx``.

    Empty documents are skipped. The files do not depend on `num_workers`, and get their names when
    they are complete.

    Returns:
      Number of documents, number of tokens, dtype of the token ids.

    Raises:
      DataError: a file, the tokenizer or the output cannot be used; no file holds any text.
    """
    tokenizer = load_tokenizer(encoding.tokenizer, encoding.eod_token)
    dtype = token_dtype(tokenizer.vocab_size)
    batches = _batches(read_records(files, encoding.file_format))
    with IndexedWriter(prefix, dtype, overwrite=overwrite) as writer:
        if num_workers == 1:
            encoded = (_encode_batch(batch, encoding, tokenizer, dtype) for batch in batches)
            _write(encoded, writer)
        else:
            with ProcessPoolExecutor(
                num_workers,
                # A fork would inherit the threads of JAX and of the tokenizer in an unknown state.
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(encoding, dtype),
            ) as pool:
                _write(_in_order(pool, batches, num_workers * _BATCHES_PER_WORKER), writer)
        if writer.num_documents == 0:
            raise DataError(
                f"--input: the files hold no text at all ({len(files)} files, the first is "
                f"{files[0]}); name others"
            )
    return writer.num_documents, writer.num_tokens, dtype


def _batches(records: Iterable[_Record]) -> Iterator[list[_Record]]:
    batch, size = [], 0
    for record in records:
        batch.append(record)
        size += len(record[1])
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_batch(
    batch: list[_Record], encoding: Encoding, tokenizer: Tokenizer, dtype: np.dtype
) -> list[np.ndarray]:
    """Ids of each document that is not empty."""
    end = np.array([tokenizer.eod_id] if encoding.append_eod else [], dtype)
    documents = []
    for place, record in batch:
        text = text_of(record, place, encoding.file_format, encoding.text_key)
        ids = encode(place, text, tokenizer)
        if len(ids):
            documents.append(np.concatenate([ids.astype(dtype), end]))
    return documents


def _write(encoded: Iterable[list[np.ndarray]], writer: IndexedWriter) -> None:
    for documents in encoded:
        for document in documents:
            writer.add_document(document)


def _in_order(
    pool: Executor, batches: Iterable[list[_Record]], limit: int
) -> Iterator[list[np.ndarray]]:
    """Results in the order of `batches`, of which no more than `limit` are under way."""
    pending: deque[Future] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode_in_worker, batch))
            if len(pending) >= limit:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process ended; with too little memory, use fewer workers"
        ) from error
    finally:
        for future in pending:
            future.cancel()


_worker: tuple[Encoding, Tokenizer, np.dtype] | None = None


def _start_worker(encoding: Encoding, dtype: np.dtype) -> None:
    global _worker
    _worker = encoding, load_tokenizer(encoding.tokenizer, encoding.eod_token), dtype


def _encode_in_worker(batch: list[_Record]) -> list[np.ndarray]:
    encoding, tokenizer, dtype = _worker
    return _encode_batch(batch, encoding, tokenizer, dtype)
