"""Rules for the sections `training` and `optimizer`, and what is left; see `registry.py`."""

from __future__ import annotations

from mxjax.config.rules.registry import Findings, rule
from mxjax.config.schema import Config


@rule
def batch_divides_over_ranks(c: Config) -> Findings:
    dp, ep, microbatches = c.parallel.dp, c.parallel.ep, c.training.num_microbatches
    batch, parts = c.training.global_batch_size, dp * ep * microbatches
    if batch % parts:
        yield (
            "training.global_batch_size",
            "must be a multiple of parallel.dp * parallel.ep * training.num_microbatches "
            f"({dp} * {ep} * {microbatches} = {parts}); use {-(-batch // parts) * parts}, or "
            "change those",
        )


@rule
def masters_are_not_coarser_than_compute(c: Config) -> Findings:
    if c.training.param_dtype == "bfloat16" and c.training.compute_dtype == "float32":
        yield (
            "training.param_dtype",
            "float32 compute gains nothing from bfloat16 master weights; set it to float32 or "
            "training.compute_dtype to bfloat16",
        )


@rule
def warmup_ends_in_the_run(c: Config) -> Findings:
    steps = c.training.num_steps
    if c.optimizer.warmup_steps > steps:
        message = f"must be at most training.num_steps ({steps}); lower it or train longer"
        yield "optimizer.warmup_steps", message


@rule
def min_lr_is_below_lr(c: Config) -> Findings:
    if c.optimizer.schedule != "constant" and c.optimizer.min_lr > c.optimizer.lr:
        yield (
            "optimizer.min_lr",
            f"must be at most optimizer.lr ({c.optimizer.lr}); lower it or raise that",
        )


@rule
def constant_schedule_has_no_decay(c: Config) -> Findings:
    if c.optimizer.schedule != "constant":
        return
    message = "does nothing with optimizer.schedule: constant; remove it or use cosine or wsd"
    if c.optimizer.min_lr > 0:
        yield "optimizer.min_lr", message
    if c.optimizer.decay_steps is not None:
        yield "optimizer.decay_steps", message


@rule
def cosine_decay_follows_warmup(c: Config) -> Findings:
    warmup, end = c.optimizer.warmup_steps, c.optimizer.decay_steps
    if c.optimizer.schedule == "cosine" and end is not None and end <= warmup:
        yield (
            "optimizer.decay_steps",
            f"is the step at which the cosine ends and must be more than optimizer.warmup_steps "
            f"({warmup}); raise it, or set it to null for the last step",
        )


@rule
def wsd_fits_in_the_run(c: Config) -> Findings:
    if c.optimizer.schedule != "wsd":
        return
    warmup, decay, steps = c.optimizer.warmup_steps, c.optimizer.decay_steps, c.training.num_steps
    if decay == 0:
        yield "optimizer.decay_steps", "wsd needs a decay; raise it or use schedule: constant"
    decay = steps // 10 if decay is None else decay
    if warmup <= steps < warmup + decay:
        yield (
            "optimizer.decay_steps",
            f"a decay of {decay} steps does not fit after optimizer.warmup_steps ({warmup}) in "
            f"training.num_steps ({steps}); lower one of them or train longer",
        )


@rule
def moments_dtype_has_moments(c: Config) -> Findings:
    if c.optimizer.name == "adafactor" and c.optimizer.moments_dtype is not None:
        yield (
            "optimizer.moments_dtype",
            "does nothing with optimizer.name: adafactor, which keeps small factors in place of "
            "moments; remove it or use another optimizer",
        )


# Checkpoints, log, run directory


@rule
def restore_step_is_in_the_run(c: Config) -> Findings:
    restore, steps = c.checkpoint.restore_step, c.training.num_steps
    if restore is not None and restore > steps:
        yield (
            "checkpoint.restore_step",
            f"must be at most training.num_steps ({steps}); lower it or train longer",
        )


@rule
def kept_checkpoints_are_saved(c: Config) -> Findings:
    if c.checkpoint.keep_every and c.checkpoint.save_interval == 0:
        yield (
            "checkpoint.keep_every",
            "does nothing while checkpoint.save_interval is 0; set that or remove this",
        )


@rule
def training_state_comes_from_somewhere(c: Config) -> Findings:
    if c.init_from.training_state and c.init_from.path is None:
        yield (
            "init_from.training_state",
            "does nothing while init_from.path is null; set that or remove this",
        )


@rule
def profile_is_in_the_run(c: Config) -> Findings:
    if c.log.profile_steps is None:
        return
    (first, last), steps = c.log.profile_steps, c.training.num_steps
    if first > last:
        yield "log.profile_steps", f"the first step comes after the last; write [{last}, {first}]"
    elif last > steps:
        yield (
            "log.profile_steps",
            f"must end by training.num_steps ({steps}); use earlier steps or train longer",
        )


@rule
def sample_fits_in_a_sequence(c: Config) -> Findings:
    tokens, room = c.log.sample_tokens, c.training.seq_length
    if tokens == 0:
        return
    prompt = len(c.log.sample_prompt.encode())
    if prompt == 0:
        yield "log.sample_prompt", "a sample needs a start; write one or set log.sample_tokens to 0"
    elif prompt + tokens > room:
        yield (
            "log.sample_tokens",
            f"with the {prompt} bytes of log.sample_prompt must be at most training.seq_length "
            f"({room}); lower it or shorten the prompt",
        )


@rule
def run_dir_is_named(c: Config) -> Findings:
    if not c.run_dir.strip():
        yield "run_dir", "must name a folder, such as runs/default"
    elif "://" in c.run_dir:
        yield "run_dir", "must be a folder; mount the remote storage and name its folder"
