"""``python -m mxjax.data``: what it writes is what training on the same files would read."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from mxjax.data import preprocess
from mxjax.data.__main__ import main
from mxjax.data.indexed import IndexedWriter, open_indexed, read_indexed
from mxjax.data.sources import read_documents
from mxjax.data.store import tokenize
from mxjax.data.tokenizer import load_tokenizer

EOD = "<|endoftext|>"


@pytest.fixture
def jsonl(tmp_path):
    """Two files, with an empty text and texts of very different length."""
    texts = ["the quick brown fox", "", "jumps " * 300, "über den", *map(str, range(200)), "dog"]
    lines = [json.dumps({"id": i, "doc": {"body": text}}) for i, text in enumerate(texts)]
    for name, part in (("a", lines[:50]), ("b", lines[50:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part))
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


def build(prefix, *options, code=0):
    assert main(["build", "--output", str(prefix), *map(str, options)]) == code
    return prefix


def documents_of(prefix):
    store = read_indexed([str(prefix)], 10**6)
    ranges = zip(store.starts, store.lengths, strict=True)
    return [store.tokens[start : start + length].tolist() for start, length in ranges]


def files_of(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


@pytest.mark.parametrize("append_eod", [True, False])
def test_the_dataset_holds_the_documents_of_the_files(jsonl, tokenizer_file, tmp_path, append_eod):
    tokenizer = load_tokenizer(tokenizer_file, EOD)
    build(
        tmp_path / "out" / "x",
        *("--input", *jsonl, "--text-key", "doc.body"),
        *("--tokenizer", tokenizer_file, "--eod-token", EOD),
        *([] if append_eod else ["--no-append-eod"]),
    )
    store = tokenize(read_documents(jsonl, "jsonl", "doc.body"), tokenizer)
    expected = [
        store.tokens[start : start + length - (not append_eod)].tolist()
        for start, length in zip(store.starts, store.lengths, strict=True)
    ]
    assert documents_of(tmp_path / "out" / "x") == expected
    assert len(expected) == 204
    assert {document[-1] == tokenizer.eod_id for document in expected} == {append_eod}


def test_several_processes_write_the_same_files(jsonl, tokenizer_file, tmp_path, monkeypatch):
    monkeypatch.setattr(preprocess, "_BATCH_BYTES", 500)  # many batches
    options = ("--input", *jsonl, "--text-key", "doc.body")
    options += ("--tokenizer", tokenizer_file, "--eod-token", EOD)
    one, two = (build(tmp_path / f"x{n}", *options, "--workers", n) for n in (1, 2))
    assert files_of(one) == files_of(two)


def test_text_files_are_documents_of_bytes(tmp_path, capsys):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name * 3)
    (tmp_path / "c.txt").write_text("")
    prefix = build(tmp_path / "x.bin", "--input", tmp_path, "--exclude", "c.txt")
    assert documents_of(tmp_path / "x") == [[97, 97, 97, 256], [98, 98, 98, 256]]
    assert f"{prefix.with_suffix('')}.bin" in (out := capsys.readouterr().out)
    assert "2 documents, 8 tokens, uint16" in out


def test_a_large_vocabulary_takes_wider_tokens(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("ab")
    monkeypatch.setattr("mxjax.data.tokenizer.ByteTokenizer.vocab_size", 65500)
    build(tmp_path / "x", "--input", tmp_path / "a.txt")
    assert open_indexed(str(tmp_path / "x")).tokens.dtype == np.int32


def test_an_existing_dataset_is_replaced_only_with_overwrite(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.txt").write_text("c")
    build(tmp_path / "x", "--input", tmp_path / "a.txt")
    build(tmp_path / "x", "--input", tmp_path / "b.txt", code=2)
    assert "x.idx: exists already" in capsys.readouterr().err
    assert documents_of(tmp_path / "x") == [[97, 98, 256]]
    build(tmp_path / "x", "--input", tmp_path / "b.txt", "--overwrite")
    assert documents_of(tmp_path / "x") == [[99, 256]]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_and_nothing_is_left_behind(tmp_path, capsys, workers):
    (tmp_path / "in.jsonl").write_text('{"text": "good"}\n{"body": "x"}\n')
    options = ("--input", tmp_path / "in.jsonl", "--workers", workers)
    build(tmp_path / "out" / "x", *options, code=2)
    message = f"{tmp_path}/in.jsonl:2: no key 'text'; keys present: 'body'; set --text-key"
    assert capsys.readouterr().err.startswith(message)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--input", "missing.txt"], "--input: no file matches 'missing.txt'"),
        (["--input", "a.txt", "x.jsonl"], "--input: some end in .jsonl"),
        (["--input", "a.txt", "--tokenizer", "t.json"], "--eod-token: name the token of t.json"),
        (["--input", "a.txt", "--tokenizer", "t.json", "--eod-token", "x"], "--tokenizer: no file"),
        (["--input", "a.txt", "--workers", "0"], "--workers: 0; must be at least 1"),
        (
            ["--input", "empty.txt"],
            "--input: the files hold no text at all (1 files, the first is ",
        ),
    ],
)
def test_what_cannot_be_built_is_said(tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    for name, text in (("a.txt", "a"), ("x.jsonl", "{}"), ("empty.txt", "")):
        (tmp_path / name).write_text(text)
    build("out", *options, code=2)
    assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_nothing_behind(tmp_path, monkeypatch, number, code):
    (tmp_path / "a.txt").write_text("text")
    add_document = IndexedWriter.add_document

    def add_and_signal(self, *sequences):
        add_document(self, *sequences)
        if number == signal.SIGINT:  # a background process may have it ignored
            raise KeyboardInterrupt
        os.kill(os.getpid(), number)

    monkeypatch.setattr(IndexedWriter, "add_document", add_and_signal)
    command = ["build", "--output", str(tmp_path / "x"), "--input", str(tmp_path / "a.txt")]
    try:
        ended = main(command)
    except SystemExit as stopped:
        ended = stopped.code
    assert ended == code
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_an_output_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a")
    build(tmp_path / "a.txt" / "x", "--input", tmp_path / "a.txt", code=2)
    assert "a.txt: cannot be written (" in capsys.readouterr().err


def test_inspect_shows_what_is_there(tmp_path, capsys):
    for name, text in (("a", "hello"), ("b", "worlds!"), ("c", "x")):
        (tmp_path / f"{name}.txt").write_text(text)
    build(tmp_path / "x", "--input", *tmp_path.glob("*.txt"))
    capsys.readouterr()
    assert main(["inspect", f"{tmp_path}/x", "--tokenizer", "byte", "--tokens", "8"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "dtype: uint16",
        "documents: 3",
        "sequences: 3",
        "tokens: 16",
        "multimodal: no",
        "document length: 2 to 8, median 6",
        "first tokens: 104 101 108 108 111 256 119 111",
        "first text: 'hellowo'",
    ]


def test_inspect_names_what_is_missing(tmp_path, capsys):
    assert main(["inspect", f"{tmp_path}/x"]) == 2
    assert f"{tmp_path}/x.idx: no such file" in capsys.readouterr().err
