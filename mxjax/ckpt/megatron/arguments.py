"""Our configuration out of Megatron's arguments, which every checkpoint of it has.

Where an argument changes what the model computes and there is nothing like it here, the import is
refused. What only steers training and has no counterpart is listed for the user.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mxjax.ckpt.keys import Keys
from mxjax.ckpt.megatron.schedule import schedule_settings

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "rotary_interleaved": (None, False),
    "rotary_percent": (None, 1.0),
    "squared_relu": (None, False),
    "quick_geglu": (None, False),
    "attention_output_gate": (None, False),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "hybrid_layer_pattern": (None,),
    "window_size": (None,),
    "moe_shared_expert_gate": (None, False),
    "moe_apply_probs_on_input": (None, False),
    "moe_latent_size": (None,),
    "apply_residual_connection_post_layernorm": (None, False),
    "qk_l2_norm": (None, False),
    "softmax_type": (None, "vanilla"),
    "experimental_attention_variant": (None,),
    "mtp_use_repeated_layer": (None, False),
}
"""Values of arguments that mean what is computed here."""

_OF_THE_RUN = re.compile(
    r"(tensor|pipeline|virtual|expert|context|sequence|data|hierarchical)_.*(size|parallel|stage|rank)\w*"
    r"|(decoder|encoder)_(first|last|num_layers|seq).*|transformer_pipeline.*|num_layers_per_.*"
    r"|num_virtual.*|(rank|local_rank|world_size|iteration|vocab_size|make_vocab_size\w*)"
    r"|(save|load|ckpt|dist_ckpt|async|use_dist|non_persistent|auto_detect|use_persistent).*"
    r"|(log|tensorboard|wandb|profile|timing|exit|rerun|straggler|error_injection|nccl|gpu).*"
    r"|(train|valid|test|data|tokenizer|eval|reset|eod|split|merge|vocab|num_workers|dataset).*"
    r"|(tp_comm|overlap|use_distributed|distributed|ddp|delay|defer|gradient|batch_p2p|cuda).*"
    r"|(recompute|checkpoint|fine_grained|cpu_offload|offload|optimizer_cpu|deallocate|use_cpu).*"
    r"|(bias_|masked_softmax|apply_rope|cross_entropy|fused|persist_|memory|barrier|manual_gc).*"
    r"|(transformer_impl|attention_backend|use_flash_attn|moe_(grouped_gemm|token_dispatcher_type"
    r"|permute_fusion|router_dtype|router_fusion|flex\w*|enable_deepep))"
    r"|no_save_\w+"
    r"|(consumed|skipped)_\w*samples|num_floating.*|phase_.*|inference.*|retro.*|vision.*|bert.*"
    r"|(bf16|fp16|params_dtype|use_rotary_position_embeddings|add_position_embedding"
    r"|padded_vocab_size|group_query_attention|num_moe_experts|reset_\w+|seq_length)"
)
"""Arguments of a run's layout, input, output and speed: not listed as left out."""


@dataclass
class FromArguments:
    """What arguments lead to.

    Attributes:
      settings: sections of a configuration, as in a YAML file.
      assumed: arguments that are not recorded, with the value taken for them.
      not_mapped: arguments without a counterpart here, with their values.
      zero_centred_gamma: norms are stored as their difference from one.
    """

    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    assumed: dict[str, Any] = field(default_factory=dict)
    not_mapped: dict[str, Any] = field(default_factory=dict)
    zero_centred_gamma: bool = False


def from_arguments(
    args: Mapping[str, Any],
    vocabulary_rows: int,
    scheduler: Mapping[str, Any] | None = None,
    iteration: int | None = None,
) -> FromArguments:
    """Sections `model`, `moe`, `training`, `optimizer`, `data` and `checkpoint`.

    Args:
      args: Megatron's arguments as plain values.
      vocabulary_rows: of the embedding, with the padding of the ``tp`` that saved it.
      scheduler: the entry ``opt_param_scheduler``, if there is one.
      iteration: steps done, if that is recorded.

    Raises:
      CheckpointFormatError: the model has parts that there are not here, or arguments are missing.
    """
    reader = Keys(args, "The checkpoint's `args`")
    model = _model(reader) | {"vocab_size": vocabulary_rows}
    moe = _moe(reader, model)
    training = _training(reader)
    found = FromArguments(
        {
            "model": model,
            "moe": moe,
            "training": training,
            "optimizer": _optimizer(reader, scheduler or {}, iteration, training.get("num_steps")),
            "data": _data(reader),
            "checkpoint": reader.known({"save_interval": "save_interval"}),
        }
    )
    found.zero_centred_gamma = bool(
        reader.get("apply_layernorm_1p", False)
        or reader.get("layernorm_zero_centered_gamma", False)
    )
    reader.allow(_ALLOWED)
    reader.refuse()
    found.settings = {name: section for name, section in found.settings.items() if section}
    found.assumed = reader.assumed
    found.not_mapped = reader.rest(_OF_THE_RUN.fullmatch)
    return found


def _model(args: Keys) -> dict[str, Any]:
    model = {
        "num_layers": args.need("num_layers"),
        "hidden_size": args.need("hidden_size"),
        "ffn_hidden_size": args.need("ffn_hidden_size"),
        "num_attention_heads": args.need("num_attention_heads"),
        "tie_embeddings": not args.need("untie_embeddings_and_output_weights"),
        "norm": args.need("normalization").lower(),
        "norm_epsilon": args.get("layernorm_epsilon", args.get("norm_epsilon"))
        or args.assume("norm_epsilon", 1e-5),
        "add_bias_linear": args.get("add_bias_linear", False),
    }
    if model["norm"] not in ("rmsnorm", "layernorm"):
        args.problems.append(f"normalization: {model['norm']!r}")
    model["activation"] = "swiglu" if args.get("swiglu", False) else "gelu"
    tanh_form = args.get("openai_gelu", False) or args.get("bias_gelu_fusion", False)
    if model["activation"] == "gelu" and not tanh_form:
        args.assumed["activation: gelu, exact"] = "gelu, tanh form (differs by up to 5e-4)"
    model["add_qkv_bias"] = args.get("add_qkv_bias", False) or model["add_bias_linear"]
    model |= args.known(
        {
            "max_position_embeddings": "max_position_embeddings",
            "hidden_dropout": "hidden_dropout",
            "attention_dropout": "attention_dropout",
            "init_method_std": "init_method_std",
            "mtp_num_layers": "mtp_num_layers",
            "mtp_loss_scaling_factor": "mtp_loss_scaling_factor",
        }
    )
    return model | _attention(args, model) | _positions(args)


def _attention(args: Keys, model: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = model["num_attention_heads"], model["hidden_size"]
    groups, width = args.get("num_query_groups"), args.get("kv_channels")
    norm = args.get("qk_layernorm", False)
    if not args.get("multi_latent_attention", False):
        attention: dict[str, Any] = {"qk_layernorm": norm}
        if args.get("group_query_attention", groups is not None):
            attention["num_query_groups"] = groups
        if width is not None and width * heads != hidden:
            attention["head_dim"] = width
        return attention
    if not norm:
        args.problems.append("qk_layernorm: False with multi_latent_attention")
    return {
        "mla": {
            "q_lora_rank": args.get("q_lora_rank"),
            "kv_lora_rank": args.need("kv_lora_rank"),
            "qk_nope_head_dim": args.need("qk_head_dim"),
            "qk_rope_head_dim": args.need("qk_pos_emb_head_dim"),
            "v_head_dim": args.need("v_head_dim"),
        }
    }


def _positions(args: Keys) -> dict[str, Any]:
    kind = args.assume("position_embedding_type", "rope")
    if kind == "learned_absolute":
        return {"position_embedding": "learned"}
    if kind != "rope":
        args.problems.append(f"position_embedding_type: {kind!r}")
    positions: dict[str, Any] = {"rope_theta": args.get("rotary_base", 10000)}
    interpolation = args.get("rotary_seq_len_interpolation_factor")
    if args.get("multi_latent_attention", False):
        if args.assume("rope_type", "yarn") == "yarn":
            positions["rope_scaling"] = _yarn(args)
    elif args.get("use_rope_scaling", False):
        factor = args.get("rope_scaling_factor", 8.0)
        positions["rope_scaling"] = {"kind": "llama3", "factor": factor}
    elif interpolation is not None:
        positions["rope_scaling"] = {"kind": "linear", "factor": interpolation}
    return positions


def _yarn(args: Keys) -> dict[str, Any] | None:
    """Megatron's defaults are those of its MLATransformerConfig."""
    factor = args.assume("rotary_scaling_factor", 40.0)
    if factor == 1:
        return None
    return {
        "kind": "yarn",
        "factor": factor,
        "original_max_position_embeddings": args.assume("original_max_position_embeddings", 4096),
        "beta_fast": args.get("beta_fast", 32.0),
        "beta_slow": args.get("beta_slow", 1.0),
        "mscale": args.get("mscale", 1.0),
        "mscale_all_dim": args.get("mscale_all_dim", 0.0),
    }


def _moe(args: Keys, model: dict[str, Any]) -> dict[str, Any]:
    experts = args.get("num_experts") or args.get("num_moe_experts")
    if not experts:
        for name in ("moe_router_topk", "moe_layer_freq", "moe_router_score_function"):
            args.get(name)  # defaults, of no meaning in a dense model
        return {}
    topk = args.need("moe_router_topk")
    score = args.get("moe_router_score_function", "softmax")
    if score not in ("softmax", "sigmoid"):
        args.problems.append(f"moe_router_score_function: {score!r}")
    moe = {
        "num_experts": experts,
        "router_topk": topk,
        "first_k_dense": _first_dense(args, model["num_layers"]),
        "score_function": score,
        "router_pre_softmax": score == "softmax" and args.get("moe_router_pre_softmax", False),
        # Megatron divides sigmoid's scores by their sum, those of a softmax over all never.
        "norm_topk_prob": score == "sigmoid" and topk > 1,
        "routed_scaling_factor": args.get("moe_router_topk_scaling_factor") or 1.0,
    }
    moe |= args.known(
        {
            "moe_ffn_hidden_size": "moe_ffn_hidden_size",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
            "num_groups": "moe_router_num_groups",
            "group_topk": "moe_router_group_topk",
            "z_loss_coeff": "moe_z_loss_coeff",
        }
    )
    rate = args.get("moe_router_bias_update_rate", 1e-3)
    if args.get("moe_router_enable_expert_bias", False):
        moe["expert_bias_update_rate"] = rate
    return moe | _balancing(args)


def _first_dense(args: Keys, num_layers: int) -> int:
    """How many layers at the beginning have no experts; all others must have them."""
    pattern = args.get("moe_layer_freq", 1)
    if isinstance(pattern, int):
        layers = [int(i % pattern == 0) for i in range(num_layers)]
    else:
        layers = list(pattern) if isinstance(pattern, list | tuple) else []
    dense = next((i for i, sparse in enumerate(layers) if sparse), 0)
    if layers != [0] * dense + [1] * (num_layers - dense):
        args.problems.append(
            f"moe_layer_freq: {pattern!r} for {num_layers} layers (here only the first ones may be"
            " dense)"
        )
    return dense


def _balancing(args: Keys) -> dict[str, float]:
    kinds = args.get("moe_router_load_balancing_type", "none")
    weights = args.get("moe_aux_loss_coeff", 0.0)
    kinds = kinds if isinstance(kinds, list | tuple) else [kinds]
    weights = weights if isinstance(weights, list | tuple) else [weights] * len(kinds)
    names = {"aux_loss": "aux_loss_coeff", "seq_aux_loss": "seq_aux_loss_coeff"}
    found = {}
    for kind, weight in zip(kinds, weights, strict=True):
        if kind in names:
            found[names[kind]] = weight
        elif kind != "none":
            args.assumed[f"moe_router_load_balancing_type {kind}"] = "none: there is no such loss"
    return found


def _training(args: Keys) -> dict[str, Any]:
    training = args.known(
        {
            "num_steps": "train_iters",
            "seq_length": "seq_length",
            "global_batch_size": "global_batch_size",
            "seed": "seed",
        }
    )
    samples, batch = args.get("train_samples"), args.get("global_batch_size")
    if "num_steps" not in training and samples and batch:
        training["num_steps"] = samples // batch
    half = args.get("bf16", False) or args.get("fp16", False)
    training["compute_dtype"] = "bfloat16" if half else "float32"
    return training


def _optimizer(
    args: Keys, scheduler: Mapping[str, Any], iteration: int | None, num_steps: int | None
) -> dict[str, Any]:
    optimizer = args.known(
        {
            "beta1": "adam_beta1",
            "beta2": "adam_beta2",
            "eps": "adam_eps",
            "weight_decay": "weight_decay",
            "clip_grad": "clip_grad",
        }
    )
    if (decay := scheduler.get("end_wd")) is not None:
        optimizer["weight_decay"] = decay
    if scheduler.get("start_wd", decay) != decay:
        args.assumed[f"weight decay from {scheduler['start_wd']} to {decay}"] = f"always {decay}"
    for name in ("start_weight_decay", "end_weight_decay", "weight_decay_incr_style"):
        args.get(name)
    if (kind := args.get("optimizer", "adam")) != "adam":
        args.assumed[f"optimizer {kind}"] = "adamw"
    return optimizer | schedule_settings(args, scheduler, iteration, num_steps)


def _data(args: Keys) -> dict[str, Any]:
    """Megatron attends across documents unless told otherwise."""
    masks = [args.get(name) for name in ("reset_attention_mask", "reset_position_ids")]
    return {} if None in masks else {"document_mask": all(masks)}
