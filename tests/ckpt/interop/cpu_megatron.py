"""What megatron-core needs to run without CUDA, and models of it by the arguments of a checkpoint.

For the foreign interpreter: needs torch and megatron-core, not mxjax.
"""

import contextlib
import sys
import typing
from argparse import Namespace

import torch
import typing_extensions


class _NoStream:
    """A CUDA stream or event that does nothing."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def stand_in_for_cuda() -> None:
    """Megatron calls these without asking whether there is a device. Before it is imported."""
    if not hasattr(typing, "override"):  # 0.19 is written for Python 3.12
        typing.override = typing_extensions.override
    torch.compile = lambda function: function  # Megatron does so on import, which takes seconds
    cpu, cuda = torch.device("cpu"), torch.cuda
    cuda.current_device = lambda: cpu
    for module, names in (
        (cuda, "set_device synchronize empty_cache _lazy_call manual_seed_all"),
        (cuda.nvtx, "range_push range_pop"),
    ):
        for name in names.split():  # torch._dynamo wants each to be an object of its own
            setattr(module, name, lambda *args, **kwargs: None)
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = _NoStream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    for kind, dtype in (("Float", torch.float32), ("Int", torch.int32), ("Byte", torch.uint8)):
        make = lambda data=(), *args, dtype=dtype: torch.tensor(data, dtype=dtype)  # noqa: E731
        setattr(cuda, f"{kind}Tensor", make)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    plain_type = torch.Tensor.type

    def cuda_type(self, *args, **kwargs):
        found = plain_type(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    torch.Tensor.type = cuda_type
    for name in ("empty", "zeros", "ones", "tensor", "arange", "full", "rand", "randn"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(make):
    def call(*args, **kwargs):
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return call


def fill_in_absent_parts() -> None:
    """Where Transformer Engine is absent some releases still ask whether a module is one of it;
    and the norm of torch, which is fine with sequence parallelism, refuses it."""
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.transformer.multi_latent_attention
    import megatron.core.transformer.multi_token_prediction  # noqa: F401
    from megatron.core.transformer import torch_norm

    absent = type("Absent", (), {})
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.core"):
            continue
        for key, value in list(vars(module).items()):
            is_absent = value is None or type(value).__name__ == "MagicMock"
            if is_absent and key[:1].isupper() and (key.startswith("TE") or "Linear" in key):
                setattr(module, key, absent)
        if name.endswith("moe.moe_utils") and not hasattr(module, "te_general_gemm"):
            module.te_general_gemm = None
    make = torch_norm.WrappedTorchNorm.__new__

    def make_norm(cls, config, *args, **kwargs):
        parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            return make(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = parallel

    torch_norm.WrappedTorchNorm.__new__ = make_norm


def let_the_distributed_optimizer_use_torch() -> None:
    """Loading into torch's AdamW, which has a tensor `step`, it looks for one among the tensors of
    the checkpoint, where itself never put it; with Transformer Engine's Adam it does not."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    plain = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        return plain(self, model_param, {"step": self.optimizer.state[main]["step"]} | tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def transformer_config(args: Namespace, grid: dict):
    """Megatron's configuration by the arguments of a checkpoint, on another grid perhaps."""
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    half = args.params_dtype is torch.bfloat16
    same = (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
        "kv_channels", "normalization", "hidden_dropout", "attention_dropout", "add_bias_linear",
        "add_qkv_bias", "qk_layernorm", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk",
        "moe_shared_expert_intermediate_size", "moe_router_score_function", "moe_router_dtype",
        "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_num_groups",
        "moe_router_group_topk", "moe_router_enable_expert_bias", "moe_router_bias_update_rate",
        "moe_router_load_balancing_type", "moe_aux_loss_coeff", "mtp_num_layers",
        "mtp_loss_scaling_factor",
    )  # fmt: skip
    latent = (
        "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
        "rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast",
        "beta_slow", "mscale", "mscale_all_dim",
    )  # fmt: skip
    mla = getattr(args, "multi_latent_attention", False)
    fields = {name: getattr(args, name) for name in same + latent * mla if hasattr(args, name)}
    if not args.num_experts:
        fields = {name: value for name, value in fields.items() if not name.startswith("moe_")}
    vpp = grid.get("vpp", 1)
    return (MLATransformerConfig if mla else TransformerConfig)(
        **fields,
        num_moe_experts=args.num_experts,
        moe_token_dispatcher_type="allgather",
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        bf16=half,
        params_dtype=args.params_dtype,
        pipeline_dtype=args.params_dtype,
        tensor_model_parallel_size=grid.get("tp", 1),
        pipeline_model_parallel_size=grid.get("pp", 1),
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        expert_model_parallel_size=grid.get("ep", 1),
        expert_tensor_parallel_size=grid.get("etp"),
        sequence_parallel=grid.get("tp", 1) > 1 and bool(args.num_experts),
    )


def chunks_of_model(args: Namespace, config, rows: int, vpp: int) -> list:
    """The model's chunks on this rank, of Megatron's own modules."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    latent = getattr(args, "multi_latent_attention", False)
    one_kind = {
        "num_experts": args.num_experts,
        "moe_grouped_gemm": False,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": latent,
        "normalization": args.normalization,
    }
    chunks = []
    for number in range(vpp):
        stage = number if vpp > 1 else None
        if isinstance(getattr(args, "moe_layer_freq", None), list):
            spec = get_gpt_decoder_block_spec(
                config,
                use_transformer_engine=False,
                normalization=args.normalization,
                vp_stage=stage,
            )
        else:
            spec = get_gpt_layer_local_spec(**one_kind)
        use_attention_without_cuda(spec, latent)
        mtp = {}
        if config.mtp_num_layers:
            source = spec
            if not getattr(spec, "layer_specs", [None]):
                source = get_gpt_layer_local_spec(**one_kind)
                use_attention_without_cuda(source, latent)
            mtp["mtp_block_spec"] = get_gpt_mtp_block_spec(
                config, source, use_transformer_engine=False, vp_stage=stage
            )
        place = {"ignore_virtual": False, "vp_stage": stage}
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=rows,
            max_sequence_length=args.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
            vp_stage=stage,
            **mtp,
        )
        chunks.append(model.bfloat16() if config.bf16 else model)
    return chunks


def use_attention_without_cuda(spec, latent: bool) -> None:
    """Megatron's own takes one head size only, and MLA has two. There are no weights in it."""
    from megatron.core.transformer.module import MegatronModule

    class CausalAttention(MegatronModule):
        def __init__(self, config, *args, softmax_scale=None, k_channels=None, **kwargs):
            super().__init__(config)
            self.scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5

        def forward(self, query, key, value, *args, **kwargs):  # [S, B, heads, width]
            q, k, v = (x.permute(1, 2, 0, 3).float() for x in (query, key, value))
            scores = (q @ k.transpose(-1, -2)) * self.scale
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
            return mixed.permute(2, 0, 1, 3).flatten(2).to(query.dtype)

    if latent:
        for layer in getattr(spec, "layer_specs", None) or [spec]:
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
