"""What all Triton kernels need: whether they can run, and how JAX starts them.

They reach JAX through jax-triton, which `pip install 'mxjax[cuda]'` brings. It is optional, so only
the modules `*_triton.py` import Triton itself, and ops import those where `triton` was chosen.

A kernel takes its operands, then its results, then its sizes as `constexpr`: shapes are static in
JAX, and with sizes that are known the compiler sees how wide loads may be.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable
from typing import Any

import jax

from mxjax.kernels.implementation import device_kind, results_vary_as_operands


def triton_obstacle() -> str | None:
    """Why no Triton kernel runs on this device; None: they do."""
    if not device_kind().startswith("NVIDIA"):
        return f"its kernels are for NVIDIA GPUs and this is '{device_kind()}'"
    if importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is not installed (pip install 'mxjax[cuda]')"
    return None


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    out: Any,
    *operands: jax.Array,
    num_warps: int = 4,
    **sizes: Any,
) -> Any:
    """Results of a Triton kernel, in the structure of `out`.

    Args:
      kernel: decorated with `triton.jit`; its parameters are the operands, the results and `sizes`.
      grid: number of programs in up to three dims, of which only the first may be above 65,535.
      out: `jax.ShapeDtypeStruct` of each result, in any pytree. Nothing is in them at first.
      num_warps: of each program.
    """
    return results_vary_as_operands(_call(kernel, grid, out, num_warps, sizes))(*operands)


def jax_triton_module() -> Any:
    """The module. It empties `TRITON_CACHE_DIR` when it is first imported, with which nobody else
    in the process could use Triton, `torch.compile` for one: put that back."""
    before = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton

    os.environ.pop("TRITON_CACHE_DIR", None)
    if before is not None:
        os.environ["TRITON_CACHE_DIR"] = before
    return jax_triton


def _call(
    kernel: Any, grid: tuple[int, ...], out: Any, num_warps: int, sizes: dict[str, Any]
) -> Callable:
    jax_triton = jax_triton_module()
    # Version 0.4 has given it another name.
    names = inspect.signature(jax_triton.triton_call).parameters
    results = {"out_type" if "out_type" in names else "out_shape": out}

    def call(*operands):
        return jax_triton.triton_call(
            *operands, kernel=kernel, grid=grid, num_warps=num_warps, **results, **sizes
        )

    return call
