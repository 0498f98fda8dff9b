"""Real megatron-core loads checkpoints: ``python megatron_judge.py JOBS.json``.

For the foreign interpreter. A job is a dict:
    load: folder of an iteration, of format torch_dist or torch (told by what is there)
    grid: tp, pp, vpp, ep, etp, dp
    optimizer: "plain", "distributed" or absent: load its state too
    tokens, logits: .npz with `tokens` to read, .npz with `logits` to write (no pipeline)
    rates: .npz with `rates` to write: those of the next hundred steps; with an optimizer
    save: folder of an iteration to write as Megatron does, in torch_dist
Loading is by Megatron's defaults: nothing may be missing, and torch.load runs no pickled code.
Shapes, sizes and types of the model are those of the checkpoint's own `args`.
"""

import json
import os
import random
import sys
import warnings
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from cpu_megatron import (
    chunks_of_model,
    fill_in_absent_parts,
    let_the_distributed_optimizer_use_torch,
    stand_in_for_cuda,
    transformer_config,
)


def worker(rank: int, world: int, jobs: list[dict], port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for job in jobs:
        Judge(job).run()
    dist.destroy_process_group()


class Judge:
    def __init__(self, job: dict) -> None:
        self.job, self.grid = job, job.get("grid", {})
        self.folder = Path(job["load"])
        self.legacy = not (self.folder / ".metadata").exists()

    def run(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        grid = self.grid
        vpp = grid.get("vpp", 1)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=grid.get("tp", 1),
            pipeline_model_parallel_size=grid.get("pp", 1),
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            expert_model_parallel_size=grid.get("ep", 1),
            expert_tensor_parallel_size=grid.get("etp"),
        )
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        file = torch.load(self.rank_file(), weights_only=True) if self.legacy else None
        common = file if self.legacy else self.common()
        args = common["args"]
        config = transformer_config(args, grid)
        step = args.make_vocab_size_divisible_by * grid.get("tp", 1)
        rows = -(-args.vocab_size // step) * step
        self.chunks = chunks_of_model(args, config, rows, vpp)
        self.optimizer = None
        if self.job.get("optimizer"):
            self.optimizer = self.make_optimizer(args, config)
        if self.legacy:
            self.load_legacy(file)
        else:
            self.load_dist()
        if "logits" in self.job:
            self.write_logits()
        if "rates" in self.job:
            self.write_rates(args, common["opt_param_scheduler"])
        if "save" in self.job:
            self.save()
        parallel_state.destroy_model_parallel()

    def names(self) -> list[str]:
        count = len(self.chunks)
        return ["model"] if count == 1 else [f"model{i}" for i in range(count)]

    def rank_file(self) -> Path:
        from megatron.core import parallel_state as ps

        name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
        if self.grid.get("pp", 1) > 1:
            name += f"_{ps.get_pipeline_model_parallel_rank():03d}"
        if self.grid.get("ep", 1) > 1:
            name += f"_{ps.get_expert_model_parallel_rank():03d}"
        return self.folder / name / "model_optim_rng.pt"

    def common(self) -> dict:
        from megatron.core import dist_checkpointing

        return dist_checkpointing.load_common_state_dict(str(self.folder))

    def make_optimizer(self, args: Namespace, config):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        distributed = self.job["optimizer"] == "distributed"
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, grad_reduce_in_fp32=True
        )
        wrapped = [
            DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(self.chunks)
        ]
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer=args.optimizer,
                lr=args.lr,
                min_lr=args.min_lr,
                weight_decay=args.weight_decay,
                adam_beta1=args.adam_beta1,
                adam_beta2=args.adam_beta2,
                clip_grad=args.clip_grad,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=distributed,
            ),
            wrapped,
        )
        if distributed:  # with torch's own AdamW it cannot say what to load before a first step
            for chunk in wrapped:
                chunk.zero_grad_buffer()
                chunk.finish_grad_sync()
            optimizer.step()
        return optimizer

    def metadata(self) -> dict:
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        found = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if self.job.get("optimizer") == "distributed":
            found["distrib_optim_sharding_type"] = "fully_reshardable"
            found["distrib_optim_fully_reshardable_mem_efficient"] = False
        return found | {"dp_cp_group": group}

    def sharded(self, metadata: dict, loading: bool) -> dict:
        states = {
            name: chunk.sharded_state_dict(metadata=metadata)
            for name, chunk in zip(self.names(), self.chunks, strict=True)
        }
        if self.optimizer is not None:
            states["optimizer"] = self.optimizer.sharded_state_dict(
                states, is_loading=loading, metadata=metadata
            )
        return states

    def load_dist(self) -> None:
        from megatron.core import dist_checkpointing, parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = dist_checkpointing.load_content_metadata(str(self.folder))
        wanted = self.sharded(metadata | {"dp_cp_group": group}, loading=True)
        self.take(dist_checkpointing.load(wanted, str(self.folder)))

    def load_legacy(self, file: dict) -> None:
        self.take(file)

    def take(self, state: dict) -> None:
        for name, chunk in zip(self.names(), self.chunks, strict=True):
            chunk.load_state_dict(state[name], strict=True)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])

    def write_logits(self) -> None:
        from megatron.core import parallel_state

        with np.load(self.job["tokens"]) as given:
            tokens = torch.from_numpy(given["tokens"]).long()
        length = tokens.shape[1]
        positions = torch.arange(length).expand_as(tokens)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        (model,) = self.chunks
        with torch.no_grad():
            logits = model.eval()(tokens, positions, mask.expand(len(tokens), -1, -1, -1))
        parts = [torch.empty_like(logits) for _ in range(self.grid.get("tp", 1))]
        dist.all_gather(
            parts, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group()
        )
        if dist.get_rank() == 0:
            np.savez(self.job["logits"], logits=torch.cat(parts, -1).float().numpy())

    def write_rates(self, args: Namespace, state: dict) -> None:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            wsd_decay_steps=(args.lr_wsd_decay_iters or 0) * args.global_batch_size,
            lr_wsd_decay_style=args.lr_wsd_decay_style,
            **{key: value for key, value in state.items() if key != "num_steps"},
        )
        scheduler.load_state_dict(state)
        rates = []
        for _ in range(100):
            rates.append(self.optimizer.param_groups[0]["lr"])
            scheduler.step(args.global_batch_size)
        np.savez(self.job["rates"], rates=rates)

    def save(self) -> None:
        from megatron.core import dist_checkpointing

        metadata = self.metadata()
        content = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
        folder = Path(self.job["save"])
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        state = self.sharded(metadata, loading=False) | {"args": Namespace(), "iteration": 1}
        dist_checkpointing.save(state, str(folder), content_metadata=content)


def world_size(job: dict) -> int:
    grid = job.get("grid", {})
    return grid.get("tp", 1) * grid.get("pp", 1) * grid.get("dp", 1)


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    stand_in_for_cuda()
    fill_in_absent_parts()
    let_the_distributed_optimizer_use_torch()
    torch.serialization.add_safe_globals([Namespace])
    for world in {world_size(job) for job in jobs}:
        members = [job for job in jobs if world_size(job) == world]
        port = 20000 + (os.getpid() + world) % 20000
        # Forked, and not started anew: most of the time goes into importing Megatron.
        torch.multiprocessing.start_processes(
            worker, args=(world, members, port), nprocs=world, start_method="fork"
        )


if __name__ == "__main__":
    main()
