"""Adam's state in Megatron's ``torch`` format.

The plain optimizer numbers its parameters: group by group, and within a group as they were
registered, through all virtual chunks of a rank. The distributed one keeps flat buffers in
``distrib_optim.pt``. Neither has names; a rank's state dicts of the model list its parameters in
the order of registration, as both are walks through the same tree of modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from mxjax.ckpt.megatron.flat import bucket_sizes, slots
from mxjax.ckpt.megatron.saved_adam import MOMENTS, OptimizerStateError
from mxjax.ckpt.torch_format.archive import TorchArchive
from mxjax.ckpt.torch_format.values import TORCH_NAMES, Global, LazyTensor, TensorLike

DISTRIBUTED_FILE = "distrib_optim.pt"

_BUFFERS = ("expert_bias", "local_tokens_per_expert", "_extra_state")
"""Ends of names in a state dict that are no parameters."""

_DEFAULT_BUCKET = 40_000_000
_DEFAULT_BUCKET_PER_RANK = 1_000_000

States = dict[int, dict[str, TensorLike]]
"""What a rank has in place of its weights, by virtual chunk and name."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of one rank."""

    chunk: int
    name: str
    tensor: TensorLike

    @property
    def of_expert(self) -> bool:
        """Whether ``ep`` spreads it."""
        return ".mlp.experts." in self.name

    def is_decayed(self, args: Mapping[str, Any]) -> bool:
        """Whether weight decay is applied to it."""
        of_head = "q_layernorm." in self.name or "k_layernorm." in self.name
        if of_head and args.get("apply_wd_to_qk_layernorm"):
            return True
        return len(self.tensor.shape) > 1 and not self.name.endswith(".bias")


@dataclass
class RankAdam:
    """The state of one rank.

    Attributes:
      states: by kind: ``exp_avg``, ``exp_avg_sq``, and ``param`` or ``fp32_param``.
    """

    states: dict[str, States] = field(default_factory=dict)

    def add(self, kind: str, parameter: Parameter, tensor: TensorLike) -> None:
        """Keeps the tensor of a parameter, which has its shape."""
        chunk = self.states.setdefault(kind, {}).setdefault(parameter.chunk, {})
        chunk[parameter.name] = tensor


def has_state(optimizer: Any) -> bool:
    """Whether the entry ``optimizer`` of a rank's file says that there is state."""
    return any(_inner(part).get("param_groups") for part in _parts(optimizer))


def read_rank(
    file: Path, optimizer: Any, model: States, stage: int, args: Mapping[str, Any]
) -> RankAdam:
    """The optimizer state of one rank, opened without being read.

    Args:
      file: the rank's ``model_optim_rng.pt``.
      optimizer: its entry ``optimizer``.
      model: its weights.
      stage: the pipeline rank.

    Raises:
      OptimizerStateError: state and model do not have the same parameters.
    """
    parameters = [
        Parameter(chunk, name, tensor)
        for chunk in sorted(model)
        for name, tensor in model[chunk].items()
        if isinstance(tensor, TensorLike) and not name.endswith(_BUFFERS)
    ]
    parts, found = _parts(optimizer), RankAdam()
    if all("state" in _inner(part) for part in parts):
        for part in parts:
            _read_plain(file, part, _of_part(parameters, part, len(parts)), args, found)
        return found
    flat = file.with_name(DISTRIBUTED_FILE)
    if not flat.exists():
        return found
    content = TorchArchive(flat).load()
    buffers = content if isinstance(content, list) else [content]
    if len(buffers) != len(parts):
        raise OptimizerStateError(
            f"{flat} has the state of {len(buffers)} optimizers, {file.name} of {len(parts)}."
        )
    for part, buffer in zip(parts, buffers, strict=True):
        if buffer is not None:  # another rank with the same parameters has it
            mine = _of_part(parameters, part, len(parts))
            _read_flat(flat, buffer, mine, stage, args, found)
    return found


def _parts(optimizer: Any) -> list[Any]:
    """Optimizers of a rank: one, or one for experts after the other."""
    return optimizer if isinstance(optimizer, list) else [optimizer] if optimizer else []


def _inner(part: Any) -> dict[str, Any]:
    """torch's own state within that of Megatron's wrapper for bf16."""
    inner = part.get("optimizer", part) if isinstance(part, dict) else None
    if not isinstance(inner, dict):
        raise OptimizerStateError(f"The optimizer state is of an unknown kind: {part!r:.80}.")
    return inner


def _of_part(parameters: list[Parameter], part: Any, parts: int) -> list[Parameter]:
    """Parameters of one of several optimizers: all experts, or all that are none."""
    if parts == 1:
        return parameters
    groups = _inner(part)["param_groups"]
    experts = {bool(group.get("is_expert_parallel")) for group in groups}
    if parts != 2 or len(experts) != 1:
        raise OptimizerStateError(
            f"There are {parts} optimizers, of which more than one has both experts and other"
            " parameters (overlap_param_gather_with_optimizer_step)."
        )
    return [parameter for parameter in parameters if parameter.of_expert in experts]


# -- the plain optimizer --------------------------------------------------------------------------


def _read_plain(
    file: Path, part: Any, parameters: list[Parameter], args: Mapping[str, Any], found: RankAdam
) -> None:
    inner = _inner(part)
    groups = list(_grouped(file, inner["param_groups"], parameters, args))
    masters = part.get("fp32_from_fp16_params") if part is not inner else None
    for number, (indices, members) in enumerate(groups):
        if len(indices) != len(members):
            raise OptimizerStateError(
                f"{file}: group {number} of the optimizer has {len(indices)} parameters, the model"
                f" {len(members)} for it."
            )
        for index, parameter in zip(indices, members, strict=True):
            state = inner["state"].get(index, {})
            for kind in MOMENTS:
                tensor = _like(file, parameter, kind, state.get(kind))
                found.add(kind, parameter, tensor)
        if masters:
            half = [p for p in members if p.tensor.dtype.itemsize == 2]
            if len(masters) != len(groups) or len(masters[number]) != len(half):
                raise OptimizerStateError(
                    f"{file}: fp32_from_fp16_params has other parameters than the model."
                )
            for parameter, tensor in zip(half, masters[number], strict=True):
                tensor = _like(file, parameter, "fp32 weight", tensor)
                found.add("fp32_param", parameter, tensor)


def _grouped(
    file: Path, groups: list[Any], parameters: list[Parameter], args: Mapping[str, Any]
) -> Iterator[tuple[list[int], list[Parameter]]]:
    """For each parameter group the numbers of its parameters, and these. Groups differ in weight
    decay and in whether they hold experts."""
    experts_apart = any(group.get("is_expert_parallel") for group in groups)
    kinds = [
        (group.get("wd_mult", 1.0) != 0, bool(group.get("is_expert_parallel"))) for group in groups
    ]
    for group, kind in zip(groups, kinds, strict=True):
        if kinds.count(kind) > 1:
            raise OptimizerStateError(
                f"{file}: several groups of the optimizer differ in something else than weight"
                " decay, such as the learning rate (decoupled_lr)."
            )
        yield (
            group["params"],
            [
                parameter
                for parameter in parameters
                if (parameter.is_decayed(args), experts_apart and parameter.of_expert) == kind
            ],
        )


def _like(file: Path, parameter: Parameter, kind: str, tensor: Any) -> TensorLike:
    """`tensor`, which must have the shape of the parameter."""
    if not isinstance(tensor, TensorLike) or tensor.shape != parameter.tensor.shape:
        has = f"shape {tensor.shape}" if isinstance(tensor, TensorLike) else "no tensor"
        raise OptimizerStateError(
            f"{file}: {kind} of {parameter.name} should have shape {parameter.tensor.shape}, and"
            f" there is {has}: the optimizer has its parameters in another order, or others."
        )
    return tensor


# -- the distributed optimizer --------------------------------------------------------------------


def _read_flat(
    file: Path,
    buffers: dict[Any, Any],
    parameters: list[Parameter],
    stage: int,
    args: Mapping[str, Any],
    found: RankAdam,
) -> None:
    if not buffers.get("buckets_coalesced"):
        raise OptimizerStateError(
            f"{file} is of before megatron-core 0.5, with padding that depends on its ranks. Load"
            " and save it with a newer Megatron."
        )
    mine = list(_by_buffer(parameters))
    stored = [
        entry for key, value in buffers.items() if type(key) is int for entry in value.items()
    ]
    if len(mine) != len(stored):
        raise OptimizerStateError(
            f"{file} has {len(stored)} buffers, and the model's chunks and dtypes make {len(mine)}."
        )
    every = sum(prod(p.tensor.shape) for p in parameters)
    for (dtypes, content), members in zip(stored, mine, strict=True):
        dtype = TORCH_NAMES[members[0].tensor.dtype]
        theirs = dtypes[0] if isinstance(dtypes, tuple) else dtypes
        if not isinstance(theirs, Global) or theirs.name != dtype:
            raise OptimizerStateError(
                f"{file}: a buffer is of {theirs}, where the model's parameters are of {dtype}."
            )
        size = content["numel_unpadded"]
        starts = _starts(members, size, stage, args, every)
        for kind in ("param", *MOMENTS):
            flat = content.get(kind)
            if not isinstance(flat, TensorLike) or flat.shape != (size,):
                shape = getattr(flat, "shape", None)
                raise OptimizerStateError(
                    f"{file}: {kind} should have {size} elements (numel_unpadded), and has shape"
                    f" {shape}."
                )
            if starts is None:
                raise OptimizerStateError(
                    f"{file}: a buffer has {size} elements, which the"
                    f" {len(members)} parameters from {members[0].name} to {members[-1].name} do"
                    " not fill."
                )
            for start, parameter in zip(starts, members, strict=True):
                found.add(kind, parameter, _slice(flat, start, parameter.tensor.shape))


def _by_buffer(parameters: list[Parameter]) -> Iterator[list[Parameter]]:
    """Parameters of each chunk and dtype."""
    found: dict[tuple[int, str], list[Parameter]] = {}
    for parameter in parameters:
        found.setdefault((parameter.chunk, parameter.tensor.dtype.name), []).append(parameter)
    yield from found.values()


def _starts(
    parameters: list[Parameter], size: int, stage: int, args: Mapping[str, Any], every: int
) -> list[int] | None:
    """First element of each parameter in a buffer of `size` elements, whose buckets lie close
    together; None: they do not make so many.

    Where buckets end is not stored. It matters only to parameters whose size is no multiple of 64.
    """
    sizes = [prod(parameter.tensor.shape) for parameter in parameters]
    tops = ("embedding.word_embeddings.weight", "output_layer.weight")
    shared = [parameter.name == tops[0] for parameter in parameters]
    tied = [parameter.name in tops for parameter in parameters]
    # Only the first chunk of the first stage has several buckets.
    several = _bucket_size(args, every) if stage == 0 and parameters[0].chunk == 0 else None
    for alone in (shared, tied, [False] * len(sizes)):
        for bucket_size in dict.fromkeys((several, None)):
            buckets = bucket_sizes(sizes, alone, bucket_size)
            found = slots(sizes, buckets) if sum(buckets) == size else None
            if found is not None:
                return [sum(buckets[: slot.bucket]) + slot.start for slot in found]
    return None


def _bucket_size(args: Mapping[str, Any], every: int) -> int | None:
    if not args.get("overlap_grad_reduce"):
        return None
    if number := args.get("ddp_num_buckets"):
        return every // number
    ranks = (args.get("data_parallel_size") or 1) * (args.get("context_parallel_size") or 1)
    default = max(_DEFAULT_BUCKET, _DEFAULT_BUCKET_PER_RANK * ranks)
    return args.get("ddp_bucket_size") or default


def _slice(flat: TensorLike, start: int, shape: tuple[int, ...]) -> LazyTensor:
    # The buffer is mapped from its file: only the slice is read.
    stop = start + prod(shape)
    return LazyTensor(shape, flat.dtype, lambda: flat.numpy()[start:stop].reshape(shape))
