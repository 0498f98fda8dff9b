"""Counts and FLOPs against published figures and against sums worked out by hand."""

import pytest

from mxjax.config.schema import MLAConfig, ModelConfig, MoEConfig
from mxjax.training.flops import model_flops_per_token, parameter_counts, peak_flops

DENSE = MoEConfig()
LLAMA_2_7B = ModelConfig(
    num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, vocab_size=32000
)
LLAMA_3_8B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    vocab_size=128256,
)
LLAMA_3_8B_8_LAYERS = ModelConfig(
    num_layers=8,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    vocab_size=128256,
)
GPT2 = ModelConfig(
    num_layers=12,
    hidden_size=768,
    ffn_hidden_size=3072,
    num_attention_heads=12,
    vocab_size=50257,
    max_position_embeddings=1024,
    position_embedding="learned",
    norm="layernorm",
    activation="gelu",
    add_bias_linear=True,
    add_qkv_bias=True,
    tie_embeddings=True,
)
QWEN2_7B = ModelConfig(
    num_layers=28,
    hidden_size=3584,
    ffn_hidden_size=18944,
    num_attention_heads=28,
    num_query_groups=4,
    vocab_size=152064,
    add_qkv_bias=True,
)
MIXTRAL_8X7B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    vocab_size=32000,
)
MIXTRAL_MOE = MoEConfig(num_experts=8, router_topk=2)
DEEPSEEK_MOE_16B = ModelConfig(
    num_layers=28,
    hidden_size=2048,
    ffn_hidden_size=10944,
    num_attention_heads=16,
    vocab_size=102400,
)
DEEPSEEK_MOE = MoEConfig(
    num_experts=64,
    router_topk=6,
    moe_ffn_hidden_size=1408,
    shared_expert_intermediate_size=2816,
    first_k_dense=1,
)


@pytest.mark.parametrize(
    ("model", "moe", "published"),
    [
        (LLAMA_2_7B, DENSE, 6_738_415_616),
        (LLAMA_3_8B, DENSE, 8_030_261_248),
        (GPT2, DENSE, 124_439_808),
        (QWEN2_7B, DENSE, 7_615_616_512),
        (MIXTRAL_8X7B, MIXTRAL_MOE, 46_702_792_704),
        (DEEPSEEK_MOE_16B, DEEPSEEK_MOE, 16_375_728_128),
    ],
    ids=["llama-2-7b", "llama-3-8b", "gpt2", "qwen2-7b", "mixtral-8x7b", "deepseek-moe-16b"],
)
def test_total_equals_the_size_of_the_published_checkpoint(model, moe, published):
    assert parameter_counts(model, moe).total == published


def test_active_counts_only_the_chosen_experts():
    """Mixtral's paper gives 13 B (12.9 B), DeepSeekMoE's 2.8 B active parameters."""
    assert parameter_counts(MIXTRAL_8X7B, MIXTRAL_MOE).active == 12_879_925_248
    assert parameter_counts(DEEPSEEK_MOE_16B, DEEPSEEK_MOE).active == pytest.approx(2.8e9, rel=0.02)


def test_every_parameter_of_a_dense_model_is_active():
    counts = parameter_counts(LLAMA_2_7B, DENSE)
    assert counts.active == counts.total


def test_matmul_parameters_are_the_matrices_and_the_head():
    """Llama-3-8B with 8 layers, summed by hand."""
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    mlp = 3 * 4096 * 14336
    head = 4096 * 128256
    counts = parameter_counts(LLAMA_3_8B_8_LAYERS, DENSE)
    assert counts.matmul_active == 8 * (attention + mlp) + head == 2_270_167_040


def test_a_tied_head_multiplies_but_is_no_second_parameter():
    untied = ModelConfig(hidden_size=64, vocab_size=100)
    tied = ModelConfig(hidden_size=64, vocab_size=100, tie_embeddings=True)
    a, b = parameter_counts(untied, DENSE), parameter_counts(tied, DENSE)
    assert a.matmul_active == b.matmul_active
    assert a.total - b.total == 6400


def test_router_counts_for_every_token_and_experts_for_the_chosen():
    """Two layers, one of them dense, small enough to sum by hand; experts have no biases."""
    model = ModelConfig(
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=3,
        vocab_size=10,
        activation="gelu",
        norm="layernorm",
        add_bias_linear=True,
        add_qkv_bias=True,
        position_embedding="learned",
        max_position_embeddings=5,
    )
    moe = MoEConfig(
        num_experts=4,
        router_topk=3,
        moe_ffn_hidden_size=6,
        shared_expert_intermediate_size=7,
        first_k_dense=1,
    )
    attention = 8 * 12 + 2 * 8 * 6 + 12 * 8
    attention_biases = 12 + 2 * 6 + 8
    dense, dense_biases = 2 * 8 * 16, 16 + 8
    router, expert, shared = 8 * 4, 2 * 8 * 6, 2 * 8 * 7
    embeddings, head, norms = (10 + 5) * 8, 8 * 10, 5 * 16
    counts = parameter_counts(model, moe)
    assert (
        counts.total
        == embeddings
        + head
        + norms
        + 2 * (attention + attention_biases)
        + dense
        + dense_biases
        + router
        + 4 * expert
        + shared
    )
    assert counts.active == counts.total - expert
    assert counts.matmul_active == 2 * attention + dense + router + 3 * expert + shared + head


def test_latent_attention_and_multi_token_prediction_by_hand():
    """One layer and one module, both dense. Scores are as wide as keys, what they weigh as values;
    the head is multiplied with twice; norms and the shared embedding and head are no matrices of
    the module."""
    mla = MLAConfig(
        q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3
    )
    model = ModelConfig(
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=16,
        num_attention_heads=2,
        mla=mla,
        vocab_size=10,
        mtp_num_layers=1,
    )
    attention = 8 * 6 + 6 * 2 * (4 + 2) + 8 * (5 + 2) + 5 * 2 * (4 + 3) + 2 * 3 * 8
    layer = attention + 3 * 8 * 16
    joint = 2 * 8 * 8
    counts = parameter_counts(model, DENSE)
    norms = 2 * (2 * 8 + 6 + 5) + 8 + 3 * 8
    assert counts.total == 2 * 10 * 8 + 2 * layer + joint + norms
    assert counts.matmul_active == 2 * layer + joint + 2 * 10 * 8
    scores = 2 * 2 * (4 + 2) * 100 // 2  # heads, multiply and add, width, keys seen on average
    weighed = 2 * 2 * 3 * 100 // 2
    flops = 6 * counts.matmul_active + 2 * 3 * (scores + weighed)
    assert model_flops_per_token(model, DENSE, seq_length=100) == flops


def test_head_norms_are_counted_once_per_layer():
    plain = ModelConfig(hidden_size=64, num_attention_heads=4)
    normed = ModelConfig(hidden_size=64, num_attention_heads=4, qk_layernorm=True)
    difference = parameter_counts(normed, DENSE).total - parameter_counts(plain, DENSE).total
    assert difference == plain.num_layers * 2 * 16


def test_model_flops_are_six_per_matmul_parameter_plus_causal_attention():
    """llama8L of the measured table: 35,348 tokens/s at sequence 8192 are 538 TFLOP/s."""
    flops = model_flops_per_token(LLAMA_3_8B_8_LAYERS, DENSE, seq_length=8192)
    assert flops == 6 * 2_270_167_040 + 12 * 8 * 32 * 128 * 8192 // 2
    assert flops * 35_348 / 1e12 == pytest.approx(538, abs=0.5)


@pytest.mark.parametrize(
    ("device_kind", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 156),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA H200 NVL", "bfloat16", 835.5),
        ("NVIDIA GH200 480GB", "bfloat16", 989.4),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("Tesla V100-SXM2-16GB", "float32", 15.7),
        ("Tesla V100-PCIE-32GB", "float32", 14),
        ("TPU v4", "bfloat16", 275),
        ("TPU v5 lite", "bfloat16", 197),
        ("TPU v5", "bfloat16", 459),
        ("TPU v6 lite", "bfloat16", 918),
    ],
)
def test_peak_of_known_devices(device_kind, dtype, tflops):
    assert peak_flops(device_kind, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "device_kind",
    [
        "cpu",
        "NVIDIA H20",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "TPU v4 lite",
        "Tesla V100-SXM2-16GB",
    ],
)
def test_peak_of_unknown_devices_slices_and_types_is_none(device_kind):
    assert peak_flops(device_kind, "bfloat16") is None
