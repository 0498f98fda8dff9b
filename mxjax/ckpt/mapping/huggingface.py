"""The tables for Hugging Face's models: Llama, Qwen3, Qwen3-MoE, Mixtral and DeepSeek-V3.

Names are those of the files, which differ from those of the modules in `transformers` where that
stacks experts. Everything is one layer and one expert per tensor.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import partial

from mxjax.ckpt.mapping import layouts
from mxjax.ckpt.mapping.rules import Rule, Section, Theirs, one
from mxjax.config.schema import ModelConfig, MoEConfig


class Family(StrEnum):
    """Kinds of models, by `model_type` of their ``config.json``."""

    LLAMA = "llama"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    MIXTRAL = "mixtral"
    DEEPSEEK_V3 = "deepseek_v3"


def huggingface_table(family: Family, model: ModelConfig, moe: MoEConfig) -> list[Section]:
    """All parameters of a model of this configuration, and the balancing bias of DeepSeek-V3."""
    table = _Table(family, model, moe)
    dense = model.num_layers if moe.num_experts == 0 else moe.first_k_dense
    embedding = Theirs((EMBEDDING,), (model.vocab_size, model.hidden_size), vocabulary=True)
    sections = [Section("params.embedding", "", (one("weight", embedding),))]
    for part, layers, sparse in (
        ("dense_layers", range(dense), False),
        ("moe_layers", range(dense, model.num_layers), True),
    ):
        if layers:
            rules = tuple(table.layer("", sparse))
            sections.append(Section(f"params.{part}", "model.layers.{layer}.", rules, layers))
    sections.append(Section("params.head", "", table.head()))
    ahead = range(model.num_layers, model.num_layers + model.mtp_num_layers)
    if ahead:
        rules = table.mtp(sparse=dense < model.num_layers)
        sections.append(Section("params.mtp_layers", "model.layers.{layer}.", rules, ahead))
    if family is Family.DEEPSEEK_V3:
        bias = Theirs(
            ("mlp.gate.e_score_correction_bias",), (moe.num_experts,), keep_precision=True
        )
        layers = range(dense, model.num_layers + model.mtp_num_layers)
        sections.append(Section("expert_bias", "model.layers.{layer}.", (one("", bias),), layers))
    return sections


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def copies(model: ModelConfig) -> dict[str, str]:
    """Tensors that are stored once more for multi-token prediction: the copy's name -> the other's.

    DeepSeek's files have them. A tied model's head is its embedding.
    """
    head = EMBEDDING if model.tie_embeddings else HEAD
    found = {}
    for layer in range(model.num_layers, model.num_layers + model.mtp_num_layers):
        found[f"model.layers.{layer}.embed_tokens.weight"] = EMBEDDING
        found[f"model.layers.{layer}.shared_head.head.weight"] = head
    return found


class _Table:
    """Rules by module. Methods return what a module of ours named `ours` needs."""

    def __init__(self, family: Family, model: ModelConfig, moe: MoEConfig) -> None:
        self.family = family
        self.model = model
        self.moe = moe
        self.hidden = model.hidden_size

    def head(self) -> tuple[Rule, ...]:
        rules = [self.norm("norm", "model.norm", self.hidden)]
        if not self.model.tie_embeddings:
            shape = (self.model.vocab_size, self.hidden)
            theirs = Theirs((HEAD,), shape, vocabulary=True)
            rules.append(one("weight", theirs, layouts.transposed, layouts.transposed))
        return tuple(rules)

    def layer(self, ours: str, sparse: bool) -> list[Rule]:
        """`ours`: what our names begin with, ``layer.`` within multi-token prediction."""
        attention = self.latent_attention if self.model.mla else self.attention
        if sparse:
            feed_forward = self.experts(f"{ours}mlp.")
        else:
            feed_forward = self.mlp(f"{ours}mlp.", "mlp.", self.model.ffn_hidden_size)
        return [
            self.norm(f"{ours}attention_norm", "input_layernorm", self.hidden),
            *attention(f"{ours}attention.", "self_attn."),
            self.norm(f"{ours}mlp_norm", "post_attention_layernorm", self.hidden),
            *feed_forward,
        ]

    def mtp(self, sparse: bool) -> tuple[Rule, ...]:
        return (
            self.norm("embedding_norm", "enorm", self.hidden),
            self.norm("hidden_norm", "hnorm", self.hidden),
            self.matrix("projection", "eh_proj.weight", self.hidden, 2 * self.hidden),
            *self.layer("layer.", sparse),
            self.norm("norm", "shared_head.norm", self.hidden),
        )

    def norm(self, ours: str, theirs: str, width: int) -> Rule:
        return one(f"{ours}.scale", Theirs((f"{theirs}.weight",), (width,)))

    def matrix(self, ours: str, theirs: str, rows: int, columns: int) -> Rule:
        return one(ours, Theirs((theirs,), (rows, columns)), layouts.transposed, layouts.transposed)

    def attention(self, ours: str, theirs: str) -> list[Rule]:
        model, H = self.model, self.hidden
        N, G, D = model.num_attention_heads, model.attention_groups, model.attention_head_dim
        rules = [
            one(
                f"{ours}q",
                Theirs((f"{theirs}q_proj.weight",), (N * D, H)),
                partial(layouts.heads_last, heads=N),
                layouts.heads_first,
            ),
            Rule(
                (f"{ours}kv",),
                tuple(Theirs((f"{theirs}{name}_proj.weight",), (G * D, H)) for name in "kv"),
                lambda key, value: (layouts.stack_heads(key, value, G),),
                layouts.unstack_heads,
            ),
            self._out(ours, theirs, D),
        ]
        if model.qk_layernorm:
            rules.append(self.norm(f"{ours}q_norm", f"{theirs}q_norm", D))
            rules.append(self.norm(f"{ours}k_norm", f"{theirs}k_norm", D))
        return rules

    def latent_attention(self, ours: str, theirs: str) -> list[Rule]:
        mla, H, N = self.model.mla, self.hidden, self.model.num_attention_heads
        L, R = mla.kv_lora_rank, mla.qk_rope_head_dim
        if mla.q_lora_rank is None:
            rules = [self._queries(f"{ours}q", f"{theirs}q_proj.weight", H)]
        else:
            width = mla.q_lora_rank
            rules = [
                self.matrix(f"{ours}q_down", f"{theirs}q_a_proj.weight", width, H),
                self.norm(f"{ours}q_norm", f"{theirs}q_a_layernorm", width),
                self._queries(f"{ours}q_up", f"{theirs}q_b_proj.weight", width),
            ]
        return [
            *rules,
            one(
                f"{ours}kv_down",
                Theirs((f"{theirs}kv_a_proj_with_mqa.weight",), (L + R, H)),
                lambda w: layouts.pairs_to_halves(w.T, R),
                lambda w: layouts.halves_to_pairs(w, R).T,
            ),
            self.norm(f"{ours}kv_norm", f"{theirs}kv_a_layernorm", L),
            one(
                f"{ours}kv_up",
                Theirs(
                    (f"{theirs}kv_b_proj.weight",), (N * (mla.qk_nope_head_dim + mla.v_head_dim), L)
                ),
                partial(layouts.heads_last, heads=N),
                layouts.heads_first,
            ),
            self._out(ours, theirs, mla.v_head_dim),
        ]

    def _queries(self, ours: str, theirs: str, width: int) -> Rule:
        """Queries of latent attention, made of a vector of this width."""
        N, R = self.model.num_attention_heads, self.model.mla.qk_rope_head_dim
        return one(
            ours,
            Theirs((theirs,), (N * self.model.mla.qk_head_dim, width)),
            lambda w: layouts.pairs_to_halves(layouts.heads_last(w, N), R),
            lambda w: layouts.heads_first(layouts.halves_to_pairs(w, R)),
        )

    def _out(self, ours: str, theirs: str, width: int) -> Rule:
        heads = self.model.num_attention_heads
        return one(
            f"{ours}out",
            Theirs((f"{theirs}o_proj.weight",), (self.hidden, heads * width)),
            partial(layouts.out_from_heads, heads=heads),
            layouts.heads_to_out,
        )

    def mlp(self, ours: str, theirs: str, width: int, experts: int | None = None) -> list[Rule]:
        gate, up, down = "gate_proj", "up_proj", "down_proj"
        if self.family is Family.MIXTRAL:
            gate, up, down = "w1", "w3", "w2"
        H = self.hidden
        return [
            Rule(
                (f"{ours}up",),
                tuple(Theirs((f"{theirs}{name}.weight",), (width, H)) for name in (gate, up)),
                lambda gate, up: (layouts.stack_branches(gate, up),),
                layouts.unstack_branches,
                experts,
            ),
            replace(
                self.matrix(f"{ours}down", f"{theirs}{down}.weight", H, width), experts=experts
            ),
        ]

    def experts(self, ours: str) -> list[Rule]:
        moe, H = self.moe, self.hidden
        E, width = moe.num_experts, moe.moe_ffn_hidden_size or self.model.ffn_hidden_size
        theirs = "block_sparse_moe." if self.family is Family.MIXTRAL else "mlp."
        router = Theirs(
            (f"{theirs}gate.weight",),
            (E, H),
            keep_precision=self.family is Family.DEEPSEEK_V3,  # as transformers does
        )
        rules = [
            one(f"{ours}router.weight", router, layouts.transposed, layouts.transposed),
            *self.mlp(f"{ours}experts.", f"{theirs}experts.{{expert}}.", width, E),
        ]
        if shared := moe.shared_expert_intermediate_size:
            rules += self.mlp(f"{ours}shared.", f"{theirs}shared_experts.", shared)
        return rules
