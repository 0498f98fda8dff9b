"""Files and folders that appear under their name only when they are complete."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

SUFFIX = ".incomplete"
"""What the temporary name of something half written ends with."""


@contextlib.contextmanager
def new_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write; it gets its name when the block ends, and is removed if the block fails.

    Raises:
      FileExistsError: there is one of that name.
    """
    path = Path(path)
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill, under a temporary name; as :func:`new_file`, and so are its errors.

    What a killed process left half written under the temporary name is removed first.
    """
    path = Path(path)
    temporary = _temporary(path)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _sync_folder(temporary)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(path.parent)


def _temporary(path: Path) -> Path:
    if path.exists():
        raise FileExistsError(f"{path} exists. Move it away, or choose another name.")
    return path.with_name(f".{path.name}{SUFFIX}")


def _sync_folder(path: Path) -> None:
    # A rename is safe from a power cut only when the folder is on disk too.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
