"""Rules for the section `parallel`: what its axes must divide; see `registry.py`."""

from __future__ import annotations

import math

from mxjax.config.rules.registry import Findings, rule
from mxjax.config.schema import Config


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
def tp_and_sp_divide_heads(c: Config) -> Findings:
    heads, sp, tp = c.model.num_attention_heads, c.parallel.sp, c.parallel.tp
    if heads % (sp * tp) == 0:
        return
    if sp == 1:
        yield from _tp_must_divide("model.num_attention_heads", heads, tp)
    else:
        yield (
            "model.num_attention_heads",
            f"parallel.sp and parallel.tp share out the heads, so it must be a multiple of their "
            f"product ({sp} * {tp} = {sp * tp}); change it, or use parallel.cp instead of "
            "parallel.sp",
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
def axes_divide_sequence(c: Config) -> Findings:
    cp, sp, length = c.parallel.cp, c.parallel.sp, c.training.seq_length
    tp = c.parallel.tp if c.parallel.sequence_parallel else 1
    if cp * sp == 1:
        for path, message in _tp_must_divide("training.seq_length", length, tp):
            yield path, f"{message}, or set parallel.sequence_parallel to false"
        return
    # Two chunks for each cp rank, and an equal part of them for each sp and tp rank.
    parts = math.lcm(c.parallel.sequence_chunks, cp * sp * tp)
    if length % parts:
        yield (
            "training.seq_length",
            f"must be a multiple of {parts}, for parallel.cp ({cp}, which cuts it into 2 * cp "
            f"chunks), parallel.sp ({sp}) and, with parallel.sequence_parallel, parallel.tp "
            f"({c.parallel.tp}); use {-(-length // parts) * parts}, or lower those",
        )


@rule
def pairwise_rotation_has_pairs(c: Config) -> Findings:
    cp = c.parallel.cp
    if c.parallel.cp_rotation == "alltoall" and cp > 1 and cp % 2:
        yield (
            "parallel.cp_rotation",
            f"alltoall swaps within pairs of ranks, for which parallel.cp ({cp}) must be even; use "
            "ppermute or another parallel.cp",
        )


@rule
def folded_experts_divide_tokens(c: Config) -> Findings:
    tp = c.parallel.tp
    if c.moe.num_experts == 0 or c.parallel.expert_tensor_parallel or c.parallel.sequence_parallel:
        return
    sequences = c.training.global_batch_size // (
        c.parallel.dp * c.parallel.ep * c.training.num_microbatches
    )
    if sequences * (c.training.seq_length // (c.parallel.cp * c.parallel.sp)) % tp:
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
    if c.model.hidden_size % (ranks * c.parallel.pp):
        which = "data-like ranks (dp * ep * cp * sp)"
        if c.parallel.pp > 1:
            which = "ranks (pp * dp * ep * cp * sp, pp for embedding and head)"
        yield (
            "model.hidden_size",
            f"must be a multiple of the {ranks * c.parallel.pp} {which} that ZeRO "
            "shards it over; set parallel.zero_stage to 0 or use other axis sizes",
        )
