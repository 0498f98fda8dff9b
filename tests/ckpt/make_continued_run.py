"""Makes ``tests/data/megatron/continued_*`` with the real megatron-core 0.19.2, on a CPU.

Each is a run of four steps that was saved after the second: the checkpoint, the tokens of all
steps and their losses (``run.npz``), and Adam's moments after the second step by the names of
parameters (``moments.npz``), taken from torch's optimizer in memory.

* ``continued_dense``: format ``torch``, plain Adam, cosine with a warm-up;
* ``continued_mixtral``: format ``torch_dist``, distributed optimizer with ``dp_reshardable``.

It needs PyTorch (made with 2.13.0), megatron-core on PYTHONPATH, unpacked from its wheel, and what
that imports (einops, packaging, psutil, pyyaml, tqdm, triton, absl-py), and is run by hand in an
environment that has them:

    PYTHONPATH=MCORE python tests/ckpt/make_continued_run.py tests/data/megatron
"""

import argparse
import contextlib
import os
import shutil
import sys
import typing
from pathlib import Path

import numpy as np
import torch
import typing_extensions

HIDDEN, HEADS, GROUPS, FFN, EXPERT_FFN = 8, 2, 1, 12, 4
VOCABULARY, SEQUENCE, BATCH, STEPS, SAVED_AFTER = 32, 16, 4, 4, 2
KINDS = ("exp_avg", "exp_avg_sq")
LR, MIN_LR, WARMUP, DECAY = 1e-2, 1e-3, 1, 8


def without_cuda():
    """Stands in for the CUDA calls that megatron-core makes without asking for a device."""
    if not hasattr(typing, "override"):  # Python before 3.12
        typing.override = typing_extensions.override

    class Nothing:
        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    cpu = torch.device("cpu")
    cuda = torch.cuda
    cuda.current_device = lambda: cpu
    for name in ("set_device", "synchronize", "empty_cache", "_lazy_call", "manual_seed_all"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    for name in ("Stream", "Event", "current_stream", "default_stream"):
        setattr(cuda, name, lambda *args, **kwargs: Nothing())
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.FloatTensor = lambda data=(), *args: torch.tensor(data, dtype=torch.float32)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    plain_type = torch.Tensor.type

    def cuda_type(self, *args, **kwargs):
        found = plain_type(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = cuda_type

    def on_cpu(make):
        def call(*args, **kwargs):
            if "cuda" in str(kwargs.get("device")):
                kwargs["device"] = cpu
            return make(*args, **kwargs)

        return call

    for name in ("empty", "zeros", "ones", "tensor", "arange", "full", "rand", "randn"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def model_config(moe):
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": EXPERT_FFN,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
    }
    return TransformerConfig(
        num_layers=1 if moe else 2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=FFN,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        layernorm_epsilon=1e-5,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.1,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        params_dtype=torch.float32,
        **(experts if moe else {}),
    )


def build(moe):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    config = model_config(moe)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=4 if moe else None, moe_grouped_gemm=False, normalization="RMSNorm"
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    settings = DistributedDataParallelConfig(use_distributed_optimizer=moe)
    wrapped = DistributedDataParallel(config, settings, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LR,
            min_lr=MIN_LR,
            weight_decay=0.1,
            adam_beta2=0.95,
            clip_grad=1.0,
            params_dtype=torch.float32,
            use_distributed_optimizer=moe,
        ),
        [wrapped],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LR,
        min_lr=MIN_LR,
        lr_warmup_steps=WARMUP * BATCH,
        lr_decay_steps=DECAY * BATCH,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=DECAY * BATCH,
        wd_incr_style="constant",
    )
    return config, model, wrapped, optimizer, scheduler


def arguments(config, moe):
    """What Megatron keeps as ``args``, as far as an import looks at it."""
    found = argparse.Namespace(
        num_layers=1 if moe else 2,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=GROUPS,
        kv_channels=config.kv_channels,
        seq_length=SEQUENCE,
        max_position_embeddings=SEQUENCE,
        position_embedding_type="rope",
        rotary_base=10000,
        rotary_percent=1.0,
        swiglu=True,
        normalization="RMSNorm",
        norm_epsilon=1e-5,
        add_bias_linear=False,
        add_qkv_bias=False,
        untie_embeddings_and_output_weights=True,
        padded_vocab_size=VOCABULARY,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        data_parallel_size=1,
        transformer_impl="local",
        bf16=False,
        fp16=False,
        use_distributed_optimizer=moe,
        optimizer="adam",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        clip_grad=1.0,
        train_iters=DECAY,
        global_batch_size=BATCH,
        consumed_train_samples=SAVED_AFTER * BATCH,
        reset_attention_mask=False,
        reset_position_ids=False,
        num_experts=4 if moe else None,
    )
    if moe:
        for name in (
            "moe_router_topk",
            "moe_ffn_hidden_size",
            "moe_router_load_balancing_type",
            "moe_aux_loss_coeff",
            "moe_grouped_gemm",
        ):
            setattr(found, name, getattr(config, name))
    return found


def moments(model, optimizer, moe):
    """Both of each parameter, in memory."""
    (inner,) = optimizer.chained_optimizers
    found = {}
    for name, parameter in model.named_parameters():
        if moe:
            state = inner._get_main_param_and_optimizer_states(parameter)
        else:
            state = inner.optimizer.state[parameter]
        both = [state[kind].detach().reshape(parameter.shape) for kind in KINDS]
        found[name] = torch.stack(both).numpy()
    return found


def save(folder, model, config, optimizer, scheduler, moe):
    from megatron.core import dist_checkpointing

    content = {
        "args": arguments(config, moe),
        "checkpoint_version": 3.0,
        "iteration": SAVED_AFTER,
        "opt_param_scheduler": scheduler.state_dict(),
    }
    place = folder / ("torch_dist" if moe else "torch") / f"iter_{SAVED_AFTER:07d}"
    if moe:
        place.mkdir(parents=True)
        metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
        content["model"] = model.sharded_state_dict(metadata=metadata)
        content["optimizer"] = optimizer.sharded_state_dict(content, metadata=metadata)
        dist_checkpointing.save(content, str(place), content_metadata=metadata)
    else:
        place = place / "mp_rank_00"
        place.mkdir(parents=True)
        content["model"] = model.state_dict_for_save_checkpoint()
        content["optimizer"] = optimizer.state_dict()
        torch.save(content, place / "model_optim_rng.pt")
    tracker = folder / place.relative_to(folder).parts[0] / "latest_checkpointed_iteration.txt"
    tracker.write_text(str(SAVED_AFTER))


def run(folder, moe):
    shutil.rmtree(folder, ignore_errors=True)
    config, model, wrapped, optimizer, scheduler = build(moe)
    generator = torch.Generator().manual_seed(7)
    for _, weight in model.named_parameters():
        if weight.dim() == 1:  # norms of exactly one would hide mistakes
            weight.data.copy_(1 + 0.1 * torch.randn(weight.shape, generator=generator))
    tokens = torch.randint(0, VOCABULARY, (STEPS, BATCH, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1).expand(BATCH, 1, -1, -1)
    losses, rates = [], []
    for step in range(STEPS):
        if step == SAVED_AFTER:
            save(folder, model, config, optimizer, scheduler, moe)
            np.savez_compressed(folder / "moments.npz", **moments(model, optimizer, moe))
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        inputs, labels = tokens[step, :, :-1], tokens[step, :, 1:]
        loss = wrapped(inputs, positions, mask, labels=labels).mean()
        loss.backward()
        wrapped.finish_grad_sync()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(BATCH)
        losses.append(loss.item())
    np.savez_compressed(
        folder / "run.npz", tokens=tokens.numpy().astype(np.int32), losses=losses, rates=rates
    )
    print(folder.name, losses, rates)


def main():
    without_cuda()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571", "NO_VCS_VERSION": "1"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    for name, moe in (("continued_dense", False), ("continued_mixtral", True)):
        torch.manual_seed(1234)
        model_parallel_cuda_manual_seed(1234)
        run(Path(sys.argv[1]) / name, moe)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
