"""Makes `tests/data/huggingface/`: tiny models that `transformers` wrote, with its logits.

    python make_huggingface.py FOLDER [NAME ...]

Needs torch, transformers and safetensors (made with 2.13.0, 5.24.0 and 0.8.0). Each folder is what
`save_pretrained` writes, but for what `transformers` cannot save: the layer for multi-token
prediction of `deepseek_v3`, laid out as DeepSeek's own files have it, and the fp8 weights of
`deepseek_v3_fp8`. `reference.npz` has tokens and logits, computed in fp32.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

COMMON = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
DEEPSEEK = COMMON | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.2,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MODELS = {
    "llama2": ("Llama", COMMON | {"num_hidden_layers": 3, "rms_norm_eps": 1e-5}),
    "llama3_bf16": (
        "Llama",
        COMMON
        | {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "rope_parameters": LLAMA3_ROPE,
            "dtype": "bfloat16",
        },
    ),
    "qwen3": ("Qwen3", COMMON | {"num_key_value_heads": 2, "head_dim": 8}),
    "qwen3_moe": (
        "Qwen3Moe",
        COMMON
        | {
            "num_key_value_heads": 1,
            "head_dim": 8,
            "moe_intermediate_size": 8,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "mixtral": (
        "Mixtral",
        COMMON | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        DEEPSEEK
        | {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 8,
            "num_mtp_layers": 1,
            "rope_parameters": YARN,
        },
    ),
    "deepseek_v3_fp8": (
        "DeepseekV3",
        DEEPSEEK
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "num_mtp_layers": 0,
        },
    ),
}
BLOCK = 16
"""Rows and columns that share a scale in the fp8 weights; DeepSeek's are 128."""


def main(folder: Path, names: list[str]) -> None:
    torch.use_deterministic_algorithms(True)
    for name in names or MODELS:
        kind, settings = MODELS[name]
        torch.manual_seed(sum(map(ord, name)))
        config = getattr(transformers, f"{kind}Config")(**settings)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        randomise(model)
        if settings.get("dtype") == "bfloat16":
            model = model.bfloat16()
        target = folder / name
        model.save_pretrained(target, max_shard_size="12KB" if name == "llama2" else "1GB")
        (target / "generation_config.json").unlink(missing_ok=True)
        arrays = {}
        tokens = torch.randint(0, config.vocab_size, (2, 16))
        # Anew, not model.float(): rotary frequencies went through bf16 with the weights.
        model = quantised(target) if name == "deepseek_v3_fp8" else loaded(target)
        if name == "deepseek_v3":
            arrays["mtp_logits"] = add_mtp(target, model, tokens)
        with torch.no_grad():
            arrays["logits"] = model(tokens).logits.numpy()
        arrays["tokens"] = tokens.numpy().astype(np.int32)
        np.savez_compressed(target / "reference.npz", **arrays)


def loaded(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name:
            tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
        elif name.endswith("e_score_correction_bias"):
            tensor.copy_(0.2 * torch.randn_like(tensor))
        elif tensor.ndim > 1:
            tensor.copy_(torch.randn_like(tensor) * 1.5 / tensor.shape[-1] ** 0.5)


@torch.no_grad()
def add_mtp(folder: Path, main: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    """Adds a layer as DeepSeek stores it; the logits of its predictions, [batch, sequence - 1]."""
    ahead = MtpModel(main, 1).eval()
    randomise(ahead.layers)
    first = main.config.num_hidden_layers
    file = folder / "model.safetensors"
    tensors = load_file(file)
    layer = f"model.layers.{first}."
    tensors[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    for name, tensor in ahead.layers[0].state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if name == "mlp.experts.gate_up_proj":
            for expert, weight in enumerate(tensor):
                gate, up = weight.chunk(2)
                tensors[f"{layer}mlp.experts.{expert}.gate_proj.weight"] = gate.clone()
                tensors[f"{layer}mlp.experts.{expert}.up_proj.weight"] = up.clone()
        elif name == "mlp.experts.down_proj":
            for expert, weight in enumerate(tensor):
                tensors[f"{layer}mlp.experts.{expert}.down_proj.weight"] = weight.clone()
        else:
            tensors[layer + name] = tensor.clone()
    save_file(tensors, file, metadata={"format": "pt"})
    hidden = main.model(tokens).last_hidden_state[:, :-1]
    positions = torch.arange(hidden.shape[1])[None]
    hidden = ahead.forward_layer(0, hidden, positions, None, input_ids=tokens[:, 1:])
    return main.lm_head(hidden).numpy()


def quantised(folder: Path) -> torch.nn.Module:
    """Rewrites the matrices of attention and MLPs in fp8; the model that has what they hold now.

    As in DeepSeek's files: ``weight_scale_inv`` is what a block is to be multiplied by.
    """
    file = folder / "model.safetensors"
    plain, written = load_file(file), {}
    for name, weight in plain.items():
        if not name.endswith("proj.weight") and "kv_a_proj" not in name:
            written[name] = weight
            continue
        stored = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        scale = torch.empty([-(-size // BLOCK) for size in weight.shape])
        for i, j in np.ndindex(*scale.shape):
            block = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            scale[i, j] = weight[block].abs().max() / 448
            stored[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
            weight[block] = stored[block].float() * scale[i, j]
        written |= {name: stored, f"{name}_scale_inv": scale}
    save_file(plain, file, metadata={"format": "pt"})
    model = loaded(folder)
    save_file(written, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
