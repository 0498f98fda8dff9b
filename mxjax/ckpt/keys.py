"""Reading another program's configuration, with an account of what became of each key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mxjax.ckpt.errors import CheckpointFormatError


class Keys:
    """Values by key, with a note of which were read.

    Attributes:
      problems: what asks for something that there is not here, ``key: value``.
      assumed: keys that are absent or have no counterpart, with what was taken instead.

    Args:
      source: what the keys are of, for messages.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source
        self._read: set[str] = set()
        self.problems: list[str] = []
        self.assumed: dict[str, Any] = {}

    def get(self, name: str, default: Any = None) -> Any:
        """Its value; `default` if it is None or not recorded."""
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def assume(self, name: str, default: Any) -> Any:
        """As `get`, for what a checkpoint should say: the user is told of the default."""
        if name not in self._values:
            self.assumed[name] = default
        return self.get(name, default)

    def need(self, name: str) -> Any:
        """Its value, which must be there."""
        if self.get(name) is None:
            raise CheckpointFormatError(f"{self._source} has no {name}.")
        return self.get(name)

    def known(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Our keys with the values of theirs, as far as these are recorded."""
        return {
            ours: value for ours, name in names.items() if (value := self.get(name)) is not None
        }

    def allow(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Notes a problem for each key that has another value than those that mean what is
        computed here."""
        for name, values in allowed.items():
            self._read.add(name)
            if (value := self._values.get(name)) not in values:
                self.problems.append(f"{name}: {value!r}")

    def refuse(self) -> None:
        """Raises if there are problems."""
        if self.problems:
            raise CheckpointFormatError(
                "The model cannot be imported, mxjax has nothing that computes the same for: "
                + "; ".join(self.problems)
            )

    def rest(self, is_of_the_run: Callable[[str], Any]) -> dict[str, Any]:
        """What was not read, is set to something, and is not of the run alone."""
        return {
            name: value
            for name, value in sorted(self._values.items())
            if name not in self._read
            and value not in (None, False, [], {}, "")
            and not is_of_the_run(name)
        }
