"""Devices that are not here: a mesh to plan for, and to compile for without running.

`jax-cuda13-pjrt` has the compiler for NVIDIA GPUs, which needs no GPU. What it compiles is the
program that a GPU would get, but for what is chosen there by stopwatch (autotuning) and for cuDNN's
attention, for which a kernel of the same sizes stands.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from mxjax.config import ConfigError, Problem
from mxjax.config.schema import ParallelConfig
from mxjax.remat.cost import H200, Ceilings
from mxjax.sharding.mesh import AXES, build_mesh

_FOLDER = Path(__file__).with_name("targets")


@dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
      memory: bytes of one.
      num_cores: multiprocessors of one.
    """

    name: str
    device_kind: str
    memory: int
    num_cores: int
    ceilings: Ceilings


TARGETS = {"h200": Target("h200", "NVIDIA H200", 150_000_000_000, 132, H200)}
"""By the name of their file in `targets/`."""


def use_target_compiler() -> None:
    """Before JAX looks for devices: compile for GPUs, compute (nothing) on the CPU."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # it finds no CUDA libraries
    jax.config.update("jax_platforms", "cpu")


def abstract_mesh(target: Target, parallel: ParallelConfig) -> AbstractMesh:
    """A mesh of shapes alone, for any number of devices, for which kernels are chosen as for the
    devices themselves."""
    sizes = tuple(getattr(parallel, axis) for axis in AXES)
    device = AbstractDevice(target.device_kind, target.num_cores, "gpu")
    types = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(sizes, AXES, axis_types=types, abstract_device=device)


def target_mesh(target: Target, parallel: ParallelConfig) -> Mesh:
    """A mesh of devices that can be compiled for.

    Raises:
      ConfigError: the compiler is not installed.
    """
    number = int(np.prod([getattr(parallel, axis) for axis in AXES]))
    try:
        topology = topologies.get_topology_desc(
            target.name,
            platform="cuda",
            target_config=(_FOLDER / f"{target.name}.textproto").read_text(),
            topology=f"1x1x{number}",  # processes, hosts, GPUs of a host
        )
    except RuntimeError as error:
        message = (
            "the compiler for NVIDIA GPUs is not installed; pip install --no-deps "
            f"jax-cuda13-pjrt=={jax.__version__} jax-cuda13-plugin=={jax.__version__}, or plan "
            f"from shapes alone with --no-compile ({error})"
        )
        raise ConfigError([Problem("--target", target.name, message)]) from error
    return build_mesh(parallel, topology.devices)
