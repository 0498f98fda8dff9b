"""How long one call of an op takes on the device.

A program makes n calls, one after the other. It is sent off once, and then twice in a row, and the
time of a call is the difference, divided by n: what starts a program and waits for it drops out,
and the queue of the device never runs dry. Calls go round several sets of arguments, which together
are larger than the L2 cache, so that no call finds its inputs there. Medians over repeats.

Programs are compiled ahead, several at once, and timed alone: see `at_once`.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

FEWEST_CALLS, MOST_CALLS = 4, 64


@dataclass(frozen=True)
class Effort:
    """How thoroughly to measure."""

    seconds: float = 4e-3
    """What n calls would take at the device's ceilings."""
    repeats: int = 15
    cache_bytes: int = 200 * 2**20
    """Sets of arguments are at least so large together: four times an H200's L2."""

    def calls(self, least: float | None) -> int:
        """n, for calls that take at least so many seconds; None: not known."""
        if least is None:
            return FEWEST_CALLS
        return min(max(math.ceil(self.seconds / least), FEWEST_CALLS), MOST_CALLS)

    def number_of_sets(self, size: int) -> int:
        """How many sets of arguments of so many bytes each the calls go round."""
        return max(1, -(-self.cache_bytes // size)) + (self.cache_bytes > 0)


QUICK = Effort(repeats=5, cache_bytes=0)


def at_once[T](tasks: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """What each task returns or raises; they run in as many threads as there are CPUs.

    For compiling, which may use the device to try things out. Nothing is to be timed meanwhile.
    """

    def run(task: Callable[[], T]) -> T | Exception:
        try:
            return task()
        except Exception as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(run, tasks))


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


class Timing:
    """A compiled program of calls of `function` with what `make` makes of random keys.

    Args:
      least: seconds that a call takes at least; None: not known.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        make: Callable[[jax.Array], tuple],
        effort: Effort,
        least: float | None,
    ):
        self._make, self._repeats, self._calls = make, effort.repeats, effort.calls(least)
        arguments = jax.eval_shape(make, _key(0))
        size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arguments))
        self._number = effort.number_of_sets(size)
        program = jax.jit(chain(function, self._calls))
        self._program = program.lower([arguments] * self._number).compile()

    def seconds(self) -> float:
        """Seconds of one call."""
        sets = [jax.block_until_ready(self._make(_key(i))) for i in range(self._number)]
        for _ in range(2):
            jax.block_until_ready(self._program(sets))
        once, twice = [], []
        # In turn, so that both see the same state of the machine.
        for _ in range(self._repeats):
            for times, seen in ((1, once), (2, twice)):
                start = time.perf_counter()
                results = [self._program(sets) for _ in range(times)]
                jax.block_until_ready(results)
                seen.append(time.perf_counter() - start)
                del results
        return (statistics.median(twice) - statistics.median(once)) / self._calls


def chain(function: Callable[..., Any], calls: int) -> Callable[[list], list]:
    """Sets of arguments -> results of that many calls, one after the other.

    All results are returned: XLA leaves out, or computes in part, what nobody takes.
    """
    # Lowered once, not once a call.
    call = jax.jit(function)

    def program(sets):
        results = []
        for i in range(calls):
            given = sets[i % len(sets)]
            if results:
                # Arguments that are there only after the call before: nothing is fused over it.
                given, results[-1] = lax.optimization_barrier((given, results[-1]))
            results.append(call(*given))
        return results

    return program


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
