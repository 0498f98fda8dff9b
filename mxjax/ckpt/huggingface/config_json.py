"""Our configuration out of a ``config.json``.

Both spellings are read: that of `transformers` 5 (``rope_parameters``, ``dtype``) and that of the
files of before (``rope_theta``, ``rope_scaling``, ``torch_dtype``). Where a key is absent, the
default of `transformers` is taken and the user told of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.keys import Keys
from mxjax.ckpt.mapping.huggingface import Family
from mxjax.config.schema import TrainingConfig

LATENT_EPSILON = 1e-6
"""Of the norms of DeepSeek-V3's latents in `transformers`, whatever ``rms_norm_eps`` says."""

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleave": (None, True),
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
    "moe_layer_freq": (None, 1),
    "decoder_sparse_step": (None, 1),
}
"""Values of keys that mean what is computed here."""

_ALLOWED_ROPE: dict[str, tuple[Any, ...]] = {
    "attention_factor": (None,),
    "partial_rotary_factor": (None, 1.0),
    "truncate": (None, True),
}
"""The same of ``rope_parameters``."""

_OF_THE_RUN = re.compile(
    r"architectures|model_type|auto_map|_name_or_path|transformers_version|dtype|torch_dtype"
    r"|use_cache|pretraining_tp|ep_size|output_\w+|pad_token_id|quantization_config"
    r"|head_dim|qk_head_dim|num_key_value_heads|sliding_window|max_window_layers|num_mtp_layers"
)
"""Keys that say nothing of the model, or nothing that others do not say: not listed as left out."""

_DEFAULT_GROUPS = {Family.QWEN3: 32, Family.QWEN3_MOE: 4, Family.MIXTRAL: 8}
_DEFAULT_THETA = {Family.MIXTRAL: 1000000.0}


@dataclass
class FromConfigJson:
    """What a ``config.json`` leads to.

    Attributes:
      settings: sections of a configuration, as in a YAML file.
      assumed: keys that are absent or without counterpart, with the value taken instead.
      not_mapped: keys without a counterpart here, with their values.
    """

    family: Family
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    assumed: dict[str, Any] = field(default_factory=dict)
    not_mapped: dict[str, Any] = field(default_factory=dict)


def from_config_json(values: Mapping[str, Any], names: set[str]) -> FromConfigJson:
    """Sections `model`, `moe` and `training`.

    Args:
      names: of the tensors in the folder.

    Raises:
      CheckpointFormatError: it is of another family, the model has parts that there are not here,
        or keys are missing.
    """
    kind = values.get("model_type")
    if kind not in tuple(Family):
        raise CheckpointFormatError(
            f"config.json has model_type {kind!r}; imported are {', '.join(Family)}."
        )
    family, keys = Family(kind), Keys(values, "config.json")
    model = _model(keys, family) | _positions(keys, family)
    moe: dict[str, Any] = {}
    match family:
        case Family.MIXTRAL:
            moe = _mixtral(keys)
        case Family.QWEN3_MOE:
            moe = _qwen3_moe(keys)
        case Family.DEEPSEEK_V3:
            model |= _latent_attention(keys, model)
            moe = _deepseek_v3(keys)
            model |= _ahead(keys, model["num_layers"], names)
    keys.allow(_ALLOWED)
    keys.refuse()
    half = keys.get("dtype") or keys.get("torch_dtype") or "float32"
    training = {
        "compute_dtype": "float32" if half == "float32" else "bfloat16",
        "seq_length": min(model["max_position_embeddings"], TrainingConfig().seq_length),
    }
    settings = {"model": model, "training": training} | ({"moe": moe} if moe else {})
    return FromConfigJson(family, settings, keys.assumed, keys.rest(_OF_THE_RUN.fullmatch))


def _model(keys: Keys, family: Family) -> dict[str, Any]:
    heads, hidden = keys.need("num_attention_heads"), keys.need("hidden_size")
    layers, longest = keys.need("num_hidden_layers"), keys.need("max_position_embeddings")
    model = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": keys.need("intermediate_size"),
        "num_attention_heads": heads,
        "vocab_size": keys.need("vocab_size"),
        "max_position_embeddings": longest,
        "norm_epsilon": keys.assume("rms_norm_eps", 1e-5 if family is Family.MIXTRAL else 1e-6),
        "tie_embeddings": keys.get("tie_word_embeddings", False),
        "init_method_std": keys.get("initializer_range", 0.02),
        "attention_dropout": keys.get("attention_dropout", 0.0),
    }
    if family is not Family.DEEPSEEK_V3:
        groups = keys.get("num_key_value_heads")
        if groups is None and family in _DEFAULT_GROUPS:
            groups = keys.assume("num_key_value_heads", _DEFAULT_GROUPS[family])
        width = keys.get("head_dim")
        if width is None and family is Family.QWEN3:
            width = keys.assume("head_dim", 128)
        if groups not in (None, heads):
            model["num_query_groups"] = groups
        if width is not None and width * heads != hidden:
            model["head_dim"] = width
        model["qk_layernorm"] = family in (Family.QWEN3, Family.QWEN3_MOE)
    _refuse_windows(keys, family, longest)
    return model


def _refuse_windows(keys: Keys, family: Family, longest: int) -> None:
    """Attention sees everything before it here."""
    in_use = keys.get("use_sliding_window", family is Family.MIXTRAL)
    window = keys.get("sliding_window")
    if in_use and window is not None and window < longest:
        keys.problems.append(f"sliding_window: {window}")
    kinds = set(keys.get("layer_types", [])) - {"full_attention"}
    if kinds:
        keys.problems.append(f"layer_types: {sorted(kinds)}")


def _positions(keys: Keys, family: Family) -> dict[str, Any]:
    old, longest = keys.get("rope_scaling"), keys.need("max_position_embeddings")
    rope = Keys(keys.get("rope_parameters", old) or {}, "rope_parameters of config.json")
    theta = rope.get("rope_theta", keys.get("rope_theta"))
    if theta is None:
        theta = keys.assumed["rope_theta"] = _DEFAULT_THETA.get(family, 10000.0)
    positions: dict[str, Any] = {"rope_theta": theta}
    match kind := rope.get("rope_type", rope.get("type", "default")):
        case "default":
            pass
        case "linear":
            positions["rope_scaling"] = {"kind": kind, "factor": rope.need("factor")}
        case "llama3":
            positions["rope_scaling"] = {
                "kind": kind,
                "factor": rope.need("factor"),
                "low_freq_factor": rope.need("low_freq_factor"),
                "high_freq_factor": rope.need("high_freq_factor"),
                "original_max_position_embeddings": _original(rope, longest),
            }
        case "yarn":
            positions["rope_scaling"] = _yarn(rope, family, longest)
        case _:
            keys.problems.append(f"rope_type: {kind!r}")
    rope.allow(_ALLOWED_ROPE)
    keys.problems += [f"rope_parameters.{problem}" for problem in rope.problems]
    keys.problems += [f"rope_parameters.{k}: {v!r}" for k, v in rope.rest(lambda _: False).items()]
    return positions


def _original(rope: Keys, longest: int) -> int:
    return rope.get("original_max_position_embeddings", longest)


def _yarn(rope: Keys, family: Family, longest: int) -> dict[str, Any]:
    original = _original(rope, longest)
    scaling = {
        "kind": "yarn",
        "factor": rope.get("factor", longest / original),
        "original_max_position_embeddings": original,
        "beta_fast": rope.get("beta_fast", 32.0),
        "beta_slow": rope.get("beta_slow", 1.0),
    }
    mscale, all_dim = rope.get("mscale", 0.0), rope.get("mscale_all_dim", 0.0)
    if all_dim and not (mscale and family is Family.DEEPSEEK_V3):
        # Only DeepSeek-V3's attention scale heeds it, and cos and sin only with the other one.
        rope.problems.append(f"mscale_all_dim: {all_dim}, with mscale: {mscale}")
    # Alone, mscale is not read by transformers, which takes 1.
    return scaling | {"mscale": mscale if all_dim else 1.0, "mscale_all_dim": all_dim}


def _latent_attention(keys: Keys, model: dict[str, Any]) -> dict[str, Any]:
    heads = model["num_attention_heads"]
    if (groups := keys.get("num_key_value_heads", heads)) != heads:
        keys.problems.append(f"num_key_value_heads: {groups}, with {heads} heads")
    if model["norm_epsilon"] != LATENT_EPSILON:
        keys.assumed["epsilon of the latents' norms"] = (
            f"{model['norm_epsilon']}, as of all norms (transformers: {LATENT_EPSILON})"
        )
    return {
        "mla": {
            "q_lora_rank": keys.get("q_lora_rank"),
            "kv_lora_rank": keys.need("kv_lora_rank"),
            "qk_nope_head_dim": keys.need("qk_nope_head_dim"),
            "qk_rope_head_dim": keys.need("qk_rope_head_dim"),
            "v_head_dim": keys.need("v_head_dim"),
        }
    }


def _ahead(keys: Keys, num_layers: int, names: set[str]) -> dict[str, Any]:
    """Multi-token prediction, which `transformers` itself does not save."""
    ahead = keys.get("num_nextn_predict_layers", 0)
    if ahead and not any(name.startswith(f"model.layers.{num_layers}.") for name in names):
        keys.assumed["num_nextn_predict_layers"] = f"0: there is no layer {num_layers}"
        ahead = 0
    return {"mtp_num_layers": ahead} if ahead else {}


def _mixtral(keys: Keys) -> dict[str, Any]:
    return {
        "num_experts": keys.need("num_local_experts"),
        "router_topk": keys.assume("num_experts_per_tok", 2),
        "aux_loss_coeff": keys.get("router_aux_loss_coef", 0.001),
    }


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    dense = keys.get("mlp_only_layers", [])
    if dense != list(range(len(dense))):
        keys.problems.append(f"mlp_only_layers: {dense} (here only the first ones may be dense)")
    experts = keys.get("num_experts") or keys.need("num_local_experts")
    keys.get("num_local_experts")
    return {
        "num_experts": experts,
        "router_topk": keys.assume("num_experts_per_tok", 8),
        "moe_ffn_hidden_size": keys.need("moe_intermediate_size"),
        "first_k_dense": len(dense),
        "router_pre_softmax": True,
        "norm_topk_prob": keys.assume("norm_topk_prob", False),
        "aux_loss_coeff": keys.get("router_aux_loss_coef", 0.001),
    }


def _deepseek_v3(keys: Keys) -> dict[str, Any]:
    topk, width = keys.need("num_experts_per_tok"), keys.need("moe_intermediate_size")
    groups, chosen = keys.assume("n_group", 8), keys.assume("topk_group", 4)
    moe: dict[str, Any] = {
        "num_experts": keys.need("n_routed_experts"),
        "router_topk": topk,
        "moe_ffn_hidden_size": width,
        "shared_expert_intermediate_size": width * keys.assume("n_shared_experts", 1),
        "first_k_dense": keys.assume("first_k_dense_replace", 3),
        "score_function": "sigmoid",
        "norm_topk_prob": keys.assume("norm_topk_prob", True),
        "routed_scaling_factor": keys.assume("routed_scaling_factor", 2.5),
        "expert_bias_update_rate": 0.001,
    }
    keys.assumed["rate of the balancing bias"] = "0.001 (moe.expert_bias_update_rate)"
    keys.get("num_local_experts")
    if groups != chosen:  # else the groups do not limit the choice
        moe |= {"num_groups": groups, "group_topk": chosen}
        if topk != 2 * chosen:
            keys.problems.append(
                f"num_experts_per_tok: {topk} with topk_group: {chosen} (groups are compared by"
                " their best two, here by their best num_experts_per_tok / topk_group)"
            )
    if keys.get("seq_aux", False):
        moe["seq_aux_loss_coeff"] = keys.get("aux_loss_alpha", 0.0)
    return moe
