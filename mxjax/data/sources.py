"""Documents from files: which files, and what is in them."""

import glob
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from tqdm import tqdm

from mxjax.data.errors import DataError

FileFormat = Literal["text", "jsonl", "indexed"]

_PYTHON_STDLIB = sysconfig.get_path("stdlib")
# The folder of the standard library also holds whatever else was installed with pip.
_NOT_STDLIB = tuple(f"{_PYTHON_STDLIB}/{name}" for name in ("site-packages", "dist-packages"))
_FOLDER_CONTENT = {"text": "*", "jsonl": "*.jsonl", "indexed": "*.idx"}


def find_files(
    patterns: Iterable[str], exclude: Sequence[str], file_format: FileFormat, key: str
) -> list[str]:
    """Absolute paths of the files that `patterns` name, sorted, each file once.

    Args:
      patterns: files, folders (searched in depth; for jsonl only ``*.jsonl``, for indexed only
        ``*.idx``) or globs of files. For indexed what is found is the ``.idx`` file, and a pattern
        may leave the suffix out or name the ``.bin`` file. ``{python_stdlib}`` and a leading ``~``
        are replaced. As in a shell, ``*`` does not match hidden files.
      exclude: globs of files or folders to leave out. A relative one matches in any folder;
        ``./`` in front ties it to the working directory.
      file_format: what the files hold.
      key: configuration key of `patterns`, for messages.

    Raises:
      DataError: a pattern matches no file, or none that is not excluded.
    """
    found = set()
    for pattern in patterns:
        not_meant = _NOT_STDLIB if "{python_stdlib}" in pattern else ()
        excluded = _excluder([*exclude, *not_meant])
        matched = _match(_expand(pattern), file_format)
        kept = {path for path in matched if not excluded(path)}
        if not matched:
            where = "" if os.path.isabs(pattern) else f" (seen from {os.getcwd()})"
            what = ".idx file" if file_format == "indexed" else "file"
            raise DataError(
                f"{key}: no {what} matches {pattern!r}{where}; give existing files, folders or "
                "globs (`**` for folders in depth)"
            )
        if not kept:
            raise DataError(
                f"{key}: all {len(matched)} files that match {pattern!r} are left out by "
                "data.exclude; loosen data.exclude or remove this path"
            )
        found |= kept
    # Two names of one file (symbolic links) are one document; the first name stands.
    by_file = {os.path.realpath(path): path for path in sorted(found, reverse=True)}
    return sorted(by_file.values())


def _expand(pattern: str) -> str:
    return os.path.expanduser(pattern.replace("{python_stdlib}", _PYTHON_STDLIB))


def strip_suffix(path: str) -> str:
    """The prefix of an indexed dataset that is named by its prefix or by one of its files."""
    return path.removesuffix(".idx").removesuffix(".bin")


def _match(pattern: str, file_format: FileFormat) -> set[str]:
    if file_format == "indexed":
        index = strip_suffix(pattern) + ".idx"
        pattern = index if os.path.isfile(index) or not os.path.isdir(pattern) else pattern
    if os.path.isfile(pattern):  # before globbing, for names with brackets
        return {os.path.abspath(pattern)}
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "**", _FOLDER_CONTENT[file_format])
    return {os.path.abspath(p) for p in glob.iglob(pattern, recursive=True) if os.path.isfile(p)}


def _excluder(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether an absolute path, or a folder above it, matches one of some globs."""
    regexes = []
    for pattern in map(_expand, patterns):
        if pattern.startswith(("./", "../")):
            pattern = os.path.abspath(pattern)
        elif not os.path.isabs(pattern):
            pattern = "**/" + pattern
        regexes.append(re.compile(_glob_regex(pattern.rstrip("/")) + "(?:/.*)?", re.DOTALL))
    return lambda path: any(regex.fullmatch(path) for regex in regexes)


def _glob_regex(pattern: str) -> str:
    """A glob as a regular expression; from Python 3.13 on, `glob.translate` does this."""
    wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}

    def translate(token: str) -> str:
        if token in wildcards:
            return wildcards[token]
        if len(token) > 1:  # a set of characters
            negated = token[1] == "!"
            characters = re.sub(r"([\\\[])", r"\\\1", token[1 + negated : -1])
            return f"[{'^' * negated}{characters}]"
        return re.escape(token)

    return "".join(map(translate, re.findall(r"\*\*/|\*\*|\[!?[^]!][^]]*\]|.", pattern, re.DOTALL)))


def read_documents(
    files: Sequence[str], file_format: FileFormat, text_key: str
) -> Iterator[tuple[str, str | bytes]]:
    """Yields (place, text) of each document of text or jsonl files, in order.

    The place is for messages: ``path`` or ``path:line``. Reading shows a progress bar if it takes
    long and stderr is a terminal.

    Raises:
      DataError: a file cannot be read; a line is not JSON, not an object, or has no string under
        `text_key`.
    """
    for place, record in read_records(files, file_format):
        yield place, text_of(record, place, file_format, text_key)


def read_records(files: Sequence[str], file_format: FileFormat) -> Iterator[tuple[str, bytes]]:
    """Yields (place, bytes) of each document as it stands: a whole file, or one line of JSON."""
    try:
        total = sum(os.path.getsize(path) for path in files)
        with tqdm(
            total=total, desc="reading data", unit="B", unit_scale=True, delay=2, disable=None
        ) as bar:
            for path in files:
                with open(path, "rb") as file:
                    if file_format == "text":
                        data = file.read()
                        bar.update(len(data))
                        yield path, data
                        continue
                    for number, line in enumerate(file, start=1):
                        bar.update(len(line))
                        if not line.isspace():
                            yield f"{path}:{number}", line
    except OSError as error:
        place = error.filename or path  # a failing read, unlike a failing open, names no file
        raise DataError(
            f"{place}: cannot be read ({error.strerror}); mend the file or add it to data.exclude"
        ) from error


def text_of(record: bytes, place: str, file_format: FileFormat, text_key: str) -> str | bytes:
    """The text of a record of `read_records`."""
    if file_format == "text":
        return record
    try:
        fields = json.loads(record.strip())
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise DataError(f"{place}: not a line of JSON: {error}") from error
    text = _field(fields, text_key, place)
    if not isinstance(text, str):
        raise DataError(
            f"{place}: {text_key!r} holds {type(text).__name__}, not a string; set data.text_key "
            "to the key that holds the text"
        )
    return text


def _field(record: object, text_key: str, place: str) -> object:
    """``record["a"]["b"]`` for the key ``a.b``, unless a field is called ``a.b`` itself."""
    keys = text_key.split(".")
    if isinstance(record, dict) and text_key in record:
        keys = [text_key]
    for depth, key in enumerate(keys):
        inside = f" in {'.'.join(keys[:depth])!r}" if depth else ""
        if not isinstance(record, dict):
            raise DataError(
                f"{place}: expected a JSON object{inside}, found {type(record).__name__}"
            )
        if key not in record:
            present = ", ".join(map(repr, record)) or "none"
            raise DataError(
                f"{place}: no key {key!r}{inside}; keys present: {present}; set data.text_key to "
                "the one that holds the text"
            )
        record = record[key]
    return record
