"""A context variable that has another value for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


@contextmanager
def scoped[T](variable: ContextVar[T], value: T) -> Iterator[None]:
    """The variable has this value inside, and afterwards what it had before."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
