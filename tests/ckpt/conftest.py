"""Runs with one checkpoint of random numbers, for what only reads and converts them."""

import dataclasses
import zlib

import numpy as np
import pytest

from mxjax.ckpt.new_run import ImportReport, state_of, write_run, zeros
from mxjax.ckpt.streaming import StreamedArray
from mxjax.config import load_settings

_LLAMA = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 100,
}
_MOE = {"num_experts": 4, "router_topk": 2, "moe_ffn_hidden_size": 16}
_MLA = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
_DEEPSEEK_MOE = _MOE | {
    "first_k_dense": 1,
    "shared_expert_intermediate_size": 24,
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "num_groups": 2,
    "group_topk": 1,
    "routed_scaling_factor": 2.5,
    "seq_aux_loss_coeff": 1e-4,
    "expert_bias_update_rate": 1e-3,
}
_YARN = {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

SETTINGS = {
    "llama": {"model": _LLAMA | {"qk_layernorm": True, "rope_scaling": {"kind": "llama3"}}},
    "tied": {"model": _LLAMA | {"tie_embeddings": True}},
    "gpt2": {
        "model": _LLAMA
        | {
            "num_query_groups": None,
            "position_embedding": "learned",
            "max_position_embeddings": 64,
            "norm": "layernorm",
            "activation": "gelu",
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "tie_embeddings": True,
        },
        "optimizer": {"schedule": "wsd", "decay_steps": 20, "min_lr": 1e-5},
    },
    "mixtral": {"model": _LLAMA, "moe": _MOE | {"aux_loss_coeff": 1e-2}},
    "deepseek": {
        "model": _LLAMA
        | {
            "num_query_groups": None,
            "mla": _MLA | {"q_lora_rank": 16},
            "rope_scaling": _YARN,
            "mtp_num_layers": 1,
        },
        "moe": _DEEPSEEK_MOE,
    },
    "lite": {
        "model": _LLAMA | {"num_query_groups": None, "mla": _MLA},
        "moe": _DEEPSEEK_MOE | {"first_k_dense": 2},
    },
}
"""Configurations by family."""

STEP, UPDATES, SAMPLES = 30, 28, 480
"""Steps of the run, updates of its optimizer (two were skipped), sequences it was trained on."""


@pytest.fixture(scope="session")
def random_run(tmp_path_factory):
    """name of `SETTINGS`, further settings -> folder of a run; each is made once."""
    folder, made = tmp_path_factory.mktemp("random_runs"), {}

    def run(name, *overrides):
        if (name, overrides) not in made:
            path = folder / f"{name}{len(made)}"
            common = {
                "training": {"num_steps": 100, "compute_dtype": "float32", "seq_length": 16},
                "data": {"source": "synthetic"},
                "checkpoint": {"save_interval": 10},
                "optimizer": {"warmup_steps": 5, "decay_steps": 90},
            }
            config = load_settings(common | SETTINGS[name], name, overrides)
            config = dataclasses.replace(config, run_dir=str(path))
            report = ImportReport("nothing", str(path), STEP, 0, 0, "random")
            arrays = {
                leaf: _random(leaf, tuple(value.shape), np.dtype(value.dtype))
                for leaf, value in state_of(config).items()
            }
            if not config.moe.expert_bias_update_rate and "expert_bias" in arrays:
                bias = arrays["expert_bias"]
                arrays["expert_bias"] = zeros(bias.shape, bias.dtype)
            write_run(report, config, arrays, SAMPLES, progress=False)
            made[name, overrides] = path
        return made[name, overrides]

    return run


def _random(name, shape, dtype):
    """Values between -1 and 1; none is the same twice, so that no mix-up goes unseen."""
    counts = {"step": STEP} | ({name: UPDATES} if name.endswith(".count") else {})
    if not shape:
        value = np.asarray(counts.get(name, 0), dtype)
        return StreamedArray(shape, dtype, 0, lambda _: value)
    numbers = np.random.default_rng(zlib.crc32(name.encode())).uniform(-1, 1, shape).astype(dtype)
    if "norm" in name and ".nu." not in name:
        numbers = numbers * 0.1 + (1 if name.startswith("params.") else 0)
    if ".nu." in name:
        numbers = np.abs(numbers)
    return StreamedArray(shape, dtype, 0, lambda _: numbers)
