"""``python -m mxjax.data``: text into an indexed dataset, and a look into one."""

import argparse
import signal
import sys

import numpy as np

from mxjax.data.errors import DataError
from mxjax.data.indexed import open_indexed
from mxjax.data.preprocess import Encoding, preprocess
from mxjax.data.sources import FileFormat, find_files, strip_suffix
from mxjax.data.tokenizer import load_tokenizer

_OPTIONS = {
    "data.paths": "PREFIX",
    "data.exclude": "--exclude",
    "data.text_key": "--text-key",
    "data.eod_token": "--eod-token",
    "data.tokenizer=byte": "--tokenizer byte",
    "data.tokenizer": "--tokenizer",
}
"""What the configuration keys of messages are called on this command line."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0, 2 if the data cannot be used, 130 or 143 after a signal."""
    options = _parser().parse_args(arguments)
    # A scheduler's signal must end worker processes and remove unfinished files, as an error does.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        options.run(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except DataError as error:
        message = str(error)
        for key, option in _OPTIONS.items():
            message = message.replace(key, option)
    except OSError as error:  # of the output; that of the input is a DataError
        message = f"{error.filename or options.output}: cannot be written ({error.strerror})"
    else:
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(message, file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mxjax.data", description=__doc__)
    commands = parser.add_subparsers(required=True)

    build = commands.add_parser("build", help="tokenise text or JSONL files into PREFIX.bin/.idx")
    build.set_defaults(run=_build)
    build.add_argument("--input", nargs="+", required=True, help="files, folders or globs")
    build.add_argument("--exclude", nargs="+", default=[], help="files or folders to leave out")
    build.add_argument("--output", required=True, metavar="PREFIX")
    build.add_argument(
        "--source",
        choices=["text", "jsonl"],
        help="a document is a whole file or a line of JSON; by default jsonl for *.jsonl files",
    )
    build.add_argument("--text-key", default="text", help="jsonl: field of the text, such as a.b")
    build.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the end-of-document id",
    )
    build.add_argument("--workers", type=int, default=1, help="processes that tokenise")
    build.add_argument("--overwrite", action="store_true", help="replace PREFIX.bin and PREFIX.idx")

    inspect = commands.add_parser("inspect", help="show what PREFIX.bin/.idx hold")
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("prefix", metavar="PREFIX")
    inspect.add_argument("--tokens", type=int, default=32, help="tokens to show")
    for command, default in ((build, "byte"), (inspect, None)):
        command.add_argument(
            "--tokenizer", default=default, help="byte, or the path of a tokenizer.json"
        )
        command.add_argument("--eod-token", help="tokenizer.json: token that ends a document")
    return parser


def _build(options: argparse.Namespace) -> None:
    if options.workers < 1:
        raise DataError(f"--workers: {options.workers}; must be at least 1")
    file_format = options.source or _format_of(options.input)
    files = find_files(options.input, options.exclude, file_format, "--input")
    prefix = strip_suffix(options.output)
    encoding = Encoding(
        file_format, options.text_key, options.tokenizer, options.eod_token, options.append_eod
    )
    documents, tokens, dtype = preprocess(
        files, encoding, prefix, num_workers=options.workers, overwrite=options.overwrite
    )
    print(f"{prefix}.bin, {prefix}.idx: {documents:,} documents, {tokens:,} tokens, {dtype}")


def _format_of(patterns: list[str]) -> FileFormat:
    jsonl = {pattern.endswith(".jsonl") for pattern in patterns}
    if len(jsonl) > 1:
        raise DataError("--input: some end in .jsonl and some do not; say which with --source")
    return "jsonl" if jsonl == {True} else "text"


def _inspect(options: argparse.Namespace) -> None:
    dataset = open_indexed(strip_suffix(options.prefix))
    tokenizer = None
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer, options.eod_token)
    _, lengths = dataset.document_ranges()
    first = dataset.tokens[: options.tokens]
    shown = {
        "dtype": dataset.tokens.dtype,
        "documents": f"{dataset.num_documents:,}",
        "sequences": f"{len(dataset.sequence_lengths):,}",
        "tokens": f"{int(lengths.sum()):,}",
        "multimodal": "no" if dataset.sequence_modes is None else "yes",
    }
    if len(lengths):
        shown["document length"] = f"{lengths.min():,} to {lengths.max():,}, median "
        shown["document length"] += f"{int(np.median(lengths)):,}"
    shown["first tokens"] = " ".join(map(str, first.tolist()))
    if tokenizer is not None and dataset.tokens.dtype.kind != "f":
        shown["first text"] = repr(tokenizer.decode([i for i in first.tolist() if i >= 0]))
    for name, value in shown.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    sys.exit(main())
