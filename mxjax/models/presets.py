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


def _llama2(num_layers: int, hidden_size: int, ffn: int, heads: int, groups: int | None = None):
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        vocab_size=32000,
        max_position_embeddings=4096,
    )


def _llama3(num_layers: int, hidden_size: int, ffn: int, heads: int) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    )


def _qwen3(num_layers: int, hidden_size: int, ffn: int, heads: int, groups: int) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=128,
        qk_layernorm=True,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        norm_epsilon=1e-6,
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


def _mixtral(num_layers: int, hidden_size: int, ffn: int, heads: int, length: int) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=8,
        vocab_size=32000,
        max_position_embeddings=length,
        rope_theta=1000000.0,
    )


_MIXTRAL_MOE = MoEConfig(num_experts=8, router_topk=2, aux_loss_coeff=0.02)

_DEEPSEEK_V2_LITE = ModelConfig(
    num_layers=27,
    hidden_size=2048,
    ffn_hidden_size=10944,
    num_attention_heads=16,
    mla=MLAConfig(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    vocab_size=102400,
    max_position_embeddings=163840,
    rope_scaling=RopeScalingConfig(
        kind="yarn",
        factor=40.0,
        original_max_position_embeddings=4096,
        mscale=0.707,
        mscale_all_dim=0.707,
    ),
    norm_epsilon=1e-6,
    init_method_std=0.006,
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

_DEEPSEEK_V3 = ModelConfig(
    num_layers=61,
    hidden_size=7168,
    ffn_hidden_size=18432,
    num_attention_heads=128,
    mla=MLAConfig(
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    vocab_size=129280,
    max_position_embeddings=163840,
    rope_scaling=RopeScalingConfig(
        kind="yarn",
        factor=40.0,
        original_max_position_embeddings=4096,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    norm_epsilon=1e-6,
    init_method_std=0.006,
    mtp_num_layers=1,
    mtp_loss_scaling_factor=0.3,
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
    "llama2_7b": Preset("meta-llama/Llama-2-7b-hf", _llama2(32, 4096, 11008, 32)),
    "llama2_13b": Preset("meta-llama/Llama-2-13b-hf", _llama2(40, 5120, 13824, 40)),
    "llama2_70b": Preset("meta-llama/Llama-2-70b-hf", _llama2(80, 8192, 28672, 64, groups=8)),
    "llama3_8b": Preset("meta-llama/Meta-Llama-3-8B", _llama3(32, 4096, 14336, 32)),
    "llama3_70b": Preset("meta-llama/Meta-Llama-3-70B", _llama3(80, 8192, 28672, 64)),
    "qwen3_8b": Preset("Qwen/Qwen3-8B", _qwen3(36, 4096, 12288, 32, groups=8)),
    "qwen3_30b_a3b": Preset(
        "Qwen/Qwen3-30B-A3B", _qwen3(48, 2048, 6144, 32, groups=4), _qwen3_moe(768)
    ),
    "qwen3_235b_a22b": Preset(
        "Qwen/Qwen3-235B-A22B", _qwen3(94, 4096, 12288, 64, groups=4), _qwen3_moe(1536)
    ),
    "mixtral_8x7b": Preset(
        "mistralai/Mixtral-8x7B-v0.1", _mixtral(32, 4096, 14336, 32, length=32768), _MIXTRAL_MOE
    ),
    "mixtral_8x22b": Preset(
        "mistralai/Mixtral-8x22B-v0.1", _mixtral(56, 6144, 16384, 48, length=65536), _MIXTRAL_MOE
    ),
    "deepseek_v2_lite": Preset(
        "deepseek-ai/DeepSeek-V2-Lite", _DEEPSEEK_V2_LITE, _DEEPSEEK_V2_LITE_MOE
    ),
    "deepseek_v3": Preset("deepseek-ai/DeepSeek-V3", _DEEPSEEK_V3, _DEEPSEEK_V3_MOE),
}
