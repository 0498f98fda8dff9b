"""What must hold between several fields of a configuration.

Each rule is one small generator: it yields the path of a field and a message that says what is
wrong with its value and the way out. All rules are run and all that they yield is reported, so a
rule may not rely on another one having passed. Axis sizes are 1 or more here.

What is refused either cannot work or would silently not do what it says. A setting that is only
idle (`sequence_parallel` with one tensor rank, say) passes, so that a file can be run with other
axis sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from itertools import pairwise

from mxjax.config.schema import Config, MoEConfig

BYTE_TOKENIZER_SIZE = 257  # 256 bytes and the end of a document

type Findings = Iterator[tuple[str, str]]
type Rule = Callable[[Config], Findings]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Adds a rule to those that every configuration is checked against."""
    RULES.append(function)
    return function


# Model


@rule
def query_groups_divide_heads(c: Config) -> Findings:
    heads, groups = c.model.num_attention_heads, c.model.num_query_groups
    if groups and heads % groups:
        message = f"must divide model.num_attention_heads ({heads}); use a divisor of {heads}"
        yield "model.num_query_groups", message


@rule
def heads_divide_hidden_size(c: Config) -> Findings:
    heads = c.model.num_attention_heads
    if c.model.head_dim is None and c.model.hidden_size % heads:
        yield (
            "model.hidden_size",
            f"must be a multiple of model.num_attention_heads ({heads}) while model.head_dim is "
            "null; change one of them or set model.head_dim",
        )


@rule
def deterministic_attention(c: Config) -> Findings:
    if c.training.deterministic and c.model.attention_implementation == "cudnn":
        yield (
            "training.deterministic",
            "cannot hold with model.attention_implementation cudnn, whose backward pass adds in no "
            "fixed order; set that to auto or xla",
        )


@rule
def head_dim_fits_attention(c: Config) -> Findings:
    dim = c.model.attention_head_dim
    path = "model.head_dim" if c.model.head_dim else "model.hidden_size"
    if c.model.position_embedding == "rope" and dim % 2:
        yield path, f"gives heads of odd width {dim}, and rope turns pairs; make the width even"
    elif c.model.attention_implementation == "cudnn" and (dim % 8 or dim > 256):
        yield (
            path,
            f"gives heads of width {dim}, and cudnn needs a multiple of 8 up to 256; change it or "
            "set model.attention_implementation to auto",
        )


@rule
def cudnn_can_run(c: Config) -> Findings:
    if c.model.attention_implementation != "cudnn":
        return
    path = "model.attention_implementation"
    if c.training.compute_dtype != "bfloat16":
        yield path, "needs training.compute_dtype: bfloat16; set that, or use auto or xla"
    if c.model.attention_dropout:
        yield path, "cannot apply model.attention_dropout; set that to 0, or use auto or xla"
    if c.parallel.cpu_devices:
        yield path, "needs a GPU; set parallel.cpu_devices to 0, or use auto or xla"


@rule
def rotary_settings_have_rotary_positions(c: Config) -> Findings:
    if c.model.position_embedding == "learned" and c.model.rope_scaling is not None:
        yield (
            "model.rope_scaling",
            "does nothing with learned positions; set it to null or model.position_embedding to "
            "rope",
        )


@rule
def rope_scaling_band_is_not_empty(c: Config) -> Findings:
    scaling = c.model.rope_scaling
    if scaling is not None and scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if low >= high:
            message = f"must be less than high_freq_factor ({high}); lower it or raise that"
            yield "model.rope_scaling.low_freq_factor", message


@rule
def sequence_fits_positions(c: Config) -> Findings:
    longest = c.model.max_position_embeddings
    if c.training.seq_length > longest:
        message = (
            f"must be at most model.max_position_embeddings ({longest}); lower it or raise that"
        )
        yield "training.seq_length", message


@rule
def vocabulary_holds_tokenizer(c: Config) -> Findings:
    if c.data.source == "synthetic" and c.log.sample_tokens == 0:
        return
    if c.model.vocab_size < BYTE_TOKENIZER_SIZE:
        yield (
            "model.vocab_size",
            f"must hold the {BYTE_TOKENIZER_SIZE} ids of the byte tokenizer; raise it to at least "
            f"{BYTE_TOKENIZER_SIZE} (a multiple of parallel.tp)",
        )


# Mixture of experts


def moe_key_needs_experts(key: str, default: object, c: Config) -> Findings:
    if c.moe.num_experts == 0 and getattr(c.moe, key) != default:
        yield (
            f"moe.{key}",
            "does nothing while moe.num_experts is 0; set moe.num_experts or remove this",
        )


for _field in fields(MoEConfig):
    if _field.name != "num_experts":
        rule(partial(moe_key_needs_experts, _field.name, getattr(MoEConfig(), _field.name)))


@rule
def enough_experts_to_choose_from(c: Config) -> Findings:
    experts = c.moe.num_experts
    if experts and c.moe.router_topk > experts:
        message = f"must be at most moe.num_experts ({experts}); lower it or add experts"
        yield "moe.router_topk", message


@rule
def router_of_one_expert_can_learn(c: Config) -> Findings:
    if c.moe.num_experts == 0 or c.moe.router_topk > 1:
        return
    if c.moe.norm_topk_prob:
        message = "makes the weight of a single expert always 1, which teaches the router nothing"
        yield "moe.norm_topk_prob", f"{message}; set it to false or raise moe.router_topk"
    elif c.moe.score_function == "softmax" and not c.moe.router_pre_softmax:
        yield (
            "moe.router_topk",
            "softmax over a single chosen expert is always 1, which teaches the router nothing; "
            "set moe.router_pre_softmax to true or choose more experts",
        )


@rule
def sigmoid_has_no_softmax(c: Config) -> Findings:
    if c.moe.score_function == "sigmoid" and c.moe.router_pre_softmax:
        yield (
            "moe.router_pre_softmax",
            "contradicts moe.score_function: sigmoid; set it to false or the score function to "
            "softmax",
        )


@rule
def some_layer_has_experts(c: Config) -> Findings:
    layers = c.model.num_layers
    if c.moe.num_experts and c.moe.first_k_dense >= layers:
        yield (
            "moe.first_k_dense",
            f"must be less than model.num_layers ({layers}), or no layer has experts; lower it or "
            "set moe.num_experts to 0",
        )


@rule
def capacity_buckets_increase(c: Config) -> Findings:
    buckets = c.moe.capacity_buckets
    if any(small >= large for small, large in pairwise(buckets)):
        yield "moe.capacity_buckets", "must grow from entry to entry; sort it and drop repetitions"


# Axes


@rule
def axes_are_available(c: Config) -> Findings:
    names = {"pp": "pipeline", "cp": "context", "sp": "Ulysses sequence"}
    for axis, name in names.items():
        if getattr(c.parallel, axis) > 1:
            yield f"parallel.{axis}", f"{name} parallelism is not available yet; set it to 1"


@rule
def expert_parallel_has_experts(c: Config) -> Findings:
    if c.parallel.ep > 1 and c.moe.num_experts == 0:
        yield (
            "parallel.ep",
            "there are no experts to spread while moe.num_experts is 0; set it to 1 and use "
            "parallel.dp, or set moe.num_experts",
        )


@rule
def experts_divide_over_ranks(c: Config) -> Findings:
    experts, ep, tp = c.moe.num_experts, c.parallel.ep, c.parallel.tp
    if c.parallel.expert_tensor_parallel:
        ranks, over = ep, "parallel.ep"
    else:
        ranks, over = ep * tp, "parallel.ep * parallel.tp"
    if experts % ranks:
        message = f"must be a multiple of {over} ({ranks}); change it or the axis sizes"
        yield "moe.num_experts", message


def _tp_must_divide(path: str, value: int, tp: int) -> Findings:
    if value % tp:
        yield path, f"must be a multiple of parallel.tp ({tp}); change it or lower parallel.tp"


@rule
def tp_divides_heads(c: Config) -> Findings:
    yield from _tp_must_divide(
        "model.num_attention_heads", c.model.num_attention_heads, c.parallel.tp
    )


@rule
def tp_divides_query_groups(c: Config) -> Findings:
    groups, tp = c.model.num_query_groups, c.parallel.tp
    if groups and groups % tp and tp % groups:
        message = f"must be a multiple or a divisor of parallel.tp ({tp}); change one of them"
        yield "model.num_query_groups", message


@rule
def tp_divides_dense_mlp(c: Config) -> Findings:
    if c.moe.num_experts == 0 or c.moe.first_k_dense > 0:
        yield from _tp_must_divide("model.ffn_hidden_size", c.model.ffn_hidden_size, c.parallel.tp)


@rule
def tp_divides_expert_mlp(c: Config) -> Findings:
    if c.moe.num_experts == 0 or not c.parallel.expert_tensor_parallel:
        return
    if c.moe.moe_ffn_hidden_size is not None:
        expert = "moe.moe_ffn_hidden_size", c.moe.moe_ffn_hidden_size
    elif c.moe.first_k_dense == 0:
        expert = "model.ffn_hidden_size", c.model.ffn_hidden_size
    else:
        return  # as wide as the dense layers, which tp_divides_dense_mlp looks at
    for path, message in _tp_must_divide(*expert, c.parallel.tp):
        yield path, f"{message}, or set parallel.expert_tensor_parallel to false"


@rule
def tp_divides_shared_expert(c: Config) -> Findings:
    if c.moe.num_experts:
        yield from _tp_must_divide(
            "moe.shared_expert_intermediate_size",
            c.moe.shared_expert_intermediate_size,
            c.parallel.tp,
        )


@rule
def tp_divides_vocabulary(c: Config) -> Findings:
    yield from _tp_must_divide("model.vocab_size", c.model.vocab_size, c.parallel.tp)


@rule
def tp_divides_sequence(c: Config) -> Findings:
    if c.parallel.sequence_parallel:
        for path, message in _tp_must_divide(
            "training.seq_length", c.training.seq_length, c.parallel.tp
        ):
            yield path, f"{message}, or set parallel.sequence_parallel to false"


@rule
def folded_experts_divide_tokens(c: Config) -> Findings:
    tp = c.parallel.tp
    if c.moe.num_experts == 0 or c.parallel.expert_tensor_parallel or c.parallel.sequence_parallel:
        return
    parts = c.parallel.dp * c.parallel.ep * c.training.num_microbatches
    if c.training.global_batch_size // parts * c.training.seq_length % tp:
        yield (
            "training.seq_length",
            f"each rank's tokens of a microbatch are dealt out over parallel.tp ({tp}) with "
            "parallel.expert_tensor_parallel and parallel.sequence_parallel both false; make it a "
            f"multiple of {tp} or set one of those to true",
        )


@rule
def zero_divides_hidden_size(c: Config) -> Findings:
    if c.parallel.zero_stage == 0:
        return
    ranks = c.parallel.dp * c.parallel.ep * c.parallel.cp * c.parallel.sp
    if c.model.hidden_size % ranks:
        yield (
            "model.hidden_size",
            f"must be a multiple of the {ranks} data-like ranks (dp * ep * cp * sp) that ZeRO "
            "shards it over; set parallel.zero_stage to 0 or use other axis sizes",
        )


# Training and optimizer


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


# Data


@rule
def files_are_named_if_read(c: Config) -> Findings:
    source = c.data.source
    if source != "synthetic" and not c.data.paths:
        yield "data.paths", f"data.source: {source} needs files; name files, folders or globs"
    if source == "synthetic":
        for key in ("paths", "validation_paths", "exclude"):
            if getattr(c.data, key):
                yield (
                    f"data.{key}",
                    "does nothing with data.source: synthetic; set data.source to text or jsonl, "
                    "or remove this",
                )


@rule
def synthetic_data_has_no_epochs(c: Config) -> Findings:
    if c.data.source == "synthetic" and c.data.num_epochs is not None:
        yield (
            "data.num_epochs",
            "synthetic data has no end; set it to null and give training.num_steps",
        )


@rule
def evaluation_has_data(c: Config) -> Findings:
    if c.training.eval_interval == 0 or c.data.source == "synthetic":
        return
    if c.data.validation_fraction == 0 and not c.data.validation_paths:
        yield (
            "training.eval_interval",
            "there is nothing to evaluate on; raise data.validation_fraction, name "
            "data.validation_paths, or set this to 0",
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
