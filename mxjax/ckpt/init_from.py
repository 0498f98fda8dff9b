"""The state that a new run starts with, out of another checkpoint: `init_from` in the
configuration."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from mxjax.ckpt.conversion import Conversion
from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.huggingface.config_json import from_config_json
from mxjax.ckpt.huggingface.folder import open_folder
from mxjax.ckpt.huggingface.importing import arrays_of
from mxjax.ckpt.importing import open_with_settings
from mxjax.ckpt.locate import Kind, Location, locate
from mxjax.ckpt.run_arrays import RunArrays
from mxjax.ckpt.streaming import StreamedArray
from mxjax.ckpt.tree import named_leaves
from mxjax.config import Config
from mxjax.config.schema import ModelConfig, MoEConfig
from mxjax.training.programs import Programs
from mxjax.training.state import TrainState

_MEGATRON = (Kind.MEGATRON_TORCH, Kind.MEGATRON_DIST)

_MAY_DIFFER = {
    *("vocab_size", "max_position_embeddings", "init_method_std", "attention_implementation"),
    *("hidden_dropout", "attention_dropout", "mtp_loss_scaling_factor", "router", "dispatcher"),
    *("capacity_buckets", "force_balanced", "aux_loss_coeff", "seq_aux_loss_coeff"),
    *("z_loss_coeff", "expert_bias_update_rate"),
}
"""Settings of the sections `model` and `moe` that do not change what given weights compute."""


@dataclass(frozen=True)
class Start:
    """What a run starts with.

    Attributes:
      step: steps done.
      metadata: what the checkpoint says to the training loop; empty with weights alone.
      notes: lines for the user.
    """

    path: Path
    kind: Kind
    state: TrainState
    step: int
    metadata: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """In a few words."""
        what = f"the state after step {self.step}" if self.metadata else "the weights"
        return f"{what} of {self.path} ({self.kind})"


def initialize(config: Config, programs: Programs) -> Start:
    """Reads what `config.init_from` names onto the mesh of `programs`.

    A process reads the blocks that its devices need, and holds its part of one array at a time
    beside them.

    Raises:
      CheckpointFormatError: there is no checkpoint, it is damaged, or it does not fit the model.
    """
    try:
        return _initialize(config, programs)
    except CheckpointFormatError as error:
        raise CheckpointFormatError(f"init_from.path: {error}") from error


def _initialize(config: Config, programs: Programs) -> Start:
    init = config.init_from
    location = locate(Path(init.path).expanduser())
    if location.kind in _MEGATRON:
        arrays, step, metadata, model = _megatron(location, config)
    elif location.kind is Kind.MXJAX:
        arrays, step, metadata, model = _run(location)
    elif location.kind is Kind.SAFETENSORS:
        arrays, step, metadata, model = _huggingface(location, config)
    else:
        raise CheckpointFormatError(
            f"{location.folder} is of kind {location.kind!s}. Make a run of it with"
            " python -m mxjax.ckpt import, and name that."
        )
    notes = [
        f"{name} is {ours!r} here and was {theirs!r} there"
        for name, (theirs, ours) in _differences(model, config).items()
    ]
    state = _placed(arrays, programs, init.training_state, location.folder)
    if not init.training_state:
        step, metadata = 0, {}
    return Start(location.folder, location.kind, state, step, metadata, notes)


Source = tuple[dict[str, StreamedArray], int, dict[str, Any], dict[str, dict[str, Any]]]
"""Arrays by name, steps done, metadata, and the sections `model` and `moe`."""


def _megatron(location: Location, config: Config) -> Source:
    megatron, found = open_with_settings(location.folder)
    whole = config.init_from.training_state
    conversion = Conversion(megatron, config, found.zero_centred_gamma, optimizer=whole)
    if whole and not conversion.has_moments:
        why = (
            f"optimizer.name is {config.optimizer.name}, and Megatron's state is Adam's"
            if config.optimizer.name != "adamw"
            else "it has none"
        )
        raise CheckpointFormatError(
            f"no optimizer state can be taken from {location.folder}:"
            f" {why}. Set init_from.training_state to false to start with the weights alone."
        )
    iteration = megatron.common.get("iteration")
    step = iteration if isinstance(iteration, int) else 0
    metadata = {
        "next_sample_index": megatron.args.get("consumed_train_samples") or 0,
        "data": None,  # any data may follow
    }
    return conversion.arrays(step), step, metadata, _sections(found.settings)


def _huggingface(location: Location, config: Config) -> Source:
    if config.init_from.training_state:
        raise CheckpointFormatError(
            f"init_from.training_state: {location.folder} has weights alone. Set it to false."
        )
    folder = open_folder(location.folder)
    found = from_config_json(folder.config, folder.names)
    arrays, _ = arrays_of(folder, found.family, config)
    return arrays, 0, {}, _sections(found.settings)


def _sections(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """`model` and `moe` with their defaults filled in."""
    return {
        "model": asdict(ModelConfig(**settings["model"])),
        "moe": asdict(MoEConfig(**settings.get("moe", {}))),
    }


def _run(location: Location) -> Source:
    stored = RunArrays(location.folder)
    metadata = json.loads((location.folder / "metadata" / "metadata").read_text())
    arrays = {}
    for name, shape in stored.shapes.items():
        lead = 2 if ".experts." in name else 1 if "_layers." in name else 0
        lead = min(lead, len(shape))

        def read(index, name=name):
            return stored.read(name, index)

        # The dtype is that of the array it is read into.
        arrays[name] = StreamedArray(shape, np.dtype(np.float32), lead, read)
    saved = yaml.safe_load(metadata["config"])
    model = {section: saved[section] for section in ("model", "moe")}
    return arrays, metadata["step"], metadata, model


def _differences(model: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Settings under which the same weights compute something else, with both values."""
    found = {}
    for section in ("model", "moe"):
        ours = json.loads(json.dumps(asdict(getattr(config, section))))
        theirs = json.loads(json.dumps(model[section]))
        for name in ours.keys() - _MAY_DIFFER:
            if theirs.get(name, ours[name]) != ours[name]:
                found[f"{section}.{name}"] = theirs[name], ours[name]
    return dict(sorted(found.items()))


def _placed(
    arrays: Mapping[str, StreamedArray], programs: Programs, whole: bool, source: Path
) -> TrainState:
    """The state on the devices; without `whole` everything but the weights is fresh."""
    abstract = programs.layer_order.abstract_state
    wanted = {
        name: leaf
        for name, leaf in named_leaves(abstract).items()
        if whole or name.startswith("params.") or name == "expert_bias"
    }
    unfit = []
    for name, leaf in wanted.items():
        shape = arrays[name].shape if name in arrays else None
        if shape != tuple(leaf.shape):
            has = "not there" if shape is None else f"of shape {shape}"
            unfit.append(f"  {name} is {has}, expected {tuple(leaf.shape)}")
    if unfit:
        more = f"\n  ... and {len(unfit) - 10} more" if len(unfit) > 10 else ""
        raise CheckpointFormatError(
            f"{source} does not fit this run's state:\n"
            + "\n".join(unfit[:10])
            + more
            + "\nSet the sections model and moe (with init_from.training_state also optimizer) as"
            " they were there."
        )
    leaves = {name: place(arrays[name], leaf) for name, leaf in wanted.items()}
    if whole:
        names = list(named_leaves(abstract))
        state = jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in names])
        return programs.layer_order.from_model(state)
    params = jax.tree.unflatten(
        jax.tree.structure(abstract.params),
        [leaves[f"params.{name}"] for name in named_leaves(abstract.params)],
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    fresh = jax.jit(programs.optimizer.init, out_shardings=shardings.opt_state)
    state = TrainState(
        step=jax.device_put(jnp.zeros((), jnp.int32), shardings.step),
        params=params,
        opt_state=fresh(params),
        expert_bias=leaves.get("expert_bias"),
        halted=jax.device_put(jnp.zeros((), bool), shardings.halted),
    )
    return programs.layer_order.from_model(state)


def place(array: StreamedArray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array on the devices of `leaf.sharding`, in the dtype of `leaf`.

    Each block is made once in a process, and only if one of its devices needs some of it.
    """
    places = leaf.sharding.addressable_devices_indices_map(tuple(leaf.shape))
    spans = {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, array.shape, strict=True))
        for device, index in places.items()
    }
    parts = {
        span: np.empty([stop - start for start, stop in span], leaf.dtype)
        for span in set(spans.values())
    }
    for index in itertools.product(*map(range, array.shape[: array.lead])):
        block = None
        for span, part in parts.items():
            lead, rest = span[: array.lead], span[array.lead :]
            if not all(start <= i < stop for i, (start, stop) in zip(index, lead, strict=True)):
                continue
            block = np.asarray(array.read(index)) if block is None else block
            at = tuple(i - start for i, (start, _) in zip(index, lead, strict=True))
            part[at] = block[tuple(slice(*ends) for ends in rest)]
    shards = [jax.device_put(parts[span], device) for device, span in spans.items()]
    return jax.make_array_from_single_device_arrays(tuple(leaf.shape), leaf.sharding, shards)
