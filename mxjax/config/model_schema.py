"""The model's part of the configuration tree; see ``schema.py``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mxjax.config.component import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    component,
)


@component
class RopeScalingConfig:
    """Stretching of rotary frequencies beyond the trained length."""

    kind: Literal["linear", "llama3", "yarn"] = "llama3"
    """`linear` divides all positions by `factor`; `llama3` and `yarn` only slow the low
    frequencies."""
    factor: Annotated[float, Field(ge=1)] = 8.0
    """How many times longer the context becomes."""
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    """llama3: wavelengths above original length / this are fully scaled."""
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    """llama3: wavelengths below original length / this stay as they are."""
    original_max_position_embeddings: Positive = 8192
    """llama3, yarn: the length that the model was first trained with."""
    beta_fast: Annotated[float, Field(gt=0)] = 32.0
    """yarn: dims that turn more often than this over the original length stay as they are."""
    beta_slow: Annotated[float, Field(gt=0)] = 1.0
    """yarn: dims that turn less often than this over the original length are fully scaled."""
    mscale: NonNegativeFloat = 1.0
    """yarn: cos and sin are multiplied by m(mscale) / m(mscale_all_dim), where
    m(s) = 0.1 s ln(factor) + 1."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """yarn: attention scores are multiplied by m(mscale_all_dim) squared."""


@component
class MLAConfig:
    """Multi-head latent attention: keys and values of all heads come from one narrow latent.
    The defaults are those of DeepSeek-V2-Lite."""

    q_lora_rank: Positive | None = None
    """Width of the latent of the queries; null: queries come directly from the hidden state."""
    kv_lora_rank: Positive = 512
    """Width of the latent that keys and values come from."""
    qk_nope_head_dim: Positive = 128
    """Width of the part of a query or key head without positions (Megatron's qk_head_dim)."""
    qk_rope_head_dim: Positive = 64
    """Width of the part with rotary positions, whose key all heads share (Megatron's
    qk_pos_emb_head_dim)."""
    v_head_dim: Positive = 128
    """Width of a value head."""

    @property
    def qk_head_dim(self) -> int:
        """Width of a whole query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@component
class ModelConfig:
    """The transformer, apart from its experts. Defaults are Llama-like and small."""

    num_layers: Positive = 4
    """Number of transformer layers."""
    hidden_size: Positive = 256
    """Width of the residual stream."""
    ffn_hidden_size: Positive = 1024
    """Inner width of a dense MLP."""
    num_attention_heads: Positive = 8
    """Number of query heads."""
    num_query_groups: Positive | None = None
    """Number of key/value heads (grouped-query attention); null: as many as query heads."""
    head_dim: Positive | None = None
    """Width of one head (Megatron's kv_channels); null: hidden_size / num_attention_heads."""
    qk_layernorm: bool = False
    """RMSNorm over each query and key head before rotary positions (Qwen3)."""
    mla: MLAConfig | None = None
    """Multi-head latent attention (DeepSeek) in place of grouped-query attention; null: none."""
    vocab_size: Positive = 320
    """Rows of the embedding and columns of the head, padding included. Must hold every id of
    the tokenizer and be a multiple of `parallel.tp`."""
    max_position_embeddings: Positive = 4096
    """Longest sequence the model is meant for; the size of the learned position table."""
    position_embedding: Literal["rope", "learned"] = "rope"
    """Rotary (Llama) or learned absolute positions (GPT-2)."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """Rotary base."""
    rope_scaling: RopeScalingConfig | None = None
    """Rotary frequency scaling; null: none."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before attention, before the MLP and before the head."""
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the variance under the root."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """MLP non-linearity; `gelu` is the tanh form of GPT-2."""
    add_bias_linear: bool = False
    """Biases on the attention output and MLP matrices (GPT-2)."""
    add_qkv_bias: bool = False
    """Biases on the query, key and value matrices (GPT-2, Qwen2)."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the head."""
    hidden_dropout: Fraction = 0.0
    """Dropout after the embedding, after attention and after the MLP."""
    attention_dropout: Fraction = 0.0
    """Dropout of attention probabilities."""
    init_method_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of initial weights; matrices that write into the residual stream use
    this / sqrt(2 * num_layers)."""
    mtp_num_layers: NonNegative = 0
    """Multi-token prediction modules after the last layer (DeepSeek-V3): number k predicts the
    token k + 1 places ahead, for a further loss in training."""
    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    """Weight of the mean of the losses of all multi-token prediction modules."""
    attention_implementation: Literal["auto", "cudnn", "mosaic", "xla"] = "auto"
    """`cudnn` needs an NVIDIA GPU and 16-bit compute; `mosaic`, which passes over what documents
    exclude, a Hopper GPU, bfloat16, sequences of a multiple of 128 and heads of 64 or 128 (MLA's
    keys also 192); both no `attention_dropout`; `xla` runs everywhere; `auto` chooses."""

    @property
    def attention_head_dim(self) -> int:
        """Width of a query and key head: `head_dim` with its default filled in, or MLA's."""
        if self.mla is not None:
            return self.mla.qk_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rope_dim(self) -> int:
        """Width of the part of a head that rotary positions turn."""
        return self.mla.qk_rope_head_dim if self.mla is not None else self.attention_head_dim

    @property
    def value_head_dim(self) -> int:
        """Width of a value head."""
        return self.mla.v_head_dim if self.mla is not None else self.attention_head_dim

    @property
    def attention_groups(self) -> int:
        """`num_query_groups` with its default filled in."""
        return self.num_query_groups or self.num_attention_heads


@component
class MoEConfig:
    """Mixture of experts. `num_experts: 0` makes a dense model and switches all of this off."""

    num_experts: NonNegative = 0
    """Routed experts of every MoE layer."""
    router_topk: Positive = 2
    """Experts chosen per token."""
    moe_ffn_hidden_size: Positive | None = None
    """Inner width of one expert; null: `model.ffn_hidden_size`."""
    shared_expert_intermediate_size: NonNegative = 0
    """Inner width of the shared expert that every token passes; 0: none."""
    first_k_dense: NonNegative = 0
    """The first so many layers have a dense MLP instead of experts."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores."""
    router_pre_softmax: bool = False
    """softmax over all experts before top-k (DeepSeek-V2, Qwen3); false: softmax over the chosen
    k only (Mixtral)."""
    norm_topk_prob: bool = False
    """Divide the chosen scores by their sum. Softmax over the chosen k sums to one already."""
    num_groups: Positive | None = None
    """Group-limited routing (DeepSeek's n_group, Megatron's moe_router_num_groups): experts form
    so many groups, and a token's experts come from its `group_topk` best groups; null: off."""
    group_topk: Positive | None = None
    """Groups that a token may choose from (DeepSeek's topk_group)."""
    group_score: Literal["sum", "max"] = "sum"
    """What groups are compared by: `sum` of the best router_topk / group_topk scores of a group
    (Megatron; two in DeepSeek-V3), or the `max` (DeepSeek-V2)."""
    routed_scaling_factor: Annotated[float, Field(gt=0)] = 1.0
    """Multiplies the weights of the chosen experts."""
    aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss over the microbatch (Switch Transformer)."""
    seq_aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss over each sequence (DeepSeek-V3)."""
    z_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the router's squared log-sum-exp (ST-MoE)."""
    expert_bias_update_rate: NonNegativeFloat = 0.0
    """Step of the aux-loss-free balancing bias, moved once a step by the global counts
    (DeepSeek-V3: 1e-3); 0: no bias."""
    dispatcher: Literal["allgather", "alltoall"] = "alltoall"
    """How tokens reach the experts of other `ep` ranks; `alltoall` sends each token once per
    rank that holds one of its experts, `allgather` sends every token to every rank."""
    expert_gemm: Literal["auto", "batched", "grouped"] = "auto"
    """Layout of the rows that a rank's experts work on. `batched`: equally many places for each
    expert. `grouped`: one buffer for all of them, in which each has as many rows as it needs.
    `auto`: `grouped` where its kernels run (bf16 on Hopper GPUs), else `batched`."""
    capacity_buckets: tuple[Annotated[float, Field(ge=1)], ...] = (1.25, 2.0)
    """Sizes of the exchange and expert buffers, in multiples of perfect balance, smallest first.
    A step that overflows is repeated with the next one; the last resort, always present, holds
    any routing. No token is dropped."""
    router: str | None = None
    """`module:Class` of a router of one's own, a subclass of `mxjax.moe.router.Router`; null: that
    one."""
    force_balanced: bool = False
    """Ignore the router's choice and deal tokens out evenly: for benchmarks only."""
