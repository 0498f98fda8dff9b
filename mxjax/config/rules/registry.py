"""What must hold between several fields of a configuration.

Each rule is one small generator: it yields the path of a field and a message that says what is
wrong with its value and the way out. All rules are run and all that they yield is reported, so a
rule may not rely on another one having passed. Axis sizes are 1 or more here.

What is refused either cannot work or would silently not do what it says. A setting that is only
idle (`sequence_parallel` with one tensor rank, say) passes, so that a file can be run with other
axis sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mxjax.config.schema import Config

type Findings = Iterator[tuple[str, str]]
type Rule = Callable[[Config], Findings]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Adds a rule to those that every configuration is checked against."""
    RULES.append(function)
    return function
