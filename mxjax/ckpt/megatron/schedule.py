"""Our learning-rate schedule out of Megatron's scheduler and arguments.

Megatron's scheduler counts samples for itself, and its first rate is that of 0 samples; ours
follows the steps of the run, and its first rate is that of one step. So warm-up and cosine are
longer here by what the two differ in, mostly one step: the rates after the warm-up are the same,
step for step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mxjax.ckpt.keys import Keys

_SCHEDULES = {"cosine": "cosine", "constant": "constant", "WSD": "wsd", "linear": "wsd"}


def schedule_settings(
    args: Keys, state: Mapping[str, Any], iteration: int | None, num_steps: int | None
) -> dict[str, Any]:
    """Keys of the section `optimizer`: `lr`, `min_lr`, `schedule`, `warmup_steps`, `decay_steps`.

    Args:
      state: the entry ``opt_param_scheduler``, which is what the run really did; empty: only the
        arguments are known.
      iteration: steps done, as far as it is recorded.
      num_steps: of the whole run, as far as it is recorded.
    """
    style = state.get("lr_decay_style", args.get("lr_decay_style", "cosine"))
    if style not in _SCHEDULES:
        args.assumed[f"lr_decay_style {style}"] = "cosine"
    found: dict[str, Any] = {"schedule": _SCHEDULES.get(style, "cosine")}
    for ours, theirs in (("lr", "max_lr"), ("min_lr", "min_lr")):
        given = args.get(ours)
        found[ours] = given if state.get(theirs) is None else state[theirs]
    warmup, decay = _warmup_and_decay(args, state, num_steps)
    wsd = _wsd_decay(args)
    later = _steps_behind(args, state, iteration)
    match style:
        case "constant":
            found["min_lr"] = None
            found["warmup_steps"] = warmup and max(0, warmup + later)
        case "WSD" | "linear":
            # It ends with the run.
            if num_steps is not None and decay not in (None, num_steps):
                args.assumed[f"{style} decay until step {decay}"] = f"until the last, {num_steps}"
                decay = num_steps
            length = wsd if style == "WSD" else None if decay is None else decay - warmup
            found["decay_steps"] = length
            most = warmup + later if None in (decay, length) else decay - length
            found["warmup_steps"] = warmup and min(warmup + later, most)
        case _:
            found["warmup_steps"] = max(0, warmup + later)
            if decay is not None and decay + later != num_steps:
                found["decay_steps"] = decay + later
    return {key: value for key, value in found.items() if value is not None}


def _steps_behind(args: Keys, state: Mapping[str, Any], iteration: int | None) -> int:
    """How many steps more than Megatron's scheduler our schedule has seen at the same place."""
    batch, samples = args.get("global_batch_size"), state.get("num_steps")
    if not batch or samples is None or iteration is None:
        return 1
    return iteration + 1 - round(samples / batch)


def _warmup_and_decay(
    args: Keys, state: Mapping[str, Any], num_steps: int | None
) -> tuple[int, int | None]:
    """Steps of the warm-up, and the one at which the decay ends."""
    decay = _steps(args, state, "lr_decay_steps", "lr_decay_iters", "lr_decay_samples")
    decay = num_steps if decay is None else decay
    warmup = _steps(args, state, "lr_warmup_steps", "lr_warmup_iters", "lr_warmup_samples")
    fraction = args.get("lr_warmup_fraction")
    if not state and fraction is not None and decay is not None:
        warmup = round(fraction * decay)
    return warmup or 0, decay


def _wsd_decay(args: Keys) -> int | None:
    steps = _steps(args, {}, "wsd_decay_steps", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
    if (style := args.get("lr_wsd_decay_style", "linear")) != "linear":
        args.assumed[f"lr_wsd_decay_style {style}"] = "linear"
    return steps


def _steps(args: Keys, state: Mapping[str, Any], key: str, steps: str, samples: str) -> int | None:
    """A number of steps: by the scheduler, which has samples, or by arguments."""
    batch, given = args.get("global_batch_size"), args.get(steps)
    count = state.get(key, args.get(samples))
    if not count:
        return given if count is None else 0
    if not batch:
        args.assumed[f"{key}: {count:g} samples"] = "not used, without a global_batch_size"
        return given
    return round(count / batch)
