"""How long a traced computation takes at least on a device: a roofline over its operations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.extend import core


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches, measured: FLOP/s of bf16 matrix products, bytes/s of its memory, to
    another device of its host and to the host, one way."""

    matmul: float
    memory: float
    link: float
    host: float


H200 = Ceilings(matmul=680e12, memory=4.25e12, link=345e9, host=54e9)
"""One NVIDIA H200: 8192^3 sustained, a device copy, a permute over NVLink, pinned transfers."""

_MOVES = frozenset(["gather", "scatter", "scatter-add", "sort", "top_k", "cumsum"])
_COLLECTIVES = frozenset(["all_to_all", "all_gather", "reduce_scatter", "psum", "ppermute"])


def seconds_of(jaxpr: core.Jaxpr, ceilings: Ceilings) -> float:
    """Of its matrix products, and of what moves data about; elementwise work is taken to ride along
    with these. Loops of unknown length count once, and all links as those within a host."""
    total = 0.0
    for eqn, times in _operations(jaxpr, 1):
        moved = sum(_bytes(v) for v in (*eqn.invars, *eqn.outvars))
        if eqn.primitive.name == "dot_general":
            total += times * max(_flops(eqn) / ceilings.matmul, moved / ceilings.memory)
        elif eqn.primitive.name in _MOVES:
            total += times * moved / ceilings.memory
        elif eqn.primitive.name in _COLLECTIVES:
            total += times * moved / 2 / ceilings.link
    return total


def _operations(jaxpr: core.Jaxpr, times: int) -> Iterator[tuple[core.JaxprEqn, int]]:
    for eqn in jaxpr.eqns:
        inside = list(_bodies(eqn.params))
        if not inside:
            yield eqn, times
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for body in inside:
            yield from _operations(body, times * length)


def _bodies(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item


def _flops(eqn: core.JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    inner = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    return 2 * inner * math.prod(eqn.outvars[0].aval.shape)


def _bytes(var: Any) -> int:
    itemsize = getattr(var.aval.dtype, "itemsize", 0)
    return math.prod(var.aval.shape) * itemsize
