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

from pydantic import Field

from mxjax.config.component import (
    AxisSize,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    VirtualDevices,
    component,
)
from mxjax.config.model_schema import MLAConfig as MLAConfig
from mxjax.config.model_schema import ModelConfig, MoEConfig
from mxjax.config.model_schema import RopeScalingConfig as RopeScalingConfig


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
    cpu_devices: VirtualDevices = 0
    """Run each process on this many virtual CPU devices instead of the real ones; 0: the real
    ones."""

    @property
    def sequence_chunks(self) -> int:
        """Parts of a sequence that attend by themselves: two for each rank of `cp`."""
        return 2 * self.cp if self.cp > 1 else 1


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
    """zbh1: microbatches that a rank may hold until their gradients of weights, in an order that is
    searched for the given `costs`. More than `parallel.pp`, up to twice as many, fill more of the
    gaps; fewer take less memory and leave more. null: the fixed order, which holds
    `parallel.pp`."""
    cells: Literal["auto", "full", "split", "joint"] = "auto"
    """gpipe, 1f1b, interleaved: `full` computes both gradients at once, `split` sends that of the
    input on before it computes those of weights, `joint` runs a forward and a backward pass at the
    same time (more memory); `auto`: the fastest by simulation, without `joint`."""
    executor: Literal["auto", "one_program", "stagewise"] = "auto"
    """`one_program`: the whole step is one compiled program; `stagewise`: one for each kind of cell
    and rank, which the host sends off in order: faster, and only for one process that drives all
    devices; `auto`: stagewise there, else one_program."""
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
    router; `medium`: also the experts' first matrix product and the shared expert; `full`: all of
    the MoE part but the choice of experts."""
    save: tuple[str, ...] = ()
    """Tensors by name (or modules: `norm`, ...) that are kept whatever the keys above say."""
    recompute: tuple[str, ...] = ()
    """Tensors by name (or modules) that are computed again."""
    offload: tuple[str, ...] = ()
    """Tensors by name (or modules) that wait in the host's memory; in a pipeline those of the first
    half of its stages, while the others keep them on the device: `rules` can say otherwise."""
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
    moments_dtype: Literal["float32", "bfloat16"] | None = None
    """What moments are kept in; they are computed in fp32. `bfloat16` halves their memory, and is
    rounded stochastically. null: `training.param_dtype`."""
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


KernelChoice = Literal["auto", "xla", "mosaic"]
KernelChoiceWithTriton = Literal["auto", "xla", "mosaic", "triton"]


@component
class KernelOverrides:
    """Implementations of single ops, in place of `kernels.implementation`; null: as that says."""

    swiglu: KernelChoiceWithTriton | None = None
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
    bias_dropout_add: KernelChoiceWithTriton | None = None
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
    permute: KernelChoiceWithTriton | None = None
    """Rows to the experts that they go to."""
    unpermute: KernelChoiceWithTriton | None = None
    """Weighted sum of what the experts made of a row."""


@component
class KernelsConfig:
    """Which implementation of the ops in `mxjax/kernels` runs; see docs/kernels.md."""

    implementation: Literal["auto", "xla", "mosaic"] = "auto"
    """`xla`: what XLA makes of plain JAX; `mosaic`: kernels for NVIDIA Hopper GPUs, and an error
    where one cannot run; `auto`: for each op what was measured to be faster on this kind of
    device at the nearest sizes, `xla` for ops that were not measured."""
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
