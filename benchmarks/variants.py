"""The models of `train_step.py`, other trainers' figures, and what a variant's words change."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from mxjax.models.presets import PRESETS


@dataclass(frozen=True)
class Peer:
    """Another trainer on the same model, as measured by us on one H200 (2026-11-29)."""

    trainer: str
    settings: str
    tokens_per_second: float
    tflops: float
    peak_gib: float


@dataclass(frozen=True)
class Benchmark:
    """One model: what the configuration sets, which variants are worth their time, the peers."""

    config: dict
    variants: str
    peers: tuple[Peer, ...] = ()


def shortened(preset: str, moe: dict | None = None, **model: object) -> dict:
    """Sections of a published model with changes such as fewer layers."""
    published = PRESETS[preset]
    return {
        "model": dataclasses.asdict(dataclasses.replace(published.model, **model)),
        "moe": dataclasses.asdict(dataclasses.replace(published.moe, **(moe or {}))),
        "data": {"document_mask": False},
        "parallel": {"zero_stage": 0},
    }


BENCHMARKS = {
    # Llama-3-8B with 8 layers, sequence 8192.
    "llama8L": Benchmark(
        shortened("llama3_8b", num_layers=8)
        | {"training": {"seq_length": 8192, "global_batch_size": 2}},
        "unrolled,unrolled-dots,scan,scan-dots",
        (
            Peer("MaxText 0.2.5", "B2, unscanned", 35348, 538, 53),
            Peer("MaxText 0.2.5", "B1, unscanned", 31508, 480, math.nan),
            Peer("torchtitan 0.2.2", "B2, no AC, FSDP1", 33958, 517, 57),
            Peer("torchtitan 0.2.2", "B4, selective AC", 33829, 515, 64),
            Peer("megatron-core 0.19.2", "B2, no TE, SDPA", 32809, 500, 85),
            Peer("plain JAX, 60 lines", "B2, scanned, dots saved", 33062, 504, math.nan),
        ),
    ),
    # DeepSeek-V2-Lite with 8 layers, sequence 4096. A small learning rate: routers stay as they
    # begin, and the load of their experts is that of an untrained model.
    "dslite8L": Benchmark(
        shortened("deepseek_v2_lite", num_layers=8)
        | {
            "training": {"seq_length": 4096, "global_batch_size": 4},
            "optimizer": {"lr": 1e-6},
        },
        "unrolled,unrolled-balanced,unrolled-dots,unrolled-dots-balanced,scan-full",
        (
            Peer("MaxText 0.2.5", "B4, full remat", 39575, 227, 90),
            Peer("torchtitan 0.2.2", "B4, selective AC", 40083, 230, 73),
            Peer("megatron-core 0.19.2", "B4, no TE, SDPA, torch grouped GEMM", 52046, 299, 109),
        ),
    ),
    # Three MoE layers of DeepSeek-V3's widths and attention with 16 of its experts, of which each
    # token still takes 8, and a small vocabulary.
    "dsv3w3L": Benchmark(
        shortened(
            "deepseek_v3",
            {"num_experts": 16, "num_groups": None, "group_topk": None, "first_k_dense": 0},
            num_layers=3,
            mtp_num_layers=0,
            vocab_size=32768,
        )
        | {
            "training": {"seq_length": 4096, "global_batch_size": 8},
            "optimizer": {"lr": 1e-6},
        },
        "scan,scan-light,scan-medium,scan-moe,scan-full",
    ),
    # Four layers of LLaMA-2-70B.
    "llama70b4L": Benchmark(
        shortened("llama2_70b", num_layers=4)
        | {"training": {"seq_length": 4096, "global_batch_size": 4}},
        "scan-full,scan-offload_up,scan-offload_most",
    ),
    # A few seconds on a CPU: to try the script itself.
    "tiny": Benchmark(
        {
            "model": {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128},
            "training": {"seq_length": 128, "global_batch_size": 2},
        },
        "unrolled,scan",
    ),
    "tiny-moe": Benchmark(
        {
            "model": {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128},
            "moe": {"num_experts": 8, "moe_ffn_hidden_size": 32},
            "training": {"seq_length": 128, "global_batch_size": 2},
        },
        "unrolled,unrolled-balanced",
    ),
}

WORDS = {
    "unrolled": ["training.scan_layers=false"],
    "scan": ["training.scan_layers=true"],
    "dots": ["remat.policy=dots"],
    "full": ["remat.policy=full"],
    "norm": ["remat.policy=norm"],
    "light": ["remat.tier=light"],
    "medium": ["remat.tier=medium"],
    "moe": ["remat.tier=full"],
    "grouped": ["moe.expert_gemm=grouped"],
    "xla": ["kernels.implementation=xla"],
    "batched": ["moe.expert_gemm=batched"],
    "balanced": ["moe.force_balanced=true", "moe.capacity_buckets=[1.0]"],
    "offload_up": ["remat.policy=full", "remat.offload=[mlp_up]"],
    "offload_most": ["remat.policy=full", "remat.offload=[mlp_up,query,key,value]"],
    "documents": ["data.document_mask=true"],
    "cudnn": ["model.attention_implementation=cudnn"],
    "mosaic": ["model.attention_implementation=mosaic"],
    "bf16moments": ["optimizer.moments_dtype=bfloat16"],
}
"""What a word in a variant's name changes. Without `balanced` the router chooses, see BUCKETS."""

FUSIONS = {
    "swiglu": ["swiglu"],
    "norm": ["rms_norm", "add_rms_norm"],
    "rope": ["rope"],
    "permute": ["permute", "unpermute"],
    "route": ["route"],
}
"""Kernels that a word such as `without_norm` switches off; `without_all`: all of these."""

BUCKETS = "moe.capacity_buckets=[1.05,1.1,1.2,1.3,1.5,1.75,2.0,2.5,3.0,4.0,6.0]"


def overrides_of(model: str, variant: str) -> list[str]:
    """Settings of a variant such as `unrolled-dots`.

    Raises:
      ValueError: a word of it is not known.
    """
    num_experts = BENCHMARKS[model].config.get("moe", {}).get("num_experts", 0)
    buckets = [BUCKETS] if num_experts else []
    return buckets + [o for word in variant.split("-") for o in overrides_of_word(word)]


def overrides_of_word(word: str) -> list[str]:
    """Settings of one word: of `WORDS`, `b8` (global batch size), `fit80` (the mode that saves
    memory, with a budget in GiB) or `without_norm` (of `FUSIONS`)."""
    if word in WORDS:
        return WORDS[word]
    if found := re.fullmatch(r"b(\d+)", word):
        return [f"training.global_batch_size={found[1]}"]
    if found := re.fullmatch(r"fit(\d+)", word):
        return ["remat.mode=save_memory", f"remat.memory_budget={found[1]}GiB"]
    if found := re.fullmatch(rf"without_({'|'.join(FUSIONS)}|all)", word):
        names = FUSIONS if found[1] == "all" else [found[1]]
        return [f"kernels.overrides.{op}=xla" for name in names for op in FUSIONS[name]]
    known = [*WORDS, "b8", "fit80", *(f"without_{name}" for name in FUSIONS), "without_all"]
    raise ValueError(f"{word!r} in a variant is none of {', '.join(known)}")
