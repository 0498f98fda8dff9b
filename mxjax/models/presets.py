"""Published models: their sizes as sections `model` and `moe` of a configuration.

Each is what the `config.json` of the named Hugging Face repository says, in our words. What it
leaves to the training run (losses of routers, the rate of the balancing bias, the weight of
multi-token prediction, DeepSeek's initial weights) is the paper's where it states it. Vocabularies
are not padded: each is a multiple of 128 already, so that any usual `parallel.tp` divides it.

`configs/<name>.yaml` has the same values beside a layout and a training run; a test keeps the two
equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mxjax.config.schema import MLAConfig, ModelConfig, MoEConfig, RopeScalingConfig


@dataclass(frozen=True)
class Preset:
    """A published model."""

    source: str
    """Hugging Face repository whose `config.json` has these sizes."""
    model: ModelConfig
    moe: MoEConfig = field(default_factory=MoEConfig)


def _model(
    num_layers: int, hidden_size: int, ffn: int, heads: int, groups: int | None = None, **family
) -> ModelConfig:
    """Sizes of one model, and what it shares with its family."""
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        **family,
    )


_LLAMA_2 = {"vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA_3 = {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0}
_MIXTRAL = {"vocab_size": 32000, "rope_theta": 1000000.0}
_QWEN_3 = {
    "head_dim": 128,
    "qk_layernorm": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "norm_epsilon": 1e-6,
}
_DEEPSEEK = {
    "max_position_embeddings": 163840,
    "norm_epsilon": 1e-6,
    "init_method_std": 0.006,
}


def _deepseek_mla(q_lora_rank: int | None) -> MLAConfig:
    return MLAConfig(
        q_lora_rank=q_lora_rank,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )


def _deepseek_rope(mscale: float) -> RopeScalingConfig:
    return RopeScalingConfig(
        kind="yarn",
        factor=40.0,
        original_max_position_embeddings=4096,
        mscale=mscale,
        mscale_all_dim=mscale,
    )


def _qwen3_moe(moe_ffn: int) -> MoEConfig:
    return MoEConfig(
        num_experts=128,
        router_topk=8,
        moe_ffn_hidden_size=moe_ffn,
        router_pre_softmax=True,
        norm_topk_prob=True,
        aux_loss_coeff=0.001,
    )


_MIXTRAL_MOE = MoEConfig(num_experts=8, router_topk=2, aux_loss_coeff=0.02)

_DEEPSEEK_V2_LITE = _model(
    num_layers=27,
    hidden_size=2048,
    ffn=10944,
    heads=16,
    mla=_deepseek_mla(q_lora_rank=None),
    rope_scaling=_deepseek_rope(mscale=0.707),
    vocab_size=102400,
    **_DEEPSEEK,
)

_DEEPSEEK_V2_LITE_MOE = MoEConfig(
    num_experts=64,
    router_topk=6,
    moe_ffn_hidden_size=1408,
    shared_expert_intermediate_size=2 * 1408,
    first_k_dense=1,
    router_pre_softmax=True,
    seq_aux_loss_coeff=0.001,
)

_DEEPSEEK_V3 = _model(
    num_layers=61,
    hidden_size=7168,
    ffn=18432,
    heads=128,
    mla=_deepseek_mla(q_lora_rank=1536),
    rope_scaling=_deepseek_rope(mscale=1.0),
    vocab_size=129280,
    mtp_num_layers=1,
    mtp_loss_scaling_factor=0.3,
    **_DEEPSEEK,
)

_DEEPSEEK_V3_MOE = MoEConfig(
    num_experts=256,
    router_topk=8,
    moe_ffn_hidden_size=2048,
    shared_expert_intermediate_size=2048,
    first_k_dense=3,
    score_function="sigmoid",
    norm_topk_prob=True,
    num_groups=8,
    group_topk=4,
    routed_scaling_factor=2.5,
    seq_aux_loss_coeff=0.0001,
    expert_bias_update_rate=0.001,
)

PRESETS: dict[str, Preset] = {
    "llama2_7b": Preset("meta-llama/Llama-2-7b-hf", _model(32, 4096, 11008, 32, **_LLAMA_2)),
    "llama2_13b": Preset("meta-llama/Llama-2-13b-hf", _model(40, 5120, 13824, 40, **_LLAMA_2)),
    "llama2_70b": Preset("meta-llama/Llama-2-70b-hf", _model(80, 8192, 28672, 64, 8, **_LLAMA_2)),
    "llama3_8b": Preset("meta-llama/Meta-Llama-3-8B", _model(32, 4096, 14336, 32, 8, **_LLAMA_3)),
    "llama3_70b": Preset("meta-llama/Meta-Llama-3-70B", _model(80, 8192, 28672, 64, 8, **_LLAMA_3)),
    "qwen3_8b": Preset("Qwen/Qwen3-8B", _model(36, 4096, 12288, 32, 8, **_QWEN_3)),
    "qwen3_30b_a3b": Preset(
        "Qwen/Qwen3-30B-A3B", _model(48, 2048, 6144, 32, 4, **_QWEN_3), _qwen3_moe(768)
    ),
    "qwen3_235b_a22b": Preset(
        "Qwen/Qwen3-235B-A22B", _model(94, 4096, 12288, 64, 4, **_QWEN_3), _qwen3_moe(1536)
    ),
    "mixtral_8x7b": Preset(
        "mistralai/Mixtral-8x7B-v0.1",
        _model(32, 4096, 14336, 32, 8, max_position_embeddings=32768, **_MIXTRAL),
        _MIXTRAL_MOE,
    ),
    "mixtral_8x22b": Preset(
        "mistralai/Mixtral-8x22B-v0.1",
        _model(56, 6144, 16384, 48, 8, max_position_embeddings=65536, **_MIXTRAL),
        _MIXTRAL_MOE,
    ),
    "deepseek_v2_lite": Preset(
        "deepseek-ai/DeepSeek-V2-Lite", _DEEPSEEK_V2_LITE, _DEEPSEEK_V2_LITE_MOE
    ),
    "deepseek_v3": Preset("deepseek-ai/DeepSeek-V3", _DEEPSEEK_V3, _DEEPSEEK_V3_MOE),
}
