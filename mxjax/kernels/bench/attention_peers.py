"""Causal attention of torch: cuDNN's, FlexAttention and `varlen_attn`, over the same documents."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

NAMES = CAUSAL, DOCUMENTS = "causal attention", "attention in documents"

Peer = tuple[Callable[..., Any], list[tuple[int, ...]]]
"""A function of queries, keys and values, and their shapes."""


def attention_peers(
    name: str, B: int, S: int, N: int, G: int, D: int, E: int, *lengths: int
) -> dict[str, Peer]:
    """Peers for B sequences of S tokens, N query and G key/value heads of widths D and, values, E.

    What depends on the documents alone is made here and is not timed: models have it once a step.

    Args:
      lengths: of documents, which fill the sequences one after the other.
    """
    shapes = [(B, N, S, D), (B, G, S, D), (B, G, S, E)]
    if name == CAUSAL:
        return {"torch cuDNN": (_cudnn, shapes)}
    peers = {"FlexAttention": (_flex(B, S, lengths), shapes)}
    if D == E:  # it takes no others
        peers["varlen_attn"] = _varlen(lengths), [(B * S, N, D), (B * S, G, D), (B * S, G, E)]
    return peers


def _cudnn(q, k, v):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _flex(B: int, S: int, lengths: tuple[int, ...]):
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = "cuda" if torch.cuda.is_available() else "cpu"
    counts = torch.tensor(lengths, device=device)
    documents = torch.arange(len(lengths), device=device).repeat_interleave(counts).view(B, S)

    def sees(b, _, query, key):
        return (query >= key) & (documents[b, query] == documents[b, key])

    mask = create_block_mask(sees, B, None, S, S, device=device)
    compiled = torch.compile(flex_attention)

    def run(q, k, v):
        return compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return run


def _varlen(lengths: tuple[int, ...]):
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)

    def run(q, k, v):
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.11 wants as many heads of keys as of queries.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))

    return run
