"""Each case by each implementation and by peers, against what its bytes and products take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from mxjax.kernels.bench import peers
from mxjax.kernels.bench.cases import Case, Work
from mxjax.kernels.bench.timing import Effort, both, random_floats, seconds_per_call
from mxjax.kernels.implementation import ImplementationError, device_kind


@dataclass(frozen=True)
class Ceiling:
    """What a device reaches: bytes/s of its memory, FLOP/s of bf16 matrix products."""

    memory: float
    matmul: float


CEILINGS = {"NVIDIA H200": Ceiling(4.25e12, 790e12)}
"""Measured: a device copy, read and write; 8192^3 in bursts."""

FORWARD, BOTH = "forward", "forward + backward"


@dataclass(frozen=True)
class Result:
    """One time."""

    op: str
    case: str
    work: str
    """`FORWARD` or `BOTH`."""
    by: str
    """An implementation of ours, or a peer."""
    seconds: float
    bytes: int
    flops: int
    share_of_floor: float | None
    """Least time that the device allows / time; None: its ceilings are not known."""


def measure(cases: Iterable[Case], effort: Effort, with_peers: bool) -> Iterator[Result]:
    """Results as they come, those of one case together.

    An implementation that cannot run a case here has none.
    """
    for case in cases:
        for work, needed in ((FORWARD, case.forward), (BOTH, case.both)):
            if needed is None:
                continue
            for by, seconds in _times(case, work, effort, with_peers):
                yield Result(
                    case.op,
                    case.name,
                    work,
                    by,
                    seconds,
                    needed.bytes,
                    needed.flops,
                    share_of_floor(needed, seconds),
                )


def share_of_floor(work: Work, seconds: float) -> float | None:
    ceiling = CEILINGS.get(device_kind())
    if ceiling is None:
        return None
    return max(work.bytes / ceiling.memory, work.flops / ceiling.matmul) / seconds


def _times(case: Case, work: str, effort: Effort, with_peers: bool) -> Iterator[tuple[str, float]]:
    for implementation in case.implementations:
        try:
            seconds = time_of(case, work, effort, implementation=implementation)
        except ImplementationError:
            continue
        yield implementation, seconds
    if with_peers and case.peer is not None:
        yield from peers.times(case.peer, case.peer_sizes, work == BOTH, effort)


def time_of(case: Case, work: str, effort: Effort, **options: Any) -> float:
    """Seconds of one pass of a case; `options` are those of its op."""
    run: Callable[..., Any] = partial(case.run, **options)
    make = case.make or random_floats(case.arguments)
    if work == FORWARD:
        return seconds_per_call(run, make, effort)
    places = case.differentiable or tuple(range(len(case.arguments)))
    d_outs = random_floats(jax.eval_shape(run, *case.arguments))

    def with_d_outs(key):
        return d_outs(jax.random.fold_in(key, 1)), *make(key)

    return seconds_per_call(both(run, places), with_d_outs, effort)
