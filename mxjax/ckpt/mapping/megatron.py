"""The table for Megatron-LM's GPT models: dense, Mixtral-like, DeepSeek-like.

Names are those of the ``torch_dist`` format with the numbers of layer and expert written out:
``decoder.layers.3.mlp.experts.7.linear_fc1.weight``. The readers bring other spellings to this one;
what differs between module specs (Transformer Engine's fused norms) stands here as further names.
"""

from __future__ import annotations

from functools import partial

from mxjax.ckpt.mapping import layouts
from mxjax.ckpt.mapping.rules import Cut, Rule, Section, Theirs, one
from mxjax.config.schema import ModelConfig, MoEConfig


def megatron_table(
    model: ModelConfig, moe: MoEConfig, zero_centred_gamma: bool = False
) -> list[Section]:
    """All parameters of a model of this configuration.

    Args:
      zero_centred_gamma: norms are stored as their difference from one
        (``apply_layernorm_1p``).
    """
    table = _Table(model, moe, zero_centred_gamma)
    dense = model.num_layers if moe.num_experts == 0 else moe.first_k_dense
    sections = [Section("params.embedding", "", table.embedding())]
    for part, layers, sparse in (
        ("dense_layers", range(dense), False),
        ("moe_layers", range(dense, model.num_layers), True),
    ):
        if layers:
            rules = table.layer("", sparse)
            sections.append(Section(f"params.{part}", "decoder.layers.{layer}.", rules, layers))
    sections.append(Section("params.head", "", table.head()))
    if model.mtp_num_layers:
        rules = table.mtp(sparse=dense < model.num_layers)
        layers = range(model.mtp_num_layers)
        sections.append(Section("params.mtp_layers", "mtp.layers.{layer}.", rules, layers))
    return sections


def expert_bias_sections(model: ModelConfig, moe: MoEConfig) -> list[Section]:
    """The balancing bias of the routers, which is state but no parameter; those of multi-token
    prediction come last."""
    rules = (one("", Theirs(("mlp.router.expert_bias",), (moe.num_experts,))),)
    layers = range(moe.first_k_dense, model.num_layers)
    sections = [Section("expert_bias", "decoder.layers.{layer}.", rules, layers)]
    if model.mtp_num_layers:
        prefix = "mtp.layers.{layer}.transformer_layer."
        ahead = range(model.mtp_num_layers)
        sections.append(Section("expert_bias", prefix, rules, ahead, first=len(layers)))
    return sections


class _Table:
    """Rules by module. Methods return what a module of ours named `path` needs."""

    def __init__(self, model: ModelConfig, moe: MoEConfig, zero_centred_gamma: bool) -> None:
        self.model = model
        self.moe = moe
        self.gamma = 1 if zero_centred_gamma else 0
        self.hidden = model.hidden_size

    def embedding(self) -> tuple[Rule, ...]:
        model = self.model
        shape = (model.vocab_size, self.hidden)
        words = Theirs(("embedding.word_embeddings.weight",), shape, Cut.ROWS, vocabulary=True)
        rules = [one("weight", words)]
        if model.position_embedding == "learned":
            shape = (model.max_position_embeddings, self.hidden)
            rules.append(one("position", Theirs(("embedding.position_embeddings.weight",), shape)))
        return tuple(rules)

    def head(self) -> tuple[Rule, ...]:
        rules = self.norm("norm", "decoder.final_layernorm.", "decoder.final_norm.")
        if not self.model.tie_embeddings:
            shape = (self.model.vocab_size, self.hidden)
            theirs = Theirs(("output_layer.weight",), shape, Cut.ROWS, vocabulary=True)
            rules.append(one("weight", theirs, layouts.transposed, layouts.transposed))
        return tuple(rules)

    def layer(self, ours: str, sparse: bool) -> tuple[Rule, ...]:
        """`ours`: what our names begin with, ``layer.`` within multi-token prediction."""
        attention, mlp = f"{ours}attention.", f"{ours}mlp."
        rules = self.norm(
            f"{ours}attention_norm", "input_layernorm.", "self_attention.linear_qkv.layer_norm_"
        )
        rules += self.latent_attention(attention) if self.model.mla else self.attention(attention)
        rules += self.norm(f"{ours}mlp_norm", "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        if sparse:
            rules += self.experts(mlp)
        else:
            biases = self.model.add_bias_linear
            rules += self.mlp(mlp, "mlp.", self.model.ffn_hidden_size, biases)
        return tuple(rules)

    def mtp(self, sparse: bool) -> tuple[Rule, ...]:
        H = self.hidden
        projection = Theirs(("eh_proj.weight",), (H, 2 * H), Cut.ROWS)
        rules = self.norm("embedding_norm", "enorm.") + self.norm("hidden_norm", "hnorm.")
        rules.append(one("projection", projection, layouts.transposed, layouts.transposed))
        for rule in self.layer("layer.", sparse):
            theirs = tuple(
                Theirs(
                    tuple(f"transformer_layer.{name}" for name in tensor.names),
                    tensor.shape,
                    tensor.cut,
                )
                for tensor in rule.theirs
            )
            rules.append(Rule(rule.ours, theirs, rule.to_ours, rule.to_theirs, rule.experts))
        return (*rules, *self.norm("norm", "final_layernorm."))

    def norm(self, ours: str, *theirs: str, width: int | None = None) -> list[Rule]:
        """`theirs`: beginnings of its names, which end with ``weight`` and ``bias``."""
        shape = (width or self.hidden,)
        scale = Theirs(tuple(f"{prefix}weight" for prefix in theirs), shape)
        gamma = self.gamma
        rules = [one(f"{ours}.scale", scale, lambda w: w + gamma, lambda w: w - gamma)]
        if self.model.norm == "layernorm" and width is None:
            rules.append(
                one(f"{ours}.bias", Theirs(tuple(f"{prefix}bias" for prefix in theirs), shape))
            )
        return rules

    def attention(self, ours: str) -> list[Rule]:
        model, H = self.model, self.hidden
        N, G, D = model.num_attention_heads, model.attention_groups, model.attention_head_dim
        theirs, rows = "self_attention.", (N + 2 * G) * D
        qkv = Theirs((f"{theirs}linear_qkv.weight",), (rows, H), Cut.ROWS)
        rules = [
            Rule(
                (f"{ours}q", f"{ours}kv"),
                (qkv,),
                partial(layouts.split_qkv, groups=G, heads=N),
                lambda q, kv: (layouts.join_qkv(q, kv),),
            ),
            self._out(ours, N, D),
        ]
        if model.add_qkv_bias:
            bias = Theirs((f"{theirs}linear_qkv.bias",), (rows,), Cut.ROWS)
            rules.append(
                Rule(
                    (f"{ours}q_bias", f"{ours}kv_bias"),
                    (bias,),
                    partial(layouts.split_qkv_bias, groups=G, heads=N),
                    lambda q, kv: (layouts.join_qkv_bias(q, kv),),
                )
            )
        if model.add_bias_linear:
            rules.append(one(f"{ours}out_bias", Theirs((f"{theirs}linear_proj.bias",), (H,))))
        if model.qk_layernorm:
            rules += self.norm(f"{ours}q_norm", f"{theirs}q_layernorm.", width=D)
            rules += self.norm(f"{ours}k_norm", f"{theirs}k_layernorm.", width=D)
        return rules

    def latent_attention(self, ours: str) -> list[Rule]:
        mla, H, N = self.model.mla, self.hidden, self.model.num_attention_heads
        theirs, L, R = "self_attention.", mla.kv_lora_rank, mla.qk_rope_head_dim
        if mla.q_lora_rank is None:
            rules = [self._queries(f"{ours}q", f"{theirs}linear_q_proj.weight", H)]
        else:
            width, up = mla.q_lora_rank, f"{theirs}linear_q_up_proj."
            down = Theirs((f"{theirs}linear_q_down_proj.weight",), (width, H), Cut.WHOLE_OR_ROWS)
            rules = [
                one(f"{ours}q_down", down, layouts.transposed, layouts.transposed),
                *self.norm(
                    f"{ours}q_norm", f"{theirs}q_layernorm.", f"{up}layer_norm_", width=width
                ),
                self._queries(f"{ours}q_up", f"{up}weight", width),
            ]
        up = f"{theirs}linear_kv_up_proj."
        return [
            *rules,
            one(
                f"{ours}kv_down",
                Theirs((f"{theirs}linear_kv_down_proj.weight",), (L + R, H), Cut.WHOLE_OR_ROWS),
                lambda w: layouts.pairs_to_halves(w.T, R),
                lambda w: layouts.halves_to_pairs(w, R).T,
            ),
            *self.norm(f"{ours}kv_norm", f"{theirs}kv_layernorm.", f"{up}layer_norm_", width=L),
            one(
                f"{ours}kv_up",
                Theirs(
                    (f"{up}weight",), (N * (mla.qk_nope_head_dim + mla.v_head_dim), L), Cut.ROWS
                ),
                partial(layouts.heads_last, heads=N),
                layouts.heads_first,
            ),
            self._out(ours, N, mla.v_head_dim),
        ]

    def _queries(self, ours: str, theirs: str, width: int) -> Rule:
        """Queries of latent attention, made of a vector of this width."""
        N, R = self.model.num_attention_heads, self.model.mla.qk_rope_head_dim
        return one(
            ours,
            Theirs((theirs,), (N * self.model.mla.qk_head_dim, width), Cut.ROWS),
            lambda w: layouts.pairs_to_halves(layouts.heads_last(w, N), R),
            lambda w: layouts.heads_first(layouts.halves_to_pairs(w, R)),
        )

    def _out(self, ours: str, heads: int, width: int) -> Rule:
        names = ("self_attention.linear_proj.weight",)
        return one(
            f"{ours}out",
            Theirs(names, (self.hidden, heads * width), Cut.COLUMNS),
            partial(layouts.out_from_heads, heads=heads),
            layouts.heads_to_out,
        )

    def mlp(
        self, ours: str, theirs: str, width: int, biases: bool = False, experts: int | None = None
    ) -> list[Rule]:
        H, gated = self.hidden, self.model.activation == "swiglu"
        branches = 2 if gated else 1
        cut = Cut.GATED_ROWS if gated else Cut.ROWS
        up = Theirs((f"{theirs}linear_fc1.weight",), (branches * width, H), cut)
        down = Theirs((f"{theirs}linear_fc2.weight",), (H, width), Cut.COLUMNS)
        rules = [
            one(
                f"{ours}up",
                up,
                partial(layouts.split_branches, branches=branches),
                layouts.join_branches,
                experts,
            ),
            one(f"{ours}down", down, layouts.transposed, layouts.transposed, experts),
        ]
        if biases:
            up = Theirs((f"{theirs}linear_fc1.bias",), (branches * width,), cut)
            rules += [
                one(
                    f"{ours}up_bias",
                    up,
                    lambda bias: bias.reshape(branches, -1),
                    lambda bias: bias.reshape(-1),
                ),
                one(f"{ours}down_bias", Theirs((f"{theirs}linear_fc2.bias",), (H,))),
            ]
        return rules

    def experts(self, ours: str) -> list[Rule]:
        moe, H = self.moe, self.hidden
        E, width = moe.num_experts, moe.moe_ffn_hidden_size or self.model.ffn_hidden_size
        router = Theirs(("mlp.router.weight",), (E, H))
        rules = [
            one(f"{ours}router.weight", router, layouts.transposed, layouts.transposed),
            *self.mlp(f"{ours}experts.", "mlp.experts.{expert}.", width, experts=E),
        ]
        if moe.shared_expert_intermediate_size:
            shared = moe.shared_expert_intermediate_size
            rules += self.mlp(f"{ours}shared.", "mlp.shared_experts.", shared)
        return rules
