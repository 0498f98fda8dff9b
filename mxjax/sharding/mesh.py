"""The device mesh: six named axes, always all present, size 1 where unused."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from mxjax.config.schema import ParallelConfig

AXES = ("pp", "dp", "ep", "cp", "sp", "tp")
"""Outermost first: neighbours in `tp` are neighbouring devices."""

BATCH_AXES = ("dp", "ep")
"""Axes that split the batch dim."""

SEQUENCE_AXES = ("cp", "sp")
"""Axes that split the sequence dim everywhere (`tp` splits it only between parallel regions)."""

DATA_AXES = BATCH_AXES + SEQUENCE_AXES
"""Axes whose ranks see different tokens and hold the same non-expert weights."""

EXPERT_DATA_AXES = ("dp", *SEQUENCE_AXES)
"""The same for expert weights, which `ep` splits."""


def use_cpu_devices(number: int) -> None:
    """Run on so many virtual CPU devices (`parallel.cpu_devices`); 0: on the real ones. Before
    anything else of JAX."""
    if number:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", number)


def build_mesh(parallel: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `devices` (default: all, over all processes) with the sizes of `parallel`.

    Raises:
      ValueError: an axis is still -1, or the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(parallel, axis) for axis in AXES]
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        raise ValueError(
            f"parallel: axes {dict(zip(AXES, sizes, strict=True))} do not multiply to the "
            f"{len(devices)} devices; resolve a -1 axis with `mxjax.config.load_config` first"
        )
    return Mesh(np.asarray(devices).reshape(sizes), AXES)
