"""Parameters, model FLOPs and peak FLOP/s, all computed from the configuration alone.

Model FLOPs count the matrix products that the mathematics needs, not what the hardware happens to
execute: recomputation and padding of expert buffers add nothing, so that figures of different
settings can be compared (Narayanan et al. 2021, PaLM appendix B).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from mxjax.config.schema import MLAConfig, ModelConfig, MoEConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters of a model."""

    total: int
    """All parameters, those of multi-token prediction included. The router's balancing bias is
    state, not a parameter."""
    active: int
    """Parameters that one token uses: `total` without the routed experts not chosen for it."""
    matmul_active: int
    """Elements of the matrices that one token is multiplied with: the head (tied or not, once more
    for each module of multi-token prediction) and the router count; embedding lookups, biases and
    norms do not."""


def parameter_counts(model: ModelConfig, moe: MoEConfig) -> ParameterCounts:
    """Counts the parameters of the model that `model` and `moe` describe."""
    hidden, num_layers = model.hidden_size, model.num_layers
    num_moe_layers = num_layers - moe.first_k_dense if moe.num_experts else 0
    num_dense_layers = num_layers - num_moe_layers
    # A module of multi-token prediction is one more layer like the last, and what joins it on.
    ahead = model.mtp_num_layers
    num_layers += ahead
    num_moe_layers += ahead if moe.num_experts else 0
    num_dense_layers += 0 if moe.num_experts else ahead

    embeddings = model.vocab_size * hidden
    if model.position_embedding == "learned":
        embeddings += model.max_position_embeddings * hidden
    head = model.vocab_size * hidden

    attention = _attention_matrices(model)
    dense_mlp = _mlp_matrices(model, model.ffn_hidden_size)
    expert = _mlp_matrices(model, moe.moe_ffn_hidden_size or model.ffn_hidden_size)
    shared_expert = _mlp_matrices(model, moe.shared_expert_intermediate_size)
    router = hidden * moe.num_experts

    every_token = (
        num_layers * attention
        + num_dense_layers * dense_mlp
        + num_moe_layers * (router + shared_expert)
        + ahead * 2 * hidden**2
    )
    vectors = (
        (2 * num_layers + 1 + 3 * ahead) * _norm_vectors(model)
        + num_layers * (_attention_biases(model) + _attention_norms(model))
        + num_dense_layers * _dense_mlp_biases(model)
    )
    total = (
        embeddings
        + vectors
        + every_token
        + num_moe_layers * moe.num_experts * expert
        + (0 if model.tie_embeddings else head)
    )
    return ParameterCounts(
        total=total,
        active=total - num_moe_layers * (moe.num_experts - moe.router_topk) * expert,
        matmul_active=every_token + num_moe_layers * moe.router_topk * expert + (1 + ahead) * head,
    )


def model_flops_per_token(model: ModelConfig, moe: MoEConfig, seq_length: int) -> int:
    """FLOPs of forward and backward per token: `6 * N + 6 * L * H * (D + E) * S / 2`.

    N is `ParameterCounts.matmul_active`, L the number of layers (and modules of multi-token
    prediction), H the number of query heads, D the width of a query and E of a value head, and S
    `seq_length`. The halving is for causal attention. Document masks are not subtracted: each
    sequence counts as one document.
    """
    layers = model.num_layers + model.mtp_num_layers
    widths = model.attention_head_dim + model.value_head_dim
    attention = 6 * layers * model.num_attention_heads * widths * seq_length
    return 6 * parameter_counts(model, moe).matmul_active + attention // 2


def peak_flops(device_kind: str, compute_dtype: Literal["bfloat16", "float32"]) -> float | None:
    """Peak FLOP/s of one device without sparsity, from its data sheet.

    `device_kind` is `jax.Device.device_kind`. For float32 it is the peak of TF32 where a GPU has
    it, which JAX's default matrix precision uses. None if the device is not in the table (nor
    is a MIG slice of a GPU) or has no published peak for this type.
    """
    words = set(re.split(r"[ -]", device_kind.lower()))
    if words & {"mig", "laptop", "d"}:  # parts of a GPU and weaker chips sold under its name
        return None
    for name, bfloat16, float32 in _PEAK_TFLOPS:
        if words.issuperset(name.split()):
            tflops = bfloat16 if compute_dtype == "bfloat16" else float32
            return None if tflops is None else tflops * 1e12
    return None


# (words that the device kind contains, bfloat16, float32), in TFLOP/s; the first match counts, so
# variants stand before the plain name.
_PEAK_TFLOPS: tuple[tuple[str, float | None, float | None], ...] = (
    ("gb200", 2500, 1250),
    ("b200", 2250, 1125),
    ("b100", 1750, 875),
    ("gh200", 989.4, 494.7),
    ("h200 nvl", 835.5, 417.5),
    ("h200", 989.4, 494.7),
    ("h100 pcie", 756, 378),
    ("h100 nvl", 835.5, 417.5),
    ("h100", 989.4, 494.7),
    ("a100", 312, 156),
    ("l40s", 362, 183),
    ("a10", 125, 62.5),
    ("rtx 4090", 165.2, 82.6),
    ("v100 pcie", None, 14),
    ("v100", None, 15.7),
    ("tpu v4 lite", None, None),
    ("tpu v4", 275, None),
    ("tpu v5 lite", 197, None),
    ("tpu v5e", 197, None),
    ("tpu v5", 459, None),
    ("tpu v5p", 459, None),
    ("tpu v6 lite", 918, None),
    ("tpu v6e", 918, None),
)


def _attention_matrices(model: ModelConfig) -> int:
    """Query and output [hidden, heads * head_dim], key and value [hidden, groups * head_dim]; or
    those of latent attention, which it trains with."""
    if model.mla is not None:
        return _latent_attention_matrices(model.hidden_size, model.num_attention_heads, model.mla)
    heads = 2 * model.num_attention_heads + 2 * model.attention_groups
    return model.hidden_size * heads * model.attention_head_dim


def _latent_attention_matrices(hidden: int, heads: int, mla: MLAConfig) -> int:
    queries = hidden * heads * mla.qk_head_dim
    if mla.q_lora_rank is not None:
        queries = mla.q_lora_rank * (hidden + heads * mla.qk_head_dim)
    down = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return queries + down + up + heads * mla.v_head_dim * hidden


def _attention_norms(model: ModelConfig) -> int:
    """Of latents, or of query and key heads."""
    if model.mla is not None:
        return (model.mla.q_lora_rank or 0) + model.mla.kv_lora_rank
    return 2 * model.attention_head_dim if model.qk_layernorm else 0


def _attention_biases(model: ModelConfig) -> int:
    qkv = (model.num_attention_heads + 2 * model.attention_groups) * model.attention_head_dim
    return model.add_qkv_bias * qkv + model.add_bias_linear * model.hidden_size


def _num_up_matrices(model: ModelConfig) -> int:
    """SwiGLU has a gate beside the up projection."""
    return 2 if model.activation == "swiglu" else 1


def _mlp_matrices(model: ModelConfig, ffn_hidden_size: int) -> int:
    return (_num_up_matrices(model) + 1) * model.hidden_size * ffn_hidden_size


def _dense_mlp_biases(model: ModelConfig) -> int:
    """Experts, routed or shared, never have biases."""
    width = _num_up_matrices(model) * model.ffn_hidden_size + model.hidden_size
    return model.add_bias_linear * width


def _norm_vectors(model: ModelConfig) -> int:
    return (2 if model.norm == "layernorm" else 1) * model.hidden_size
