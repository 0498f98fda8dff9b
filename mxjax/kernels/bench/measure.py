"""Each case by each implementation and by peers, against what its bytes and products take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import jax

from mxjax.kernels.bench import peers
from mxjax.kernels.bench.cases import Case, Work
from mxjax.kernels.bench.timing import Effort, Timing, at_once, both, random_floats
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
    for _, of_op in groupby(cases, lambda case: case.op):
        wanted = [
            (case, work, implementation)
            for case in of_op
            for work in (FORWARD, BOTH)
            if needed(case, work)
            for implementation in case.implementations
        ]
        timings = at_once(
            [partial(timing_of, c, w, effort, implementation=i) for c, w, i in wanted]
        )
        rows = zip(wanted, timings, strict=True)
        for (case, work), of_case in groupby(rows, lambda row: row[0][:2]):
            for (_, _, by), timing in of_case:
                if isinstance(timing, ImplementationError):
                    continue
                if isinstance(timing, Exception):
                    raise timing
                yield _result(case, work, by, timing.seconds())
            if with_peers and case.peer is not None:
                least = least_seconds(needed(case, work))
                found = peers.times(case.peer, case.peer_sizes, work == BOTH, effort, least)
                for peer, seconds in found:
                    yield _result(case, work, peer, seconds)


def needed(case: Case, work: str) -> Work | None:
    return case.forward if work == FORWARD else case.both


def _result(case: Case, work: str, by: str, seconds: float) -> Result:
    least, amount = least_seconds(needed(case, work)), needed(case, work)
    share = None if least is None else least / seconds
    return Result(case.op, case.name, work, by, seconds, amount.bytes, amount.flops, share)


def least_seconds(work: Work) -> float | None:
    """What the device's ceilings allow; None: they are not known."""
    ceiling = CEILINGS.get(device_kind())
    if ceiling is None:
        return None
    return max(work.bytes / ceiling.memory, work.flops / ceiling.matmul)


def timing_of(case: Case, work: str, effort: Effort, **options: Any) -> Timing:
    """One pass of a case, compiled; `options` are those of its op."""
    run: Callable[..., Any] = partial(case.run, **options)
    make = case.make or random_floats(case.arguments)
    least = least_seconds(needed(case, work))
    if work == FORWARD:
        return Timing(run, make, effort, least)
    places = case.differentiable or tuple(range(len(case.arguments)))
    d_outs = random_floats(jax.eval_shape(run, *case.arguments))

    def with_d_outs(key):
        return d_outs(jax.random.fold_in(key, 1)), *make(key)

    return Timing(both(run, places), with_d_outs, effort, least)
