"""config.json both ways, against those of published models and the presets made of them."""

import dataclasses

import pytest

from mxjax.ckpt.errors import ExportError
from mxjax.ckpt.huggingface.config_json import from_config_json
from mxjax.ckpt.huggingface.to_config_json import differences, to_config_json
from mxjax.ckpt.mapping.huggingface import copies, huggingface_table
from mxjax.ckpt.mapping.matching import places
from mxjax.config import load_settings
from mxjax.config.schema import MLAConfig, ModelConfig, MoEConfig, RopeScalingConfig
from mxjax.models.presets import PRESETS

LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN_3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
DEEPSEEK_V3 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
OF_TRAINING = ("init_method_std", "mtp_loss_scaling_factor", "seq_aux_loss_coeff")
"""What presets have from papers."""


def config_of(values):
    """What config.json leads to, and what it leaves out."""
    found = from_config_json(values, {"model.layers.61.enorm.weight"})
    return load_settings(found.settings, "config.json"), found


@pytest.mark.parametrize(
    ("values", "name"),
    [(QWEN_3_30B, "qwen3_30b_a3b"), (MIXTRAL_8X7B, "mixtral_8x7b"), (DEEPSEEK_V3, "deepseek_v3")],
)
def test_published_models_are_the_presets(values, name):
    config, found = config_of(values)
    for ours, preset in ((config.model, PRESETS[name].model), (config.moe, PRESETS[name].moe)):
        for key, value in dataclasses.asdict(preset).items():
            if key not in OF_TRAINING:
                assert getattr(ours, key) == value or dataclasses.asdict(ours)[key] == value, key
    assert found.not_mapped == {}
    assert config.training.compute_dtype == "bfloat16"


def test_llama_3_1_has_its_scaling_and_says_what_is_left_out():
    config, found = config_of(LLAMA_3_1)
    preset = PRESETS["llama3_8b"].model
    scaling = RopeScalingConfig(kind="llama3", factor=8.0)
    longer = dataclasses.replace(preset, max_position_embeddings=131072, rope_scaling=scaling)
    assert config.model == longer
    assert found.not_mapped == {"bos_token_id": 128000, "eos_token_id": 128001}
    assert found.assumed == {}


@pytest.mark.parametrize("values", [LLAMA_3_1, QWEN_3_30B, MIXTRAL_8X7B, DEEPSEEK_V3])
def test_what_is_written_says_the_same_in_the_old_spelling_and_the_new(values):
    config, _ = config_of(values)
    written = to_config_json(config.model, config.moe, "bfloat16")
    ignored = {
        "bos_token_id", "eos_token_id", "ep_size", "pretraining_tp", "transformers_version",
        "output_router_logits", "quantization_config", "use_sliding_window", "max_window_layers",
        "sliding_window", "rope_scaling",
    }  # fmt: skip
    for key in values.keys() - ignored:
        if key in written or values[key] not in (None, False):
            assert written[key] == values[key], key
    old = {key: value for key, value in written.items() if key not in ("rope_parameters", "dtype")}
    new = {
        key: value
        for key, value in written.items()
        if key not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    assert config_of(old)[0] == config_of(new)[0] == config


def test_absent_keys_are_what_transformers_takes_and_are_reported():
    values = {k: v for k, v in MIXTRAL_8X7B.items() if k not in ("rope_theta", "rms_norm_eps")}
    config, found = config_of(values)
    assert (config.model.rope_theta, config.model.norm_epsilon) == (1e6, 1e-5)
    assert found.assumed == {"rope_theta": 1e6, "rms_norm_eps": 1e-5}


MLA = MLAConfig(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
SIGMOID = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 32,
    "score_function": "sigmoid",
}
YARN = RopeScalingConfig(kind="yarn", mscale=0.7)


@pytest.mark.parametrize(
    ("model", "moe", "said"),
    [
        ({"position_embedding": "learned"}, {}, "llama.*model.position_embedding: learned"),
        ({"norm": "layernorm", "activation": "gelu"}, {}, "model.norm: .*; model.activation: gelu"),
        ({"add_qkv_bias": True, "qk_layernorm": True}, {}, "qwen3, .*model.add_qkv_bias: True"),
        ({"mtp_num_layers": 1}, {}, "model.mtp_num_layers: 1"),
        ({"rope_scaling": YARN}, {}, "model.rope_scaling.mscale: 0.7"),
        ({"hidden_size": 100, "head_dim": 16}, {}, "model.hidden_size: 100"),
        ({"mla": MLA}, {}, "moe.num_experts: 0, with model.mla"),
        ({"mla": MLA}, SIGMOID | {"score_function": "softmax"}, "moe.score_function: softmax"),
        ({"mla": MLA}, SIGMOID | {"shared_expert_intermediate_size": 24}, "expert_.*_size: 24"),
        ({"mla": MLA}, SIGMOID | {"num_groups": 4, "group_topk": 2}, "moe.group_score: sum, of the"),
        ({}, {"num_experts": 4, "first_k_dense": 1}, "mixtral, .*moe.first_k_dense: 1"),
        ({}, {"num_experts": 4, "router_pre_softmax": True}, "mixtral, .*moe.norm_topk_prob"),
        ({"qk_layernorm": True}, SIGMOID, "qwen3_moe.*score_function: sigmoid.*shared_expert"),
    ],
)  # fmt: skip
def test_what_no_family_has_is_refused(model, moe, said):
    with pytest.raises(ExportError, match=said):
        to_config_json(ModelConfig(**model), MoEConfig(**moe), "float32")


def test_mixtral_by_another_spelling_is_mixtral():
    """Softmax over all experts and division by the sum is softmax over the chosen ones."""
    moe = MoEConfig(num_experts=4, router_pre_softmax=True, norm_topk_prob=True)
    assert to_config_json(ModelConfig(), moe, "float32")["model_type"] == "mixtral"


def test_other_epsilons_of_latent_attention_are_said():
    model = ModelConfig(mla=MLA, norm_epsilon=1e-5)
    (line,) = differences(model)
    assert "1e-05; norms of latents have 1e-06" in line
    values = DEEPSEEK_V3 | {"rms_norm_eps": 1e-5}
    assert "epsilon of the latents' norms" in config_of(values)[1].assumed


def test_tensors_of_the_published_deepseek_v3_have_its_names_and_number():
    """Its index has 91,991: also one with scales for each matrix in fp8."""
    config, found = config_of(DEEPSEEK_V3)
    sections = huggingface_table(found.family, config.model, config.moe)
    names = [place.names(theirs)[0] for place in places(sections) for theirs in place.rule.theirs]
    names += copies(config.model)
    assert len(names) == len(set(names))
    assert "model.layers.61.mlp.experts.255.down_proj.weight" in names
    assert "model.layers.2.mlp.gate_proj.weight" in names
    assert "model.layers.61.shared_head.head.weight" in names
    in_fp8 = [name for name in names if "_proj" in name and "eh_proj" not in name]
    assert len(names) + len(in_fp8) == 91991
