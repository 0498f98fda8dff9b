"""The same ops by others: torch and Liger-Kernel.

All are optional: what cannot be imported is left out. Nothing of JAX is needed here.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mxjax.kernels.bench import attention_peers, grouped_peers

if TYPE_CHECKING:
    from mxjax.kernels.bench.attention_peers import Peer
    from mxjax.kernels.bench.timing import Effort

EPSILON, RATE = 1e-5, 0.1
CLOCK = 2e9
"""Cycles per second, about."""
NUM_CONSTANTS = {"RoPE": 2}
"""How many of the last arguments have no gradient: cosines and sines."""


def times(
    name: str, sizes: tuple[int, ...], with_backward: bool, effort: Effort, least: float | None
) -> Iterator[tuple[str, float]]:
    """(peer, seconds of one call) of every peer that has the case, can be imported and works.

    Args:
      least: seconds that a call takes at least; None: not known.
    """
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    torch._dynamo.reset()
    for peer, (function, shapes) in _candidates(name, sizes).items():
        n = len(shapes) - NUM_CONSTANTS.get(name, 0)
        try:
            seconds = _seconds(function, shapes, n if with_backward else 0, effort, least)
        except Exception as error:  # whatever theirs raises, ours can still be timed
            print(f"{peer}, {name}: failed: {str(error).strip().splitlines()[0]}", file=sys.stderr)
            continue
        yield peer, seconds


def _candidates(name: str, sizes: tuple[int, ...]) -> dict[str, Peer]:
    """Peers by their names."""
    if name in attention_peers.NAMES:
        return attention_peers.attention_peers(name, *sizes)
    if name in grouped_peers.NAMES:
        peer = grouped_peers.grouped_mm(name, *sizes)
        return {} if peer is None else {"torch._grouped_mm": peer}
    import torch

    shapes = _shapes(name, sizes)
    candidates: dict[str, Peer] = {"torch.compile": (torch.compile(_formulas()[name]), shapes)}
    if importlib.util.find_spec("liger_kernel") is not None:
        liger = _liger().get(name)
        if liger is not None:
            candidates["Liger"] = liger, shapes
    return candidates


def _shapes(name: str, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of the arguments of `_formulas` and `_liger`."""
    if name == "RoPE":
        T, N, D = sizes
        return [(1, T, N // 2, D), (1, T, N // 2, D), (T, D), (T, D)]  # queries and keys
    if name == "linear + cross entropy":
        T, H, V = sizes
        return [(T, H), (V, H)]
    T, H = sizes
    return {
        "SwiGLU": [(T, H), (T, H)],
        "bias-SwiGLU": [(T, H), (T, H), (H,), (H,)],
        "bias-GELU": [(T, H), (H,)],
        "RMSNorm": [(T, H), (H,)],
        "LayerNorm": [(T, H), (H,), (H,)],
        "add + RMSNorm": [(T, H), (T, H), (H,)],
        "add + LayerNorm": [(T, H), (T, H), (H,), (H,)],
        "bias + dropout + add": [(T, H), (T, H), (H,)],
    }[name]


def _targets(x, weight):
    import torch

    return torch.arange(x.shape[0], device=x.device) % weight.shape[0]


def _formulas() -> dict[str, Callable[..., Any]]:
    """Plain formulas, as a user of torch writes them."""
    from torch.nn import functional as F

    def rms(x, scale):
        return F.rms_norm(x, scale.shape, scale, EPSILON)

    def layer(x, scale, bias):
        return F.layer_norm(x, scale.shape, scale, bias, EPSILON)

    def added(norm):
        def both(x, residual, *weights):
            total = x + residual
            return total, norm(total, *weights)

        return both

    def rope(q, k, cos, sin):
        import torch

        cos, sin = cos[:, None], sin[:, None]

        def turn(x):
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat([-second, first], dim=-1) * sin

        return turn(q), turn(k)

    def linear_cross_entropy(x, weight):
        return F.cross_entropy((x @ weight.T).float(), _targets(x, weight), reduction="sum")

    return {
        "linear + cross entropy": linear_cross_entropy,
        "SwiGLU": lambda gate, up: F.silu(gate) * up,
        "bias-SwiGLU": lambda gate, up, a, b: F.silu(gate + a) * (up + b),
        "bias-GELU": lambda x, bias: F.gelu(x + bias, approximate="tanh"),
        "RMSNorm": rms,
        "LayerNorm": layer,
        "add + RMSNorm": added(rms),
        "add + LayerNorm": added(layer),
        "bias + dropout + add": lambda x, residual, bias: residual + F.dropout(x + bias, RATE),
        "RoPE": rope,
    }


def _liger() -> dict[str, Callable[..., Any]]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def rope(q, k, cos, sin):
        # It takes heads before tokens, as a view of tokens before heads; else it would copy.
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return LigerRopeFunction.apply(q, k, cos[None], sin[None])

    def linear_cross_entropy(x, weight):
        targets = _targets(x, weight)
        return LigerFusedLinearCrossEntropyFunction.apply(
            x, weight, targets, None, None, -100, 0.0, 0.0, "sum"
        )[0]

    return {
        "linear + cross entropy": linear_cross_entropy,
        "SwiGLU": LigerSiLUMulFunction.apply,
        "RMSNorm": lambda x, scale: LigerRMSNormFunction.apply(x, scale, EPSILON),
        "LayerNorm": lambda x, s, b: LigerLayerNormFunction.apply(x, s, b, EPSILON),
        "add + RMSNorm": lambda x, r, s: LigerFusedAddRMSNormFunction.apply(x, r, s, EPSILON)[::-1],
        "RoPE": rope,
    }


def _seconds(function, shapes, num_gradients: int, effort: Effort, least: float | None) -> float:
    """Of one call, with several sets of arguments as in `timing.py`; with gradients of the first
    arguments, or forward alone."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def tensors():
        return [
            torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=i < num_gradients)
            for i, shape in enumerate(shapes)
        ]

    calls = effort.calls(least)
    sets = [tensors() for _ in range(effort.number_of_sets(2 * sum(map(math.prod, shapes))))]
    d_outs: list = []

    def call(arguments):
        outs = function(*arguments)
        if not num_gradients:
            return
        outs = outs if isinstance(outs, tuple) else (outs,)
        if not d_outs:
            d_outs.extend(torch.randn_like(out) for out in outs)
        torch.autograd.grad(outs, arguments[:num_gradients], d_outs)

    def run():
        for i in range(calls):
            call(sets[i % len(sets)])

    for _ in range(2):
        run()
    timed = _seconds_on_gpu if device == "cuda" else _seconds_of
    return statistics.median(timed(run) for _ in range(effort.repeats)) / calls


def _seconds_of(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _seconds_on_gpu(run: Callable[[], None]) -> float:
    """Between events on the device, which waits until all work is in its queue: what Python needs
    to send it off does not count."""
    import torch

    torch.cuda.synchronize()
    to_send_off = _seconds_of(run)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2 * to_send_off * CLOCK))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3
