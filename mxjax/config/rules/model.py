"""Rules for the sections `model` and `moe`; see `registry.py`."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from itertools import pairwise

from mxjax.config.rules.registry import Findings, rule
from mxjax.config.schema import Config, MoEConfig

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
    if c.model.mla is None and c.model.head_dim is None and c.model.hidden_size % heads:
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
            "fixed order; set that to auto, mosaic or xla",
        )


@rule
def head_dim_fits_attention(c: Config) -> Findings:
    dim = c.model.attention_head_dim
    path = "model.head_dim" if c.model.head_dim else "model.hidden_size"
    if c.model.mla is not None:
        path = "model.mla.qk_nope_head_dim"
    elif c.model.position_embedding == "rope" and dim % 2:
        yield path, f"gives heads of odd width {dim}, and rope turns pairs; make the width even"
        return
    if c.model.attention_implementation == "cudnn" and (dim % 8 or dim > 256):
        yield (
            path,
            f"gives heads of width {dim}, and cudnn needs a multiple of 8 up to 256; change it or "
            "set model.attention_implementation to auto",
        )
    # Without MLA values are as wide as keys.
    widest = 128 if c.model.mla is None else 192
    if c.model.attention_implementation == "mosaic" and (dim % 64 or dim > widest):
        yield (
            path,
            f"gives heads of width {dim}, and mosaic needs a multiple of 64 up to {widest}; change "
            "it or set model.attention_implementation to auto",
        )


@rule
def value_width_fits_attention(c: Config) -> Findings:
    if c.model.mla is None:
        return
    path, width, keys = "model.mla.v_head_dim", c.model.mla.v_head_dim, c.model.mla.qk_head_dim
    if c.model.attention_implementation == "mosaic" and (width % 64 or width > 128):
        yield (
            path,
            "must be 64 or 128 for mosaic; change it or set model.attention_implementation to auto",
        )
    if c.model.attention_implementation == "cudnn" and width > keys:
        yield (
            path,
            f"must be up to the width of keys ({keys}) for cudnn; change it or set "
            "model.attention_implementation to auto",
        )


@rule
def latent_attention_has_its_own_sizes(c: Config) -> Findings:
    if c.model.mla is None:
        return
    message = "does nothing with model.mla, which has its own; set it to null or model.mla to null"
    for key in ("num_query_groups", "head_dim"):
        if getattr(c.model, key) is not None:
            yield f"model.{key}", message
    bias = "latent attention has no biases; set it to false or model.mla to null"
    for key in ("add_qkv_bias", "add_bias_linear"):
        if getattr(c.model, key):
            yield f"model.{key}", bias
    if c.model.qk_layernorm:
        yield (
            "model.qk_layernorm",
            "model.mla norms its latents, always, and no heads; set it to false or model.mla to "
            "null",
        )


@rule
def latent_attention_has_rotary_positions(c: Config) -> Findings:
    if c.model.mla is None:
        return
    if c.model.position_embedding != "rope":
        yield "model.position_embedding", "model.mla needs rotary positions; set it to rope"
    if c.model.mla.qk_rope_head_dim % 2:
        yield "model.mla.qk_rope_head_dim", "must be even, since rope turns pairs; make it even"


@rule
def zero_divides_latents(c: Config) -> Findings:
    if c.model.mla is None or c.parallel.zero_stage == 0:
        return
    ranks = c.parallel.dp * c.parallel.ep * c.parallel.cp * c.parallel.sp
    named = "data-like ranks (dp * ep * cp * sp)"
    if c.model.mtp_num_layers and c.parallel.pp > 1:  # whose layers no stage has for itself
        ranks *= c.parallel.pp
        named = "ranks (pp * dp * ep * cp * sp, pp for multi-token prediction)"
    for key in ("q_lora_rank", "kv_lora_rank"):
        if (getattr(c.model.mla, key) or 0) % ranks:
            yield (
                f"model.mla.{key}",
                f"must be a multiple of the {ranks} {named} that ZeRO shards it over; set "
                "parallel.zero_stage to 0 or use other axis sizes",
            )


@rule
def multi_token_prediction_can_run(c: Config) -> Findings:
    ahead = c.model.mtp_num_layers
    if ahead == 0:
        return
    if c.model.position_embedding == "learned":
        yield (
            "model.mtp_num_layers",
            "needs rotary positions; set it to 0 or model.position_embedding to rope",
        )
    if ahead >= c.training.seq_length:
        yield (
            "model.mtp_num_layers",
            f"looks further ahead than training.seq_length ({c.training.seq_length}); lower it",
        )


@rule
def attention_kernel_can_run(c: Config) -> Findings:
    if c.model.attention_implementation not in ("cudnn", "mosaic"):
        return
    path = "model.attention_implementation"
    if c.training.compute_dtype != "bfloat16":
        yield path, "needs training.compute_dtype: bfloat16; set that, or use auto or xla"
    if c.model.attention_dropout:
        yield path, "cannot apply model.attention_dropout; set that to 0, or use auto or xla"
    if c.parallel.cpu_devices:
        yield path, "needs a GPU; set parallel.cpu_devices to 0, or use auto or xla"
    chunks = c.parallel.sequence_chunks
    named = c.model.attention_implementation
    unit = 128 if named == "mosaic" else 2 if c.data.document_mask else 1
    if c.training.seq_length % (unit * chunks):
        yield (
            "training.seq_length",
            f"must be a multiple of {unit * chunks} for model.attention_implementation {named}"
            f"{' with parallel.cp' if chunks > 1 else ''}; change it, or use auto",
        )


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
def yarn_ramp_goes_down(c: Config) -> Findings:
    scaling = c.model.rope_scaling
    if scaling is not None and scaling.kind == "yarn" and scaling.beta_slow >= scaling.beta_fast:
        message = f"must be less than beta_fast ({scaling.beta_fast}); lower it or raise that"
        yield "model.rope_scaling.beta_slow", message


@rule
def yarn_has_a_base(c: Config) -> Findings:
    scaling = c.model.rope_scaling
    if scaling is not None and scaling.kind == "yarn" and c.model.rope_theta <= 1:
        yield "model.rope_theta", "must be more than 1 for YaRN; raise it (10000 is usual)"


@rule
def sequence_fits_positions(c: Config) -> Findings:
    longest = c.model.max_position_embeddings
    if c.training.seq_length > longest:
        message = (
            f"must be at most model.max_position_embeddings ({longest}); lower it or raise that"
        )
        yield "training.seq_length", message


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
def groups_of_experts_fit(c: Config) -> Findings:
    moe, groups, chosen = c.moe, c.moe.num_groups, c.moe.group_topk
    if groups is None:
        if chosen is not None:
            yield "moe.group_topk", "does nothing while moe.num_groups is null; set that too"
        if moe.group_score != "sum":
            yield "moe.group_score", "does nothing while moe.num_groups is null; set that too"
        return
    if moe.num_experts % groups:
        message = f"must divide moe.num_experts ({moe.num_experts}); use a divisor of that"
        yield "moe.num_groups", message
        return
    if chosen is None or chosen > groups:
        message = f"must be from 1 to moe.num_groups ({groups}); set it, or both to null"
        yield "moe.group_topk", message
        return
    room = chosen * (moe.num_experts // groups)
    if moe.router_topk > room:
        yield (
            "moe.router_topk",
            f"is more than the {room} experts of moe.group_topk ({chosen}) groups; lower it or "
            "raise that",
        )
    if moe.group_score == "sum" and moe.router_topk % chosen:
        yield (
            "moe.group_topk",
            f"must divide moe.router_topk ({moe.router_topk}), since groups are compared by their "
            "best router_topk / group_topk scores; change one of them or set moe.group_score to "
            "max",
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


@rule
def own_router_can_be_imported(c: Config) -> Findings:
    if c.moe.num_experts == 0 or c.moe.router is None:
        return
    from mxjax.moe.router_class import router_class  # needs JAX, which reading a file does not

    try:
        router_class(c.moe.router)
    except ValueError as error:
        yield "moe.router", str(error)
