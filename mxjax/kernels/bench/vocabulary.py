"""Vocabulary projection and cross entropy at the size of Llama-3-8B."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from mxjax.kernels.bench.cases import DTYPE, Case, Work
from mxjax.kernels.implementation import shape_class
from mxjax.kernels.linear_cross_entropy import AXIS, linear_cross_entropy


def vocabulary_cases(small: bool) -> list[Case]:
    """Products are 2THV forward and 6THV in all: what is done twice does not count."""
    T, H, V = (64, 128, 512) if small else (8192, 4096, 128256)
    products, arrays = 2 * T * H * V, DTYPE.dtype.itemsize * (T * H + H * V)
    return [
        Case(
            "linear_cross_entropy",
            f"linear + cross entropy {T}x{H}x{V}",
            _loss,
            tuple(jax.ShapeDtypeStruct(shape, DTYPE) for shape in ((T, H), (H, V))),
            shape_class(DTYPE, H, V),
            Work(arrays, products),
            Work(2 * arrays, 3 * products),
            implementations=("xla",),
            peer="linear + cross entropy",
            peer_sizes=(T, H, V),
        )
    ]


def _loss(x_TH: jax.Array, weight_HV: jax.Array, **_) -> jax.Array:
    """Its targets are 0, 1, 2, ... The op asks for the mesh axis that may split the vocabulary."""
    targets_T = jnp.arange(x_TH.shape[0]) % weight_HV.shape[1]
    whole = PartitionSpec()
    mapped = jax.shard_map(
        lambda *arrays: linear_cross_entropy(*arrays)[0],
        mesh=Mesh(np.asarray(jax.devices()[:1]), (AXIS,)),
        in_specs=whole,
        out_specs=whole,
        check_vma=False,
    )
    return mapped(x_TH, weight_HV, targets_T)
