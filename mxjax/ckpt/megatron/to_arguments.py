"""Megatron's arguments for one of our configurations: the reverse of `arguments`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mxjax.ckpt.errors import ExportError
from mxjax.ckpt.megatron.grid import Grid
from mxjax.ckpt.megatron.optimizer_state import ScheduleSteps
from mxjax.ckpt.torch_format.values import Global
from mxjax.config import Config
from mxjax.config.schema import ModelConfig, MoEConfig

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Megatron's ``--use-rope-scaling`` has as constants."""


@dataclass(frozen=True)
class Saved:
    """What a checkpoint is of, apart from the configuration.

    Attributes:
      iteration: steps of the optimizer.
      consumed_samples: sequences that were trained on.
      vocabulary_rows: with padding.
      divisible_by: what the vocabulary of one tensor rank is padded to a multiple of.
      params_dtype: of the weights, ``float32`` or ``bfloat16``.
      transformer_impl: ``local`` or ``transformer_engine``.
      ckpt_format: ``torch`` or ``torch_dist``.
      optimizer: whether Adam's state is there.
    """

    iteration: int
    consumed_samples: int
    vocabulary_rows: int
    divisible_by: int
    params_dtype: str
    transformer_impl: str
    ckpt_format: str
    optimizer: bool
    expert_bias: bool


def to_arguments(config: Config, grid: Grid, saved: Saved) -> dict[str, Any]:
    """All that ``--use-checkpoint-args`` and ``--use-mp-args-from-checkpoint-args`` take, what
    `arguments.from_arguments` reads, and what Megatron compares when it resumes.

    Raises:
      ExportError: the model has parts that Megatron computes otherwise or does not have; all of
        them are named.
    """
    if problems := _not_in_megatron(config, saved):
        raise ExportError(
            "The run cannot be exported, Megatron has nothing that computes the same for: "
            + "; ".join(problems)
        )
    return (
        _model(config.model)
        | _positions(config.model)
        | _moe(config.model, config.moe, saved)
        | _training(config)
        | _optimizer(config)
        | _layout(config, grid, saved)
        | _of_the_checkpoint(config, saved)
    )


def _not_in_megatron(config: Config, saved: Saved) -> list[str]:
    model, moe, scaling = config.model, config.moe, config.model.rope_scaling
    topk_norm = f"moe.norm_topk_prob: {moe.norm_topk_prob} with score_function"
    wanted_norm = moe.router_topk > 1
    llama3 = scaling is not None and scaling.kind == "llama3"
    sparse, softmax = moe.num_experts > 0, moe.score_function == "softmax"
    checks = {
        "model.rope_scaling.kind: yarn without model.mla": scaling is not None
        and scaling.kind == "yarn"
        and model.mla is None,
        f"model.rope_scaling.kind: {scaling and scaling.kind} with model.mla": scaling is not None
        and scaling.kind != "yarn"
        and model.mla is not None,
        f"model.rope_scaling: llama3 with other values than {_LLAMA3}": llama3
        and any(getattr(scaling, key) != value for key, value in _LLAMA3.items()),
        "model.add_bias_linear without model.add_qkv_bias": model.add_bias_linear
        and not model.add_qkv_bias,
        "model.add_bias_linear with experts or model.mla": model.add_bias_linear
        and (sparse or model.mla is not None),
        f"{topk_norm} sigmoid": sparse and not softmax and moe.norm_topk_prob != wanted_norm,
        "moe.router_topk: 1 with a softmax over the chosen experts": sparse
        and softmax
        and moe.router_topk == 1
        and (moe.norm_topk_prob or not moe.router_pre_softmax),
        "moe.expert_bias_update_rate with score_function softmax": saved.expert_bias and softmax,
        f"moe.group_score: {moe.group_score}": sparse
        and moe.num_groups is not None
        and moe.group_score != "sum",
        f"moe.router: {moe.router}": sparse and moe.router is not None,
    }
    return [name for name, found in checks.items() if found]


def _model(model: ModelConfig) -> dict[str, Any]:
    heads, groups = model.num_attention_heads, model.attention_groups
    grouped = model.mla is None and groups != heads
    arguments: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": heads,
        "group_query_attention": grouped,
        "num_query_groups": groups if grouped else None,
        "kv_channels": model.attention_head_dim
        if model.mla is None
        else model.head_dim or model.hidden_size // heads,
        "max_position_embeddings": model.max_position_embeddings,
        "normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[model.norm],
        "norm_epsilon": model.norm_epsilon,
        "layernorm_epsilon": model.norm_epsilon,
        "apply_layernorm_1p": False,
        "qk_layernorm": model.qk_layernorm or model.mla is not None,
        "swiglu": model.activation == "swiglu",
        "bias_gelu_fusion": model.activation == "gelu",  # the tanh form, which we have
        "squared_relu": False,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "apply_query_key_layer_scaling": False,
        "init_method_std": model.init_method_std,
        "mtp_num_layers": model.mtp_num_layers or None,
        "multi_latent_attention": model.mla is not None,
    }
    if model.mtp_num_layers:
        arguments["mtp_loss_scaling_factor"] = model.mtp_loss_scaling_factor
    if model.mla is not None:
        arguments |= {
            "q_lora_rank": model.mla.q_lora_rank,
            "kv_lora_rank": model.mla.kv_lora_rank,
            "qk_head_dim": model.mla.qk_nope_head_dim,
            "qk_pos_emb_head_dim": model.mla.qk_rope_head_dim,
            "v_head_dim": model.mla.v_head_dim,
        }
    return arguments


def _positions(model: ModelConfig) -> dict[str, Any]:
    rotary = model.position_embedding == "rope"
    arguments: dict[str, Any] = {
        "position_embedding_type": "rope" if rotary else "learned_absolute",
        "add_position_embedding": not rotary,
        "use_rotary_position_embeddings": rotary,
        "rotary_base": int(model.rope_theta) if rotary else None,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
    }
    scaling = model.rope_scaling
    if model.mla is not None:
        arguments["rope_type"] = "rope" if scaling is None else "yarn"
    match scaling and scaling.kind:
        case "linear":
            arguments["rotary_seq_len_interpolation_factor"] = scaling.factor
        case "llama3":
            arguments |= {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}
        case "yarn":
            arguments |= {
                "rotary_scaling_factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "mscale": scaling.mscale,
                "mscale_all_dim": scaling.mscale_all_dim,
            }
    return arguments


def _moe(model: ModelConfig, moe: MoEConfig, saved: Saved) -> dict[str, Any]:
    if not moe.num_experts:
        return {"num_experts": None}
    losses = {"aux_loss": moe.aux_loss_coeff, "seq_aux_loss": moe.seq_aux_loss_coeff}
    losses = {kind: weight for kind, weight in losses.items() if weight} or {"none": 0.0}
    kinds, weights = list(losses), list(losses.values())
    dense = moe.first_k_dense
    softmax = moe.score_function == "softmax"
    return {
        "num_experts": moe.num_experts,
        # A list makes Megatron keep each layer under a key of its own.
        "moe_layer_freq": [0] * dense + [1] * (model.num_layers - dense) if dense else 1,
        "moe_ffn_hidden_size": moe.moe_ffn_hidden_size or model.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_expert_intermediate_size or None,
        "moe_router_topk": moe.router_topk,
        "moe_router_score_function": moe.score_function,
        # Scores of a softmax over all, divided by the sum of those chosen, are those of a softmax
        # over the chosen ones.
        "moe_router_pre_softmax": softmax and moe.router_pre_softmax and not moe.norm_topk_prob,
        "moe_router_topk_scaling_factor": None
        if moe.routed_scaling_factor == 1
        else moe.routed_scaling_factor,
        "moe_router_num_groups": moe.num_groups,
        "moe_router_group_topk": moe.group_topk,
        "moe_router_enable_expert_bias": saved.expert_bias,
        "moe_router_bias_update_rate": moe.expert_bias_update_rate,
        "moe_router_load_balancing_type": kinds[0] if len(kinds) == 1 else kinds,
        "moe_aux_loss_coeff": weights[0] if len(weights) == 1 else weights,
        "moe_z_loss_coeff": moe.z_loss_coeff or None,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": moe.dispatcher,
        "moe_grouped_gemm": saved.transformer_impl == "transformer_engine",
    }


def _training(config: Config) -> dict[str, Any]:
    training = config.training
    return {
        "train_iters": training.num_steps,
        "seq_length": training.seq_length,
        "global_batch_size": training.global_batch_size,
        "seed": training.seed,
        "save_interval": config.checkpoint.save_interval or None,
        "reset_attention_mask": config.data.document_mask,
        "reset_position_ids": config.data.document_mask,
    }


def _optimizer(config: Config) -> dict[str, Any]:
    optimizer, schedule = config.optimizer, ScheduleSteps.of(config)
    return {
        "optimizer": "sgd" if optimizer.name == "sgd" else "adam",
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "lr_decay_style": schedule.style,
        "lr_warmup_iters": schedule.warmup,
        "lr_decay_iters": schedule.decay,
        "lr_wsd_decay_iters": schedule.wsd,
        "lr_wsd_decay_style": "linear" if schedule.wsd else None,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "clip_grad": optimizer.clip_grad,
    }


def _layout(config: Config, grid: Grid, saved: Saved) -> dict[str, Any]:
    chunks = grid.pp * grid.vpp
    return {
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": grid.pp,
        "virtual_pipeline_model_parallel_size": grid.vpp if grid.vpp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": config.model.num_layers // chunks
        if grid.vpp > 1
        else None,
        "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": grid.expert_tp,
        "context_parallel_size": 1,
        "data_parallel_size": grid.dp,
        "world_size": grid.world_size,
        "sequence_parallel": grid.tp > 1,
        "make_vocab_size_divisible_by": saved.divisible_by,
        "padded_vocab_size": saved.vocabulary_rows,
        "vocab_size": config.model.vocab_size,
    }


def _of_the_checkpoint(config: Config, saved: Saved) -> dict[str, Any]:
    dist, half = saved.ckpt_format == "torch_dist", saved.params_dtype == "bfloat16"
    file = None if config.data.tokenizer == "byte" else config.data.tokenizer
    return {
        "iteration": saved.iteration,
        "consumed_train_samples": saved.consumed_samples,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
        "transformer_impl": saved.transformer_impl,
        "params_dtype": Global("torch", saved.params_dtype),
        "bf16": half,
        "fp16": False,
        "ckpt_format": saved.ckpt_format,
        "use_dist_ckpt": dist,
        "use_distributed_optimizer": dist and saved.optimizer,
        "dist_ckpt_optim_fully_reshardable": True,
        "no_save_optim": not saved.optimizer,
        "no_save_rng": True,
        "async_save": False,
        "tokenizer_type": "HuggingFaceTokenizer" if file else "NullTokenizer",
        "tokenizer_model": file,
    }
