"""Triton kernels in Triton's own interpreter, on a CPU and without PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import jax
import numpy as np
import pytest

from mxjax.kernels import triton_launch


class Tensor:
    """As much of a PyTorch tensor as the interpreter asks for, around a NumPy array."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return Tensor(self.array)

    def set_(self, *_):
        pass

    def copy_(self, _):
        pass

    def storage_offset(self):
        return 0

    def size(self):
        return self.shape

    def stride(self):
        return self.array.strides


@contextmanager
def interpreted() -> Iterator[None]:
    """Triton kernels that are traced inside run in the interpreter, as if on a GPU. To be entered
    before the first `*_triton` module is imported, since Triton decides when it sees a kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for module in ("swiglu", "dropout", "permute"):
            patch.setattr(f"mxjax.kernels.{module}.triton_obstacle", lambda: None)
        patch.setattr(triton_launch, "_call", _call)
        yield


def _call(kernel, grid, out, num_warps, sizes):
    leaves, tree = jax.tree.flatten(out)

    def run(*operands):
        # All ones are NaN: who relies on what nobody wrote finds it.
        results = [np.full(o.shape, 255, np.uint8).repeat(o.dtype.itemsize, -1) for o in leaves]
        results = [r.view(o.dtype).reshape(o.shape) for r, o in zip(results, leaves, strict=True)]
        tensors = [Tensor(np.ascontiguousarray(a)) for a in (*map(np.asarray, operands), *results)]
        kernel[grid](*tensors, **sizes)
        return [tensor.array for tensor in tensors[len(operands) :]]

    return lambda *operands: tree.unflatten(jax.pure_callback(partial(run), leaves, *operands))
