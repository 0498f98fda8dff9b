"""One matrix product for each of several groups of equal length: y[e] = x[e] w[e].

Shapes: E groups, C rows of a group, K and N widths.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mxjax.kernels.grouped_matmul import TILES, grouped_matmul, obstacle
from mxjax.kernels.implementation import Implementation, choose, shape_class
from mxjax.kernels.row_groups import equal_groups


def batched_matmul(
    x_ECK: jax.Array, w_EKN: jax.Array, *, implementation: Implementation | None = None
) -> jax.Array:
    """[E, C, N], summed in fp32. Differentiable.

    Args:
      implementation: see `implementation.py`. `mosaic` is `grouped_matmul` with tiles that all are
        in use; it takes what that takes, and C that is a multiple of 64.

    Raises:
      ImplementationError: the named implementation cannot run this.
    """
    (E, C, K), N = x_ECK.shape, w_EKN.shape[2]
    tile = next((tile for tile in reversed(TILES) if C % tile == 0), None)
    reason = f"{C} rows of a group are no multiple of {TILES[0]}"
    if tile is not None:
        reason = obstacle(x_ECK.dtype, w_EKN.dtype, tile, K, N)
    choice = choose(
        "batched_matmul",
        implementation,
        shape_class=shape_class(x_ECK.dtype, E, C, K, N),
        obstacles={"mosaic": reason},
    )
    if choice.implementation == "xla":
        return jnp.einsum("eck,ekn->ecn", x_ECK, w_EKN)
    groups = equal_groups(E, C, tile)
    y = grouped_matmul(x_ECK.reshape(E * C, K), w_EKN, groups, implementation="mosaic")
    return y.reshape(E, C, N)
