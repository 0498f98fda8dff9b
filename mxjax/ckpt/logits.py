"""Logits of a run's newest checkpoint: ``python -m mxjax.ckpt logits``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.sharding import NamedSharding
from tqdm import tqdm

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.leaves import run_leaves
from mxjax.ckpt.locate import Kind, Location, locate
from mxjax.ckpt.tree import describe
from mxjax.config import Config, load_settings, resolve_axes
from mxjax.sharding.mesh import build_mesh, use_cpu_devices
from mxjax.training.gradients import Objective
from mxjax.training.pipelined import build_objective
from mxjax.training.predict import predictor


def run_logits(
    run: str | Path, tokens: np.ndarray, overrides: Sequence[str] = (), progress: bool = True
) -> np.ndarray:
    """Logits of the model that a run saved last.

    Args:
      run: a run's folder, or one of its steps.
      tokens: ids, [batch, sequence]; one document each.
      overrides: ``section.key=value``; the layout is not that of the run: by default each device
        has sequences of its own.

    Returns:
      fp32, [batch, sequence, vocabulary].

    Raises:
      CheckpointFormatError: there is no run at `run`, or it does not fit its configuration.
      ConfigError: the configuration, with `overrides`, cannot be used.
      ValueError: `tokens` are not ids of the model in two dims.
    """
    location = locate(run)
    if location.kind is not Kind.MXJAX:
        raise CheckpointFormatError(f"{run} is of kind {location.kind!s}; import it first.")
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer) or not tokens.size:
        raise ValueError(
            f"tokens are {describe(tokens)}; they must be integers, [batch, sequence]."
        )
    config = _config(location, tokens.shape[1], overrides)
    vocabulary = config.model.vocab_size
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError(
            f"tokens go from {tokens.min()} to {tokens.max()}; the model's from 0 to"
            f" {vocabulary - 1}."
        )
    objective = build_objective(config, build_mesh(config.parallel))
    params, expert_bias = _weights(location, objective)
    predict = _program(objective, tokens.shape[1])
    rows = config.training.global_batch_size
    logits = np.empty((*tokens.shape, vocabulary), np.float32)
    for start in tqdm(range(0, len(tokens), rows), desc="logits", disable=not progress):
        part = tokens[start : start + rows]
        filled = np.resize(part, (rows, part.shape[1])).astype(np.int32)
        logits[start : start + rows] = predict(params, expert_bias, filled)[: len(part)]
    return logits


def _config(location: Location, seq_length: int, overrides: Sequence[str]) -> Config:
    """What the run's configuration says about the model, on the devices of this machine."""
    metadata = json.loads((location.folder / "metadata" / "metadata").read_text())
    saved = yaml.safe_load(metadata["config"])
    settings: dict[str, Any] = {
        "model": saved["model"],
        "moe": saved["moe"],
        "training": {
            "seq_length": seq_length,
            "compute_dtype": saved["training"]["compute_dtype"],
            "param_dtype": saved["training"]["param_dtype"],
        },
    }
    asked = load_settings(settings, "the run's configuration", overrides)
    use_cpu_devices(asked.parallel.cpu_devices)
    parallel, _ = resolve_axes(asked.parallel, jax.device_count())
    rows = parallel.dp * parallel.ep * asked.training.num_microbatches
    batch = f"training.global_batch_size={rows}"
    return load_settings(
        settings, "the run's configuration", [*overrides, batch], lambda _: jax.device_count()
    )


def _weights(location: Location, objective: Objective) -> tuple[dict, jax.Array | None]:
    """Parameters where they belong, read one at a time, and the balancing bias."""
    leaves = run_leaves(location.folder)
    parts = objective.model.parts

    def read(path, info, spec):
        part = parts[path[0].key]
        shape = info.shape if part.num_layers is None else (part.num_layers, *info.shape[1:])
        name = "params." + ".".join(key.key for key in path)
        found = leaves.get(name)
        if found is None or tuple(found.shape) != shape:
            had = "is missing" if found is None else f"has shape {tuple(found.shape)}"
            raise CheckpointFormatError(f"{location.folder}: {name} {had}, expected shape {shape}.")
        return NamedSharding(objective.mesh, spec), part, found

    # All are looked at before the first is read.
    found = jax.tree.map_with_path(read, objective.model.infos, objective.param_specs)
    params = jax.tree.map(
        lambda of: jax.device_put(of[1].place(of[2].numpy()), of[0]),
        found,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    bias = leaves["expert_bias"].numpy() if objective.model.num_routers else None
    return params, bias


def _program(objective: Objective, seq_length: int):
    """(params, expert bias, tokens [rows, S]) -> logits [rows, S, V] fp32, on the host."""
    predict = predictor(objective, "logits", seq_length)
    exact = objective.config.training.compute_dtype == "float32"

    @jax.jit
    def logits(*arguments):
        return predict(*arguments).astype(jnp.float32)

    def run(*arguments):
        # Without this, GPUs multiply fp32 matrices in TF32.
        with jax.default_matmul_precision("highest" if exact else "default"):
            return np.asarray(logits(*arguments))

    return run
