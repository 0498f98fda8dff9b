"""Collectives by axis name, for use inside the fully manual `shard_map`.

**How values are seen.** The `shard_map` runs with `check_vma=False` and everything in it is taken
to differ between devices. The loss of the program is the *sum* of every device's local scalar, and
the gradient of a parameter copy is the derivative of that sum with respect to that copy. Two rules
follow, and nothing else is needed for right gradients under any layout:

* a scalar that is equal on n devices enters the local loss divided by n;
* the gradient of a parameter that is replicated over some axes is the `psum` over these axes of
  its copies' gradients.

Each collective's transpose is then the plain one: `psum` <-> `psum`, `all_gather` <->
`reduce_scatter`, `all_to_all` <-> `all_to_all`.

`axes` is an axis name or a tuple of names (first = outermost). Axes of size 1 cost nothing: they
are dropped while tracing.
"""

from __future__ import annotations

import jax
from jax import lax

Axes = str | tuple[str, ...]


def _active(axes: Axes) -> tuple[str, ...]:
    names = (axes,) if isinstance(axes, str) else axes
    return tuple(name for name in names if lax.axis_size(name) > 1)


def axis_size(axes: Axes) -> int:
    """Number of ranks along `axes` together (a Python int)."""
    size = 1
    for name in _active(axes):
        size *= lax.axis_size(name)
    return size


def axis_index(axes: Axes) -> jax.Array | int:
    """Rank along `axes` together, the first axis outermost."""
    active = _active(axes)
    return lax.axis_index(active) if active else 0


def psum(x, axes: Axes):
    """Sum over `axes` of every leaf of `x`."""
    active = _active(axes)
    return lax.psum(x, active) if active else x


def pmax(x, axes: Axes):
    """Maximum over `axes` of every leaf of `x`. Not differentiable."""
    active = _active(axes)
    return lax.pmax(x, active) if active else x


def all_gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Concatenate the shards of all ranks along `dim`."""
    active = _active(axes)
    return lax.all_gather(x, active, axis=dim, tiled=True) if active else x


def reduce_scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Sum over `axes` and keep this rank's part of `dim`."""
    active = _active(axes)
    return lax.psum_scatter(x, active, scatter_dimension=dim, tiled=True) if active else x


def all_to_all(x: jax.Array, axes: Axes) -> jax.Array:
    """Exchange dim 0, which has one entry per rank: entry d goes to rank d."""
    active = _active(axes)
    return lax.all_to_all(x, active, split_axis=0, concat_axis=0) if active else x


def shard(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """This rank's part of `dim` of a value that all ranks along `axes` hold."""
    n = axis_size(axes)
    if n == 1:
        return x
    size = x.shape[dim] // n
    return lax.dynamic_slice_in_dim(x, axis_index(axes) * size, size, dim)
