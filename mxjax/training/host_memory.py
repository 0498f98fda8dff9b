"""Refusing to offload more than the host can hold, before anything is created."""

from __future__ import annotations

from dataclasses import asdict

from jax.sharding import Mesh

from mxjax.config import Config, ConfigError, Problem
from mxjax.moe.buckets import BucketChooser
from mxjax.remat.layers import offloads_activations
from mxjax.remat.sizes import gib, host_memory, parse_size
from mxjax.training.plan import memory_model
from mxjax.training.programs import Programs


def check_host_memory(config: Config, mesh: Mesh) -> None:
    """Nothing is done where nothing is offloaded, or where the host does not say what it has.

    Raises:
      ConfigError: this process's devices would put more into the host's memory than is free, or
        than `remat.host_memory`.
    """
    activations = offloads_activations(config)
    if not (activations or config.optimizer.offload):
        return
    limit = config.remat.host_memory
    available = host_memory() if limit is None else parse_size(limit)
    if available is None:
        return
    programs = Programs(config, mesh)
    bucket = BucketChooser(config.moe.capacity_buckets).current
    model = memory_model(programs, bucket, programs.stagewise, None)
    programs.close()
    local = set(mesh.local_devices)
    ranks = [
        (sum(device in local for device in devices.flat), stage.host)
        for devices, stage in zip(mesh.devices, model.stages(), strict=True)
    ]
    wanted = sum(number * size for number, size in ranks)
    if wanted <= available:
        return
    remat = config.remat
    key, value = "optimizer.offload", True
    if activations:
        key, value = "remat.offload", list(remat.offload)
        if not remat.offload:
            key, value = "remat.rules", [asdict(rule) for rule in remat.rules if rule.offload]
    each = " + ".join(f"{number} x {gib(size)}" for number, size in ranks if number)
    message = (
        f"this process's devices (by pipeline rank: {each}) need {gib(wanted)}, and the host has "
        f"{gib(available)} ({'free' if limit is None else 'by remat.host_memory'}); offload fewer "
        f"tensors, or those of fewer layers{'' if limit is None else ', or raise that limit'}"
    )
    raise ConfigError([Problem(key, value, message)])
