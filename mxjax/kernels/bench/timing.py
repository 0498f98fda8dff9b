"""How long one call of an op takes on the device.

A program makes the call n times, one after the other, and the time of a call is the difference
between the programs with 2n and n calls, divided by n: what starts a program and waits for it drops
out, and the queue of the device never runs dry. Calls go round several sets of arguments, which
together are larger than the L2 cache, so that no call finds its inputs there. Medians over repeats.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Effort:
    """How thoroughly to measure."""

    calls: int = 16
    """n."""
    repeats: int = 15
    cache_bytes: int = 200 * 2**20
    """Sets of arguments are at least so large together: four times an H200's L2."""


QUICK = Effort(calls=4, repeats=5, cache_bytes=0)


def both(run: Callable[..., Any], differentiable: tuple[int, ...]) -> Callable[..., Any]:
    """(output gradients, *arguments) -> outputs and gradients of the arguments at these places.

    The output gradients are there only after the outputs, as in training.
    """

    def outputs_and_gradients(d_outs, *arguments):
        def of_some(*some):
            given = list(arguments)
            for place, value in zip(differentiable, some, strict=True):
                given[place] = value
            return run(*given)

        outs, pullback = jax.vjp(of_some, *(arguments[place] for place in differentiable))
        outs, d_outs = lax.optimization_barrier((outs, d_outs))
        return outs, pullback(d_outs)

    return outputs_and_gradients


def seconds_per_call(
    function: Callable[..., Any], make: Callable[[jax.Array], tuple], effort: Effort
) -> float:
    """Seconds of one call of `function` with what `make` makes of random keys."""
    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(jax.eval_shape(make, _key(0))))
    number = max(1, -(-effort.cache_bytes // size)) + (effort.cache_bytes > 0)
    sets = [jax.block_until_ready(make(_key(i))) for i in range(number)]

    programs = [
        jax.jit(chain(function, calls)).lower(sets).compile()
        for calls in (effort.calls, 2 * effort.calls)
    ]
    short, long = _medians(programs, sets, effort.repeats)
    return (long - short) / effort.calls


def chain(function: Callable[..., Any], calls: int) -> Callable[[list], list]:
    """Sets of arguments -> results of that many calls, one after the other.

    All results are returned: XLA leaves out, or computes in part, what nobody takes.
    """

    def program(sets):
        results = []
        for i in range(calls):
            given = sets[i % len(sets)]
            if results:
                # Arguments that are there only after the call before: nothing is fused over it.
                given, results[-1] = lax.optimization_barrier((given, results[-1]))
            results.append(function(*given))
        return results

    return program


def _medians(programs: list, sets: list, repeats: int) -> list[float]:
    """In turn, so that all see the same state of the machine."""
    for program in programs:
        jax.block_until_ready(program(sets))
    times: list[list[float]] = [[] for _ in programs]
    for _ in range(repeats):
        for program, seen in zip(programs, times, strict=True):
            start = time.perf_counter()
            results = jax.block_until_ready(program(sets))
            seen.append(time.perf_counter() - start)
            del results
    return [statistics.median(seen) for seen in times]


def _key(number: int) -> jax.Array:
    return jax.random.key(number)


def random_floats(types: Any) -> Callable[[jax.Array], Any]:
    """Random key -> normally distributed values of these types."""

    def make(key: jax.Array) -> Any:
        leaves, structure = jax.tree.flatten(types)
        values = [
            jax.random.normal(k, leaf.shape, jnp.float32).astype(leaf.dtype)
            for leaf, k in zip(leaves, jax.random.split(key, len(leaves)), strict=True)
        ]
        return jax.tree.unflatten(structure, values)

    return make
