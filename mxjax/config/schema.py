"""The configuration tree: one small frozen dataclass per component, with its defaults.

A field's docstring is its description in the JSON schema that editors read
(``configs/schema.json``) and in ``docs/configuration_reference.md``; both are written anew by
``python -m mxjax.config.json_schema``. Types and single values are checked here; what involves
several fields is checked in ``rules/``, and the axes against the devices in ``checks.py``.

Names are Megatron-LM's and the papers' where they have one.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_SETTINGS = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
AxisSize = Annotated[int, Field(ge=-1)]


def component(cls):
    """A frozen dataclass that validates its field types and refuses unknown keys."""
    return dataclass(frozen=True, kw_only=True, config=_SETTINGS)(cls)


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
    attention_implementation: Literal["auto", "cudnn", "xla"] = "auto"
    """`cudnn` needs an NVIDIA GPU and 16-bit compute; `xla` runs everywhere; `auto` chooses."""

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
    expert_gemm: Literal["batched", "grouped"] = "batched"
    """Layout of the rows that a rank's experts work on. `batched`: equally many places for each
    expert. `grouped`: one buffer for all of them, in which each has as many rows as it needs."""
    capacity_buckets: tuple[Annotated[float, Field(ge=1)], ...] = (1.25, 2.0)
    """Sizes of the exchange and expert buffers, in multiples of perfect balance, smallest first.
    A step that overflows is repeated with the next one; the last resort, always present, holds
    any routing. No token is dropped."""
    router: str | None = None
    """`module:Class` of a router of one's own, a subclass of `mxjax.moe.router.Router`; null: that
    one."""
    force_balanced: bool = False
    """Ignore the router's choice and deal tokens out evenly: for benchmarks only."""


@component
class ParallelConfig:
    """Sizes of the six mesh axes, outermost first, and how state is sharded over them.
    One axis may be -1: it takes the devices that the others leave."""

    pp: AxisSize = 1
    """Pipeline stages."""
    dp: AxisSize = -1
    """Data parallel replicas."""
    ep: AxisSize = 1
    """Expert parallel ranks; for everything that is not an expert, more data parallelism."""
    cp: AxisSize = 1
    """Context parallel: each rank has a part of every sequence, for attention too, and gets keys
    and values of the others."""
    cp_method: Literal["ring", "allgather"] = "ring"
    """How: `ring` passes them on in cp - 1 steps while it computes and never holds all; `allgather`
    fetches all at once, which suits short sequences. Both compute the same blocks."""
    cp_rotation: Literal["ppermute", "alltoall"] = "ppermute"
    """ring: pass blocks to the next rank, or swap them within pairs of ranks (an even number), as
    needed where ranks take different branches."""
    sp: AxisSize = 1
    """Sequence parallel by head exchange (Ulysses): each rank has a part of every sequence, but for
    attention all of it (of what `cp` leaves) and a part of the heads."""
    tp: AxisSize = 1
    """Tensor parallel."""
    sequence_parallel: bool = True
    """With tp > 1, keep the residual stream split over `tp` along the sequence (Megatron)."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """What is sharded over the data-like axes: 1 optimizer state and master weights, 2 also
    accumulated gradients, 3 also the weights that compute reads (gathered layer by layer)."""
    expert_tensor_parallel: bool = True
    """With tp > 1: true splits each expert's inner width over `tp`; false folds `tp` into `ep`,
    so that whole experts spread over ep * tp ranks (Megatron's parallel folding)."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which gradients are summed over devices."""
    cpu_devices: NonNegative = 0
    """Run each process on this many virtual CPU devices instead of the real ones; 0: the real
    ones."""


@component
class PipelineConfig:
    """Order of work over `parallel.pp` ranks, and which layers each has. Idle with one rank."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zbh1", "zbv", "dualpipev"] = "1f1b"
    """See docs/pipeline.md. `interleaved`, `zbv` and `dualpipev` have several chunks of layers on
    each rank; `zbh1`, `zbv` and `dualpipev` delay gradients of weights to fill gaps."""
    vpp: Positive | None = None
    """Chunks of layers on each rank (virtual pipeline); null: 2 for schedules with several, else
    1."""
    max_activations: Positive | None = None
    """zbh1: microbatches that a rank may hold until their gradients of weights. From `parallel.pp`
    on, an order is searched for the given `costs` that fills more of the gaps the more it may hold,
    up to twice `parallel.pp`; null: the fixed order, which holds `parallel.pp`."""
    cells: Literal["auto", "full", "split", "joint"] = "auto"
    """gpipe, 1f1b, interleaved: `full` computes both gradients at once, `split` sends that of the
    input on before it computes those of weights, `joint` runs a forward and a backward pass at the
    same time (more memory); `auto`: the fastest by simulation, without `joint`."""
    executor: Literal["auto", "one_program", "stagewise"] = "auto"
    """`one_program`: the whole step is one compiled program; `stagewise`: one for each kind of cell
    and rank, which the host sends off in order: faster, for one process that drives all GPUs;
    `auto`: stagewise where one process drives several GPUs."""
    transfers: Literal["auto", "immediate", "deferred"] = "auto"
    """one_program: a tensor crosses to the next rank as soon as it is there, or just before it is
    needed; `auto`: the faster by simulation."""
    costs: Literal["measured"] | tuple[NonNegativeFloat, ...] = (1.0, 1.3, 1.15, 2.35)
    """Time of a rank's layers for one microbatch: forward, gradient of the input, gradients of
    weights, and both gradients in one go (the sum, if left out), in any unit. For the choices
    `auto`, for searched orders and for the bubble that `--plan` shows. `measured`: by a few
    programs when a run starts; a plan then assumes the default, of a dense layer on an H200."""
    layout: str | None = None
    """Megatron's layout string: stages separated by |, of E embedding, t layer, m multi-token
    prediction, L loss, as in `Ett|(ttt|)*6,tt,m,L`; null: even."""
    num_layers_in_first_pipeline_stage: NonNegative | None = None
    """Layers of the first rank, on all its chunks together; null: as many as on the others."""
    num_layers_in_last_pipeline_stage: NonNegative | None = None
    """The same for the last rank."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """Count head and loss as a layer of the last stage."""
    empty_layers: Literal["auto"] | tuple[NonNegative, ...] = ()
    """Places left empty when layers do not divide by stages, counted in the row of layers and
    empty places; `auto` takes as many as needed, where embedding and loss are work already."""


Policy = Literal[
    "none", "dots", "full", "full_layer", "norm", "activation", "attention", "mla_up_proj"
]
Tier = Literal["light", "medium", "full"]


@component
class RematRule:
    """What some layers do. Of the rules that match a layer the last one decides all of it, in
    place of the keys of the same name around it."""

    stages: str | None = None
    """Pipeline stages, numbered along the model, such as "0" or "0,2-3"; null: all."""
    layers: str | None = None
    """Layers, numbered along the model from 0, such as "4-7"; null: all."""
    group: Literal["dense_layers", "moe_layers", "mtp_layers"] | None = None
    """Group of layers; null: all."""
    policy: Policy = "none"
    """As `remat.policy`."""
    tier: Tier | None = None
    """As `remat.tier`."""
    save: tuple[str, ...] = ()
    """As `remat.save`."""
    recompute: tuple[str, ...] = ()
    """As `remat.recompute`."""
    offload: tuple[str, ...] = ()
    """As `remat.offload`."""


@component
class RematConfig:
    """What the backward pass recomputes or fetches from the host instead of keeping; see
    docs/memory.md."""

    policy: Policy = "none"
    """`none` keeps everything, `dots` keeps matrix products and recomputes the rest, `full` (or
    `full_layer`) keeps only the input of each layer; `norm`, `activation`, `attention` and
    `mla_up_proj` keep all named tensors but the outputs of that module."""
    tier: Tier | None = None
    """Of MoE layers: what they compute again besides. `light`: activation functions, permutation,
    router; `medium`: also the experts' second matrix product and the shared expert; `full`: all of
    the MoE part but the choice of experts."""
    save: tuple[str, ...] = ()
    """Tensors by name (or modules: `norm`, ...) that are kept whatever the keys above say."""
    recompute: tuple[str, ...] = ()
    """Tensors by name (or modules) that are computed again."""
    offload: tuple[str, ...] = ()
    """Tensors by name (or modules) that wait in the host's memory."""
    rules: tuple[RematRule, ...] = ()
    """Other choices for some pipeline stages, layers or groups of layers."""
    mode: Literal["manual", "save_memory"] = "manual"
    """`save_memory` adds rules of its own, the cheapest by the plan with which a step fits
    `memory_budget`; it leaves alone what the keys above set."""
    memory_budget: str | None = None
    """save_memory: what a device may use, such as 80GiB; null: what it has."""
    host_memory: str | None = None
    """What the host may use for offloading, such as 500GiB; null: what it has free."""


@component
class TrainingConfig:
    """Length, batch, precision and safety of a run."""

    num_steps: Positive = 1000
    """Optimizer steps of the whole run."""
    seq_length: Positive = 256
    """Tokens of one sequence."""
    global_batch_size: Positive = 16
    """Sequences of one optimizer step, over all devices and microbatches."""
    num_microbatches: Positive = 1
    """Parts that each device's share of the batch is cut into; gradients accumulate over them."""
    seed: NonNegative = 0
    """The one seed of initial weights, data order and dropout."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of activations and of the weights that compute reads."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the master weights and of the optimizer state."""
    z_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the head's squared log-sum-exp."""
    eval_interval: NonNegative = 0
    """Evaluate on held-out data every so many steps and at the end; 0: never."""
    eval_batches: Positive = 8
    """Global batches of one evaluation."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """A NaN or infinite loss or gradient: stop with the place named, or skip the update and count
    it. Either way the state keeps its last good value."""
    max_skipped_steps: NonNegative = 10
    """With `nonfinite: skip`: stop after so many skipped steps in a row."""
    scan_layers: bool = True
    """Compile one layer and loop (quick to compile); false unrolls the layers (faster to run)."""
    deterministic: bool = False
    """GPU: only kernels that give the same bits each time, at some speed (attention without
    cuDNN, for one). A CPU always does."""


@component
class OptimizerConfig:
    """Optimizer, learning-rate schedule, decay and clipping."""

    name: Literal["adamw", "adafactor", "sgd", "muon"] = "adamw"
    """`muon` orthogonalises the updates of matrices and uses AdamW for the rest."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    """After the warm-up: constant; cosine down to `min_lr`; or constant, then down to `min_lr`
    over the last `decay_steps` (warm-up, stable, decay)."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up from zero."""
    decay_steps: NonNegative | None = None
    """cosine: step at which `min_lr` is reached (null: the last); wsd: length of the final linear
    decay (null: a tenth of the run)."""
    beta1: Fraction = 0.9
    """Decay of the first moment (sgd: momentum)."""
    beta2: Fraction = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""
    no_decay: tuple[str, ...] = ("bias", "norm")
    """Parameters with one of these words in their path are not decayed."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0: no clipping."""
    offload: bool = False
    """Keep moments in the host's memory; they are on the device only while they are updated."""


@component
class DataConfig:
    """Where tokens come from, how they are packed and split."""

    source: Literal["synthetic", "text", "jsonl", "indexed"] = "synthetic"
    """`synthetic`: random tokens; `text`: one document a file; `jsonl`: one document a line;
    `indexed`: tokens in Megatron's `.bin` and `.idx` files."""
    paths: tuple[str, ...] = ()
    """Files, folders or globs (`**` allowed); of a folder all files, for jsonl its `*.jsonl`.
    indexed: the prefix of the two files, with or without suffix, a folder or a glob.
    `{python_stdlib}` stands for the folder of Python's own standard library, without the packages
    installed below it."""
    blend: tuple[tuple[Annotated[float, Field(gt=0)], str], ...] = ()
    """Instead of `paths`: a list of `[weight, path]`, each a source of samples of its own, taken in
    proportion to the weights."""
    blend_stop: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """blend with `num_epochs`: stop when the first source has been passed over so often, or when
    every source has and the others repeat."""
    exclude: tuple[str, ...] = ()
    """Files or folders to leave out; a relative glob matches in any folder, `./` ties it to the
    working directory."""
    text_key: str = "text"
    """jsonl: the field that holds the text; `a.b` is the field `b` of the object in the field
    `a`."""
    tokenizer: str = "byte"
    """`byte`: ids 0-255 are bytes, 256 ends a document; or the path of a Hugging Face
    `tokenizer.json`."""
    eod_token: str | None = None
    """With a `tokenizer.json`: the special token that ends a document, such as `<|endoftext|>`;
    null: none, which only `byte` allows."""
    document_mask: bool = True
    """Attention and positions start anew at each document; false lets a packed sequence attend
    across its documents, as most peers do."""
    validation_fraction: Fraction = 0.05
    """Share of the documents (of the text, if there is one document) held out for evaluation."""
    validation_paths: tuple[str, ...] = ()
    """Evaluate on these files instead of a share of `paths`; never trained on, even if `paths`
    covers them."""
    num_epochs: Positive | None = None
    """Stop after so many passes over the data; null: reshuffle and go on. Of a blend each source
    counts its own passes, see `blend_stop`."""
    shuffle: bool = True
    """Shuffle documents and then samples, anew each epoch."""
    num_threads: Positive = 2
    """Reader threads of each process."""
    prefetch: Positive = 4
    """Batches read ahead."""


@component
class CheckpointConfig:
    """Saving and resuming."""

    save_interval: NonNegative = 0
    """Save every so many steps; 0: never, not even at the end."""
    keep_last: Positive = 3
    """Newest checkpoints kept."""
    keep_every: NonNegative = 0
    """Keep also each checkpoint whose step is a multiple of this; 0: none."""
    async_save: bool = True
    """Write in the background while training goes on."""
    restore_step: NonNegative | None = None
    """Resume from this step instead of the newest; later checkpoints are refused, not deleted."""


@component
class InitFromConfig:
    """What a run starts from while its `run_dir` has no checkpoint; null: random weights."""

    path: str | None = None
    """A Megatron checkpoint (`torch` or `torch_dist`: its folder or one iteration in it), a Hugging
    Face folder, or a run of mxjax (or one of its steps), of a model like `model` and `moe`."""
    training_state: bool = False
    """Take the optimizer state, the step and the position in the data as well, so that training
    goes on; false: weights alone, from step 0."""


KernelChoice = Literal["auto", "xla", "mosaic", "triton"]


@component
class KernelOverrides:
    """Implementations of single ops, in place of `kernels.implementation`; null: as that says."""

    swiglu: KernelChoice | None = None
    """SwiGLU, with or without a bias."""
    gelu: KernelChoice | None = None
    """GELU, with or without a bias."""
    rms_norm: KernelChoice | None = None
    """RMSNorm."""
    layer_norm: KernelChoice | None = None
    """LayerNorm."""
    add_rms_norm: KernelChoice | None = None
    """Residual addition and RMSNorm."""
    add_layer_norm: KernelChoice | None = None
    """Residual addition and LayerNorm."""
    bias_dropout_add: KernelChoice | None = None
    """Bias, dropout and residual addition."""
    rope: KernelChoice | None = None
    """Rotary embedding."""
    grouped_matmul: KernelChoice | None = None
    """Matrix products of groups of rows, an expert each."""
    grouped_matmul_input_gradient: KernelChoice | None = None
    """Their gradient of the rows."""
    grouped_matmul_weight_gradient: KernelChoice | None = None
    """Their gradient of the weights."""
    batched_matmul: KernelChoice | None = None
    """Matrix products of equal groups of rows, an expert each, with their gradients."""
    route: KernelChoice | None = None
    """Choice of experts, their weights and each token's place in their queues."""
    permute: KernelChoice | None = None
    """Rows to the experts that they go to."""
    unpermute: KernelChoice | None = None
    """Weighted sum of what the experts made of a row."""


@component
class KernelsConfig:
    """Which implementation of the ops in `mxjax/kernels` runs; see docs/kernels.md."""

    implementation: Literal["auto", "xla", "mosaic"] = "auto"
    """`xla`: what XLA makes of plain JAX; `mosaic`: kernels for NVIDIA Hopper GPUs, and an error
    where one cannot run; `auto`: for each op what was measured to be faster on this kind of
    device, `xla` where nothing was measured."""
    overrides: KernelOverrides = field(default_factory=KernelOverrides)
    """Other implementations of single ops."""


@component
class LogConfig:
    """What a run prints, writes and records."""

    interval: Positive = 1
    """Print every so many steps; `metrics.jsonl` has all of them."""
    progress_bar: bool = True
    """Progress bar under the lines, on a terminal."""
    tensorboard: bool = True
    """Write TensorBoard files into the run directory."""
    profile_steps: tuple[Positive, Positive] | None = None
    """First and last step to record with the JAX profiler, into `<run_dir>/profile`."""
    sample_tokens: NonNegative = 0
    """Greedy tokens to print when training ends; 0: none."""
    sample_prompt: str = "def "
    """Start of that sample."""


@component
class Config:
    """One run."""

    run_dir: str = "runs/default"
    """Folder of everything that the run writes, on a mounted file system; running again resumes
    from it. `~` is the home folder."""
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    remat: RematConfig = field(default_factory=RematConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    init_from: InitFromConfig = field(default_factory=InitFromConfig)
    log: LogConfig = field(default_factory=LogConfig)
