"""The peer of `pipeline.py`: the same layers under torch.distributed.pipelining, on two GPUs.

    python benchmarks/pipeline_torch.py [--schedules 1f1b,interleaved,zbv,dualpipev] [--layers 4]
        [--microbatches 16] [--seq-length 4096] [--hidden 4096] [--steps 5] [--json out.json]

Needs torch and no mxjax; processes are started here. Llama-like layers in bf16 with bf16 gradients
(the peer's usual way; ours are added up in fp32), causal SDPA, a small vocabulary on the first and
the last stage. Ideal is, as there, one GPU with half of the layers that accumulates gradients over
the same microbatches. Before anything is timed, the loss must be that of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional

RANKS, VOCAB, HEAD_DIM = 2, 512, 128
SCHEDULES = {  # class, chunks of a rank, whether they lie in a V
    "1f1b": (Schedule1F1B, 1, False),
    "interleaved": (ScheduleInterleaved1F1B, 2, False),
    "zbv": (ScheduleZBVZeroBubble, 2, True),
    "dualpipev": (ScheduleDualPipeV, 2, True),
}


class Layer(nn.Module):
    """Norm, grouped-query attention with RoPE, norm, SwiGLU: Llama 3's proportions."""

    def __init__(self, hidden: int):
        super().__init__()
        self.heads = max(hidden // HEAD_DIM, 1)
        self.groups = max(self.heads // 4, 1)
        self.dim = hidden // self.heads
        ffn = hidden * 7 // 2
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.groups) * self.dim, bias=False)
        self.out = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        B, S, _ = x.shape
        sizes = [n * self.dim for n in (self.heads, self.groups, self.groups)]
        q, k, v = (
            part.view(B, S, -1, self.dim).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(sizes, -1)
        )
        q, k = rotate(q), rotate(k)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, S, -1))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


def rotate(x):
    """RoPE, first half paired with second half."""
    S, D = x.shape[-2:]
    angles = torch.arange(S, device=x.device)[:, None] * 500000.0 ** -(
        torch.arange(0, D, 2, device=x.device) / D
    )
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Chunk(nn.Module):
    """The layers of one stage, with embedding and head where they belong."""

    def __init__(self, hidden: int, numbers: range, first: bool, last: bool):
        super().__init__()
        self.embedding = seeded(-1, nn.Embedding, VOCAB, hidden) if first else None
        self.layers = nn.ModuleList(seeded(n, Layer, hidden) for n in numbers)
        self.head = seeded(-2, nn.Linear, hidden, VOCAB, bias=False) if last else None

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def seeded(number: int, kind, *args, **options):
    """A module whose weights depend on its number only."""
    torch.manual_seed(1000 + number)
    return kind(*args, **options)


def loss_of(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def place(module: nn.Module, device) -> nn.Module:
    return module.to(device=device, dtype=torch.bfloat16 if device.type == "cuda" else None)


def batch(args, device):
    generator = torch.Generator().manual_seed(0)
    shape = (args.microbatches, args.seq_length)
    tokens = torch.randint(VOCAB, shape, generator=generator)
    return tokens.to(device), tokens.roll(-1, 1).to(device)


def accumulate(model, args, tokens, targets) -> float:
    """Loss and gradients of the whole batch, one sequence at a time."""
    total = torch.zeros((), device=tokens.device)
    for m in range(args.microbatches):
        loss = loss_of(model(tokens[m : m + 1]), targets[m : m + 1]) / args.microbatches
        loss.backward()
        total += loss.detach()
    return total.item()


def seconds_of(step, steps: int, device) -> float:
    times = []
    for _ in range(steps + 1):  # the first is for warming up
        wait(device)
        started = time.perf_counter()
        step()
        wait(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def wait(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def chunks_of(args, rank: int, num_chunks: int, in_v: bool) -> dict[int, Chunk]:
    """Stage number -> its layers, for one rank."""
    stages = RANKS * num_chunks
    mine = [rank, stages - 1 - rank] if in_v else range(rank, stages, RANKS)
    size = RANKS * args.layers // stages
    return {
        s: Chunk(args.hidden, range(s * size, (s + 1) * size), s == 0, s == stages - 1)
        for s in mine
    }


def run_schedule(name: str, args, rank: int, device) -> tuple[float, float]:
    """Seconds of a step, and its loss, on all ranks."""
    kind, num_chunks, in_v = SCHEDULES[name]
    chunks = chunks_of(args, rank, num_chunks, in_v)
    stages = [
        PipelineStage(place(chunk, device), s, RANKS * num_chunks, device)
        for s, chunk in chunks.items()
    ]
    schedule = kind(stages if num_chunks > 1 else stages[0], args.microbatches, loss_fn=loss_of)
    tokens, targets = batch(args, device)
    has_loss = RANKS * num_chunks - 1 in chunks
    losses: list[torch.Tensor] = []

    def step():
        losses.clear()
        for chunk in chunks.values():
            chunk.zero_grad(set_to_none=True)
        given = (tokens,) if 0 in chunks else ()
        schedule.step(*given, **({"target": targets, "losses": losses} if has_loss else {}))

    # Ranks leave a step together: the slowest counts.
    seconds = torch.tensor(seconds_of(step, args.steps, device), device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
    loss = loss.detach().float()
    dist.all_reduce(loss)
    return seconds.item(), loss.item()


def worker(rank: int, args, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=RANKS)
    tokens, targets = batch(args, device)
    half = place(Chunk(args.hidden, range(args.layers), True, True), device)
    ideal = seconds_of(partial(accumulate, half, args, tokens, targets), args.steps, device)
    del half
    whole = place(Chunk(args.hidden, range(RANKS * args.layers), True, True), device)
    expected = accumulate(whole, args, tokens, targets)
    del whole
    rows = []
    if rank == 0:
        print(f"ideal: {ideal * 1e3:.1f} ms\n{'schedule':14} {'step ms':>8} {'/ ideal':>8}")
    for name in args.schedules.split(","):
        seconds, loss = run_schedule(name, args, rank, device)
        if abs(loss / expected - 1) > 1e-2:
            raise SystemExit(f"{name}: loss {loss}, expected {expected}")
        rows.append({"schedule": name, "seconds": seconds, "ratio": seconds / ideal})
        if rank == 0:
            print(f"{name:14} {seconds * 1e3:8.1f} {seconds / ideal:8.3f}", flush=True)
    if rank == 0 and args.json:
        with open(args.json, "w") as file:
            json.dump({"ideal": ideal, "rows": rows}, file, indent=1)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--layers", type=int, default=4, help="of one rank")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (args, port), nprocs=RANKS)


if __name__ == "__main__":
    main()
