"""Refusing to offload more than the host can hold, before anything is created."""

from __future__ import annotations

from jax.sharding import Mesh

from mxjax.config import Config, ConfigError, Problem
from mxjax.moe.buckets import BucketChooser
from mxjax.remat.layers import layer_policies
from mxjax.remat.sizes import gib, host_memory, parse_size
from mxjax.training.plan import memory_model, runs_stagewise
from mxjax.training.programs import Programs


def check_host_memory(config: Config, mesh: Mesh) -> None:
    """Nothing is done where nothing is offloaded, or where the host does not say what it has.

    Raises:
      ConfigError: this process's devices would put more into the host's memory than is free, or
        than `remat.host_memory`.
    """
    activations = any(policy.offload for policy in layer_policies(config))
    if not (activations or config.optimizer.offload):
        return
    limit = config.remat.host_memory
    available = host_memory() if limit is None else parse_size(limit)
    if available is None:
        return
    programs = Programs(config, mesh)
    bucket = BucketChooser(config.moe.capacity_buckets).current
    model = memory_model(programs, bucket, runs_stagewise(config, mesh), None)
    programs.close()
    of_device = max(stage.host for stage in model.stages())
    devices = len(mesh.local_devices)
    if of_device * devices <= available:
        return
    key = "remat.offload" if activations else "optimizer.offload"
    value = list(config.remat.offload) if activations else True
    message = (
        f"{gib(of_device)} for each of {devices} devices of this process are "
        f"{gib(of_device * devices)}, and the host has {gib(available)} "
        f"({'free' if limit is None else 'by remat.host_memory'}); offload less"
    )
    raise ConfigError([Problem(key, value, message)])
