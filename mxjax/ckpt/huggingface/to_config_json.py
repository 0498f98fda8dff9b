"""A ``config.json`` for one of our configurations: the reverse of `config_json`.

Rotary settings are written in both spellings, so that `transformers` 4 and 5 and what else reads
such files find them.
"""

from __future__ import annotations

from typing import Any

from mxjax.ckpt.errors import ExportError
from mxjax.ckpt.huggingface.config_json import LATENT_EPSILON
from mxjax.ckpt.mapping.huggingface import Family
from mxjax.config.schema import ModelConfig, MoEConfig, RopeScalingConfig

_ARCHITECTURES = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
    Family.QWEN3_MOE: "Qwen3MoeForCausalLM",
    Family.MIXTRAL: "MixtralForCausalLM",
    Family.DEEPSEEK_V3: "DeepseekV3ForCausalLM",
}


def to_config_json(model: ModelConfig, moe: MoEConfig, dtype: str) -> dict[str, Any]:
    """Keys and values; `model_type` says the family.

    Args:
      dtype: of the weights, ``float32`` or ``bfloat16``.

    Raises:
      ExportError: no family computes the same; what is in the way is named.
    """
    family = _family(model, moe)
    if problems := _not_there(family, model, moe):
        raise ExportError(
            f"The run cannot be exported: the nearest family, {family}, has nothing that computes"
            " the same for: " + "; ".join(problems)
        )
    rope = _rope(model)
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    config = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": str(family),
        "dtype": dtype,
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_method_std,
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "rope_parameters": rope,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling if model.rope_scaling else None,
        "use_cache": True,
        # Which tokens begin and end a text is the tokenizer's business.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    match family:
        case Family.DEEPSEEK_V3:
            return config | _deepseek_v3(model, moe)
        case Family.MIXTRAL:
            config |= _mixtral(model, moe)
        case Family.QWEN3_MOE:
            config |= _qwen3_moe(model, moe)
        case Family.LLAMA:
            config["mlp_bias"] = False
    return config | {
        "num_key_value_heads": model.attention_groups,
        "head_dim": model.attention_head_dim,
    }


def differences(model: ModelConfig) -> list[str]:
    """Where the family computes something slightly different."""
    if model.mla is None or model.norm_epsilon == LATENT_EPSILON:
        return []
    return [
        f"model.norm_epsilon: {model.norm_epsilon}; norms of latents have {LATENT_EPSILON} in"
        " transformers"
    ]


def _family(model: ModelConfig, moe: MoEConfig) -> Family:
    if model.mla is not None:
        return Family.DEEPSEEK_V3
    if moe.num_experts:
        return Family.QWEN3_MOE if model.qk_layernorm else Family.MIXTRAL
    return Family.QWEN3 if model.qk_layernorm else Family.LLAMA


def _not_there(family: Family, model: ModelConfig, moe: MoEConfig) -> list[str]:
    """Settings that the family has nothing for, ``key: value``."""
    wanted: dict[str, Any] = {
        "model.position_embedding": "rope",
        "model.norm": "rmsnorm",
        "model.activation": "swiglu",
        "model.add_bias_linear": False,
        "model.add_qkv_bias": False,
        "moe.router": None,
        "moe.force_balanced": False,
    }
    latent = family is Family.DEEPSEEK_V3
    if not latent:
        wanted["model.mtp_num_layers"] = 0
        if moe.num_experts:
            wanted |= {
                "moe.score_function": "softmax",
                "moe.num_groups": None,
                "moe.routed_scaling_factor": 1.0,
                "moe.expert_bias_update_rate": 0.0,
                "moe.shared_expert_intermediate_size": 0,
            }
        if family is Family.MIXTRAL:
            wanted["moe.first_k_dense"] = 0
    elif moe.num_experts:
        wanted["moe.score_function"] = "sigmoid"
    sections = {"model": model, "moe": moe}
    found = {key: getattr(sections[key.split(".")[0]], key.split(".")[1]) for key in wanted}
    problems = [f"{key}: {found[key]}" for key, value in wanted.items() if found[key] != value]
    problems += _scaling_problems(model.rope_scaling, latent)
    if latent:
        problems += _latent_problems(model, moe)
    if family is Family.MIXTRAL and not _chosen_sum_to_one(moe):
        problems.append("moe.norm_topk_prob: False, with moe.router_pre_softmax")
    if family is Family.LLAMA and model.hidden_size % model.num_attention_heads:
        problems.append(
            f"model.hidden_size: {model.hidden_size}, no multiple of num_attention_heads"
        )
    return problems


def _chosen_sum_to_one(moe: MoEConfig) -> bool:
    """Weights of a token's experts."""
    return moe.norm_topk_prob or not moe.router_pre_softmax


def _scaling_problems(scaling: RopeScalingConfig | None, latent: bool) -> list[str]:
    if scaling is None or scaling.kind != "yarn":
        return []
    if latent and scaling.mscale and scaling.mscale_all_dim:
        return []
    if (scaling.mscale, scaling.mscale_all_dim) == (1, 0):
        return []
    return [
        f"model.rope_scaling.mscale: {scaling.mscale}, with mscale_all_dim: "
        f"{scaling.mscale_all_dim}"
    ]


def _latent_problems(model: ModelConfig, moe: MoEConfig) -> list[str]:
    problems = []
    if moe.num_experts == 0:
        return ["moe.num_experts: 0, with model.mla"]
    width, shared = (
        moe.moe_ffn_hidden_size or model.ffn_hidden_size,
        (moe.shared_expert_intermediate_size),
    )
    if shared == 0 or shared % width:
        problems.append(
            f"moe.shared_expert_intermediate_size: {shared}, no multiple of the width of an expert,"
            f" {width}"
        )
    if moe.num_groups is not None:
        if moe.group_score != "sum" or moe.router_topk != 2 * moe.group_topk:
            problems.append(
                f"moe.group_score: {moe.group_score}, of the best {moe.router_topk} /"
                f" {moe.group_topk} of a group (there the sum of the best two)"
            )
    elif moe.num_experts == 1:
        problems.append("moe.num_experts: 1")
    return problems


def _rope(model: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    scaling = model.rope_scaling
    if scaling is None:
        return rope
    rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        rope["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    if scaling.kind == "llama3":
        rope["low_freq_factor"] = scaling.low_freq_factor
        rope["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.mscale_all_dim:
            rope |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    return rope


def _mixtral(model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    return {
        "intermediate_size": moe.moe_ffn_hidden_size or model.ffn_hidden_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.router_topk,
        "router_aux_loss_coef": moe.aux_loss_coeff,
        "sliding_window": None,
    }


def _qwen3_moe(model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    return {
        "moe_intermediate_size": moe.moe_ffn_hidden_size or model.ffn_hidden_size,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.router_topk,
        "norm_topk_prob": _chosen_sum_to_one(moe),
        "router_aux_loss_coef": moe.aux_loss_coeff,
        "mlp_only_layers": list(range(moe.first_k_dense)),
        "decoder_sparse_step": 1,
    }


def _deepseek_v3(model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    mla = model.mla
    width = moe.moe_ffn_hidden_size or model.ffn_hidden_size
    return {
        "num_key_value_heads": model.num_attention_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_interleave": True,
        "first_k_dense_replace": moe.first_k_dense,
        "moe_layer_freq": 1,
        "moe_intermediate_size": width,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_expert_intermediate_size // width,
        "num_experts_per_tok": moe.router_topk,
        "n_group": moe.num_groups or 1,
        "topk_group": moe.group_topk or 1,
        "norm_topk_prob": moe.norm_topk_prob,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": model.mtp_num_layers,
    }
