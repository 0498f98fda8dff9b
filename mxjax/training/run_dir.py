"""The folder of a run: one run at a time may use it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import jax

from mxjax.config import Config, to_yaml


class RunDirError(RuntimeError):
    """A run directory that cannot be used, or not at present."""


def claim(folder: Path) -> IO | None:
    """Create the run directory and lock it against a second run.

    Returns what holds the lock as long as it is open; None in all processes but the first.

    Raises:
      RunDirError: the folder cannot be written, or another run holds it.
    """
    if jax.process_index() != 0:
        return None
    with clear_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunDirError(
                f"run_dir: another run is using {folder}; wait for its end or choose another"
            ) from error
    return lock


def write_config(config: Config, folder: Path) -> None:
    """Keep the whole configuration beside what it leads to, as `config.yaml`.

    Raises:
      RunDirError: it cannot be written.
    """
    if jax.process_index() == 0:
        with clear_write_errors(folder):
            (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")


@contextmanager
def clear_write_errors(path: Path) -> Iterator[None]:
    """Turns what the system says about writing `path` into a `RunDirError` with the way out."""
    try:
        yield
    except OSError as error:
        raise RunDirError(
            f"run_dir: cannot write {path}: {error.strerror or error}. Make room or choose another "
            "`run_dir`, then run the same command again to resume"
        ) from error
