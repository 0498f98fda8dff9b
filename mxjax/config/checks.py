"""Judging a configuration as a whole: its axes against the devices, its fields by ``rules/``."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import reduce
from math import prod

from mxjax.config.rules import RULES
from mxjax.config.schema import Config, ParallelConfig

AXES = ("pp", "dp", "ep", "cp", "sp", "tp")
_LONGEST_SHOWN_VALUE = 80


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration.

    Attributes:
      path: YAML path of the field, such as ``moe.router_topk``.
      value: what stands there.
      message: what is wrong and the way out.
      origin: where the value came from, such as ``configs/x.yaml:12``; empty: unknown.
    """

    path: str
    value: object
    message: str
    origin: str = ""

    def __str__(self) -> str:
        value = json.dumps(self.value, ensure_ascii=False, default=asdict)
        if len(value) > _LONGEST_SHOWN_VALUE:
            value = value[:_LONGEST_SHOWN_VALUE] + "..."
        origin = f" ({self.origin})" if self.origin else ""
        return f"{self.path}: {value} -- {self.message}{origin}"


def resolve_axes(
    parallel: ParallelConfig, num_devices: int | None
) -> tuple[ParallelConfig, list[Problem]]:
    """Gives the axis of size -1 the devices that the other axes leave.

    Args:
      parallel: axis sizes, of which one may be -1.
      num_devices: devices of the whole run; None: not known, so that -1 stays.

    Returns:
      The sizes, unchanged if there are problems, and the problems.
    """
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
    problems = [
        Problem(
            f"parallel.{axis}", 0, "an axis has at least 1 rank; set it to 1, or to -1 for all left"
        )
        for axis in AXES
        if sizes[axis] == 0
    ]
    free = [axis for axis in AXES if sizes[axis] == -1]
    problems += [
        Problem(
            f"parallel.{axis}",
            -1,
            f"only one axis may be -1 and parallel.{free[0]} is; give one of the two a size",
        )
        for axis in free[1:]
    ]
    if problems or num_devices is None:
        return parallel, problems

    used = {f"parallel.{axis}": size for axis, size in sizes.items() if size > 1}
    product = prod(used.values())
    devices = "parallel.cpu_devices"
    if not parallel.cpu_devices:
        devices = f"the number of devices (parallel.cpu_devices={product} gives virtual ones)"
    if free and num_devices % product:
        message = (
            f"the other axes take {product} devices ({' * '.join(used)}), which does not divide "
            f"the {num_devices} devices; change those or {devices}"
        )
        return parallel, [Problem(f"parallel.{free[0]}", -1, message)]
    if not free and product != num_devices:
        message = (
            f"the axes multiply to {product}, but the run has "
            f"{num_devices} {'device' if num_devices == 1 else 'devices'}; set one "
            f"axis to -1 to use all devices, or change the sizes or {devices}"
        )
        return parallel, [Problem("parallel", sizes, message)]
    if free:
        parallel = replace(parallel, **{free[0]: num_devices // product})
    return parallel, []


def cross_problems(config: Config, bad_fields: Collection[str] = ()) -> list[Problem]:
    """Runs every rule.

    Args:
      config: the configuration. An axis of unknown size (-1) counts as 1, which breaks no rule.
      bad_fields: paths of fields or sections that hold a stand-in for a value that was refused.
        What a rule says after reading one of them is not reported: it may be untrue.
    """
    sizes = {axis: max(1, getattr(config.parallel, axis)) for axis in AXES}
    config = replace(config, parallel=replace(config.parallel, **sizes))
    problems = []
    for rule in RULES:
        view = _RecordingView(config)
        for path, message in rule(view):
            if not view.has_read(bad_fields):
                problems.append(Problem(path, reduce(getattr, path.split("."), config), message))
    return problems


class _RecordingView:
    """Stands for a component and records the paths of the fields that are read through it."""

    def __init__(self, component: object, path: str = "", read: set[str] | None = None):
        self._component = component
        self._path = path
        self._read = set() if read is None else read

    def __getattr__(self, name: str) -> object:
        value = getattr(self._component, name)
        path = f"{self._path}.{name}".lstrip(".")
        if is_dataclass(value):
            return _RecordingView(value, path, self._read)
        self._read.add(path)
        return value

    def has_read(self, paths: Collection[str]) -> bool:
        return any(f"{read}.".startswith(f"{path}.") for read in self._read for path in paths)
