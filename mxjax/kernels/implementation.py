"""Which implementation of an op runs, and what all Mosaic GPU kernels need to know.

Every op has a plain-JAX reference, which is its contract and its `xla` implementation, and may have
kernels beside it. Who calls an op may name one:

    rms_norm(x, scale, epsilon, implementation="mosaic")

A named implementation that cannot run this call raises `ImplementationError`. With None the
`kernels:` section of the configuration decides, if the caller is inside `selected`; and where that
says `auto` (or there is none) the tuning table of the device kind, a file of `tuning/`. A shape
class without an entry there runs as the nearest one that has one, an op without entries `xla`.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import get_abstract_mesh

from mxjax.config.schema import KernelsConfig
from mxjax.scoped import scoped

Implementation = Literal["xla", "mosaic", "triton"]

TUNING_FOLDER = Path(__file__).with_name("tuning")


class ImplementationError(ValueError):
    """An implementation was named that does not exist or cannot run this call."""


@dataclass(frozen=True)
class Choice:
    """What runs one call of an op."""

    implementation: Implementation
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def blocks(self) -> dict[str, int]:
        """Measured block sizes of its kernel: arguments of the kernel, which has defaults."""
        return dict(self.sizes)

    def mosaic[B](self, given: B | None, kind: type[B]) -> B | None:
        """Block sizes that the Mosaic kernel runs with: those of the caller, as measured, or the
        defaults of `kind`; None: another implementation runs."""
        if self.implementation != "mosaic":
            return None
        return given or kind(**self.blocks)

    def kernel[B](self, given: B | None, kind: type[B]) -> B | Literal["triton"] | None:
        """As `mosaic`, of an op that has Triton kernels too."""
        return "triton" if self.implementation == "triton" else self.mosaic(given, kind)


_AUTO = KernelsConfig()

plans: ContextVar[Literal["no", "shapes", "program"]] = ContextVar("plans", default="no")
"""What is traced is for a plan of a GPU, and never run; see `attention.py`."""

_selection: ContextVar[KernelsConfig] = ContextVar("selection", default=_AUTO)
_interpreted: ContextVar[plgpu.InterpretGPUParams | None] = ContextVar("interpreted", default=None)


def selected(kernels: KernelsConfig) -> AbstractContextManager[None]:
    """What is traced inside chooses its implementations as `kernels` says.

    To be entered inside of the traced function, so that whoever traces it gets the same program.
    """
    return scoped(_selection, kernels)


def with_kernels(method: Callable) -> Callable:
    """Let a method be traced inside `selected(self.kernels)`."""

    @functools.wraps(method)
    def traced(self, *args, **kwargs):
        with selected(self.kernels):
            return method(self, *args, **kwargs)

    return traced


def choose(
    op: str,
    implementation: Implementation | None,
    *,
    shape_class: str,
    obstacles: Mapping[str, str | None],
) -> Choice:
    """The implementation that runs a call of `op`.

    Args:
      implementation: the one that the caller named, or None.
      shape_class: what the tuning table tells apart; see `shape_class`.
      obstacles: the op's implementations besides `xla`, each with the reason why it cannot run this
        call (a clause such as "the width 37 is no multiple of 8"), None: it can.

    Raises:
      ImplementationError: a named implementation cannot run.
    """
    named = implementation or _selected_for(op)
    entry = _measured(op, shape_class)
    if named is None:
        tuned = entry.get("implementation", "xla")
        # More shapes than were measured: some may be none that the kernel takes.
        named = tuned if obstacles.get(tuned) is None else "xla"
    elif named != "xla":
        obstacle = _obstacle(op, named, obstacles)
        if obstacle is not None:
            raise ImplementationError(
                f"{op}: the implementation '{named}' cannot run here: {obstacle}. Take 'xla', or "
                f"None to let it be chosen (configuration: kernels.overrides.{op}=xla or =auto)"
            )
    sizes = entry.get("blocks", {}) if named == "mosaic" else {}
    return Choice(named, tuple(sizes.items()))


def _selected_for(op: str) -> Implementation | None:
    kernels = _selection.get()
    name = getattr(kernels.overrides, op) or kernels.implementation
    return None if name == "auto" else name


def _obstacle(op: str, named: str, obstacles: Mapping[str, str | None]) -> str | None:
    if named not in get_args(Implementation):
        return f"it is none of {', '.join(get_args(Implementation))}"
    if named not in obstacles:
        return f"there is none; {op} has {', '.join(['xla', *obstacles])}"
    return obstacles[named]


def shape_class(dtype: jax.typing.DTypeLike, *sizes: int) -> str:
    """Name of a class of shapes: the dtype, and each size rounded up to a power of two."""
    rounded = (1 << max(size - 1, 0).bit_length() for size in sizes)
    return " ".join([jnp.dtype(dtype).name, *map(str, rounded)])


def _measured(op: str, shape_class: str) -> dict:
    """The table's entry for the class, or for that of the same dtype whose sizes are fewest powers
    of two away; {}: there is none."""
    dtype, *sizes = shape_class.split()

    def distance(other: str) -> float:
        other_dtype, *others = other.split()
        if other_dtype != dtype or len(others) != len(sizes):
            return math.inf
        pairs = zip(map(int, sizes), map(int, others), strict=True)
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    entries = tuning_table(device_kind()).get(op, {})
    nearest = min(entries, key=distance, default=None)
    if nearest is None or distance(nearest) == math.inf:
        return {}
    return entries[nearest]


@functools.cache
def tuning_table(kind: str) -> dict[str, dict[str, dict]]:
    """op -> shape class -> {"implementation": ..., "blocks": {...}}; empty for an unknown kind."""
    path = tuning_path(kind)
    return json.loads(path.read_text()) if path.exists() else {}


def tuning_path(kind: str) -> Path:
    """The table's file: `nvidia_h200.json` for the kind `NVIDIA H200`."""
    return TUNING_FOLDER / (re.sub(r"\W+", "_", kind.lower()) + ".json")


# The device


def _device():
    """Device that this is traced for: that of the mesh around, also if it is only compiled for,
    else the first one there is."""
    return get_abstract_mesh().abstract_device or jax.devices()[0]


def device_kind() -> str:
    """`NVIDIA H200`, `cpu`, ..."""
    return _device().device_kind


def num_multiprocessors() -> int:
    """SMs of the GPU; few where a kernel is interpreted, since each costs time there."""
    if is_interpreted():
        return 2
    device = _device()
    return getattr(device, "num_cores", None) or device.core_count


def mosaic_obstacle() -> str | None:
    """Why no Mosaic GPU kernel runs on this device; None: they do."""
    if is_interpreted() or re.search(r"\bH[12]00\b|\bGH200\b|\bH800\b|\bH20\b", device_kind()):
        return None
    return f"its kernels are for NVIDIA Hopper GPUs and this is '{device_kind()}'"


def is_interpreted() -> bool:
    """Whether kernels run on the CPU, for a test."""
    return _interpreted.get() is not None


@contextmanager
def interpreted(detect_races: bool = True) -> Iterator[None]:
    """Mosaic GPU kernels traced inside run on the CPU, by JAX's interpreter. For tests.

    With `detect_races` it prints RACE DETECTED where a kernel reads and writes memory in no fixed
    order (JAX raises nothing then; the tests' `no_races` does).
    """
    params = plgpu.InterpretGPUParams(detect_races=detect_races)
    with scoped(_interpreted, params), plgpu.force_gpu_interpret_mode(params):
        yield


# Types inside `shard_map` with `check_vma`


def varying_alike(*arrays: jax.Array | None) -> tuple[jax.Array | None, ...]:
    """The arrays as varying over every mesh axis that one of them varies over.

    An op calls this before its custom_vjp: gradients of what all ranks hold alike (a norm's scale)
    are summed here, as JAX's types want, and a kernel sees operands of one type.
    """
    axes = _varying_axes(arrays)
    return tuple(None if x is None else varying_over(x, axes) for x in arrays)


def traced_once[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: calls of a kernel with operands of the same types share one trace, and in one
    program one lowering (but in pipelines, which inline them). A third of a second each, which
    unrolled layers would pay every time.

    Args:
      static: names of the arguments that are no arrays; their values must have a hash.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @partial(jax.jit, static_argnames=("_traced_for", *static))
        def shared(_traced_for, **arguments):
            return function(**arguments)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            # What a trace depends on besides its arguments.
            cores = num_multiprocessors() if mosaic_obstacle() is None else None
            traced_for = plans.get(), _interpreted.get(), device_kind(), cores
            arguments = signature.bind(*args, **kwargs).arguments
            return shared(_traced_for=traced_for, **arguments)

        return call

    return decorate


def mosaic_kernel(body: Callable[..., None], **options) -> Callable[..., Any]:
    """`plgpu.kernel`, but its results vary over the mesh axes that its operands vary over, which
    JAX 0.11 forgets. For plans from shapes one of that name that does nothing: to trace a body
    takes time."""
    if plans.get() == "shapes":
        nothing = functools.wraps(body)(lambda *_: None)
        options = {"out_type": options["out_type"], "grid": (1,), "grid_names": ("block",)}
        return results_vary_as_operands(plgpu.kernel(nothing, **options))
    return results_vary_as_operands(plgpu.kernel(body, **options))


def results_vary_as_operands(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, whose results have lost over which mesh axes they vary."""

    def call(*operands):
        axes = _varying_axes(jax.tree.leaves(operands))
        return jax.tree.map(lambda out: varying_over(out, axes), kernel(*operands))

    return call


def _varying_axes(arrays) -> frozenset:
    given = (x for x in arrays if x is not None)
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in given))


def varying_over(x: jax.Array, axes: frozenset) -> jax.Array:
    """The array as varying over these mesh axes too."""
    missing = axes - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def out_type(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, like: jax.Array):
    """Type of a kernel's output that varies over the mesh axes that `like` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


# Plain JAX that several ops share


def sum_of_rows(x: jax.Array, num_dims: int) -> jax.Array:
    """Sum over the first dims in fp32, in plain JAX.

    Of the rounded values that are stored anyway: XLA would keep all of them in fp32 besides.
    """
    x = lax.optimization_barrier(x)
    return jnp.sum(x.astype(jnp.float32), axis=tuple(range(num_dims)))
