"""A state as arrays with names: what a checkpoint stores and compares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves of `tree` by path, such as ``params.dense_layers.attention.q``, in flattening order.

    Dictionary keys, attribute names and positions all become names: a checkpoint does not depend
    on the Python classes that held the arrays.

    Raises:
      ValueError: two leaves have the same name, as `{"a.b": x, "a": {"b": y}}`.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in leaves:
            raise ValueError(f"Two leaves of the state are both named {name}: rename one.")
        leaves[name] = leaf
    return leaves


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries out of dotted names; the form in which Orbax stores the state."""
    root: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return root


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line for each name in which two sets of arrays differ by presence, shape or dtype.

    Args:
      found: what the checkpoint has; values have `shape` and `dtype`.
      wanted: what is to be restored.
    """
    lines = []
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            lines.append(f"{name}: not in the checkpoint, expected {describe(wanted[name])}")
        elif name not in wanted:
            lines.append(f"{name}: not expected, the checkpoint has {describe(found[name])}")
        elif describe(found[name]) != describe(wanted[name]):
            lines.append(
                f"{name}: the checkpoint has {describe(found[name])},"
                f" expected {describe(wanted[name])}"
            )
    return lines


def describe(leaf: Any) -> str:
    """Shape and dtype, such as ``(8, 128) bfloat16``."""
    return f"{tuple(leaf.shape)} {np.dtype(leaf.dtype).name}"
