"""Causal attention at the sizes of Llama-3-8B and of DeepSeek-V2-Lite (MLA).

Documents have log-normal lengths of mean 1000 tokens, one fixed layout for each size. The work is
that of the pairs of query and key that see each other; whatever else a kernel computes counts as
time only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.kernels.attention import causal_attention
from mxjax.kernels.bench.attention_peers import CAUSAL, DOCUMENTS
from mxjax.kernels.bench.cases import DTYPE, Case, Work
from mxjax.kernels.bench.timing import random_floats
from mxjax.kernels.implementation import shape_class


@dataclass(frozen=True)
class Heads:
    """B sequences of S tokens, N query heads and G key/value heads, of widths D and, values, E."""

    model: str
    B: int
    S: int
    N: int
    G: int
    D: int
    E: int


SIZES = (
    Heads("Llama-3-8B", 2, 8192, 32, 8, 128, 128),
    Heads("Llama-3-8B", 4, 4096, 32, 8, 128, 128),
    Heads("MLA", 4, 4096, 16, 16, 192, 128),
)
SMALL = (
    Heads("GQA", 2, 256, 4, 2, 64, 64),
    Heads("GQA", 4, 128, 4, 2, 64, 64),
    Heads("MLA", 4, 128, 2, 2, 128, 64),
)


def attention_cases(small: bool) -> list[Case]:
    """Every case; `small`: of shapes that a CPU runs at once."""
    llama, shorter, latent = SMALL if small else SIZES
    mean = 60 if small else 1000
    return [
        _case("causal", llama),
        _case("causal", shorter),
        _case("documents", llama, document_lengths(llama.B, llama.S, mean)),
        # What a document mask costs where it has nothing to mask.
        _case("one document", llama, [llama.S] * llama.B),
        _case("causal", latent),
        _case("documents", latent, document_lengths(latent.B, latent.S, mean)),
    ]


def document_lengths(B: int, S: int, mean: float) -> list[int]:
    """Lengths of the documents in B sequences of S tokens, which they fill one after the other.

    Log-normal: half of the documents are shorter than mean / 2, and half of the tokens are in ones
    longer than 2 mean. Where a sequence ends in a document, the rest of it begins the next one.
    """
    spread = 1.2  # of the logarithm
    # With this seed the few documents there are have about that mean too.
    rng = np.random.default_rng(4)
    drawn = np.ceil(rng.lognormal(np.log(mean) - spread**2 / 2, spread, B * S)).astype(int)
    ends = np.cumsum(drawn)
    ends = np.union1d(ends[ends < B * S], S * np.arange(1, B + 1))
    return np.diff(ends, prepend=0).tolist()


def segment_ids(B: int, S: int, lengths: Sequence[int]) -> np.ndarray:
    """[B, S] int32, the document within its sequence, from 1; as `data/packing.py` has it."""
    documents_BS = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths).reshape(B, S)
    return documents_BS - documents_BS[:, :1] + 1


def products(h: Heads, lengths: Sequence[int]) -> tuple[int, int]:
    """FLOPs of the matrix products for documents of these lengths, forward and backward.

    Forward: scores and outputs. Backward: scores again, and the gradients of queries, keys,
    probabilities and values.
    """
    pairs = h.N * sum(length * (length + 1) // 2 for length in lengths)
    return pairs * (2 * h.D + 2 * h.E), pairs * (3 * 2 * h.D + 2 * 2 * h.E)


def _case(kind: str, h: Heads, lengths: Sequence[int] | None = None) -> Case:
    """`lengths`: of documents, which fill the sequences; None: no document mask."""
    heads = tuple(
        jax.ShapeDtypeStruct((h.B, h.S, *shape), DTYPE)
        for shape in ((h.N, h.D), (h.G, h.D), (h.G, h.E))
    )
    ids = () if lengths is None else (segment_ids(h.B, h.S, lengths),)
    forward, backward = products(h, lengths or [h.S] * h.B)
    # Queries, keys, values and outputs; back the same and their gradients.
    moved = h.B * h.S * (h.N + h.G) * (h.D + h.E) * DTYPE.dtype.itemsize
    moved_ids = sum(x.nbytes for x in ids)
    return Case(
        "attention",
        f"{kind} {h.model} B{h.B} S{h.S}",
        _run,
        (*heads, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ids)),
        shape_class(DTYPE, h.D, h.E),
        Work(moved + moved_ids, forward),
        Work(3 * moved + 2 * moved_ids, forward + backward),
        differentiable=(0, 1, 2),
        make=lambda key: (*random_floats(heads)(key), *map(jnp.asarray, ids)),
        implementations=("cudnn", "mosaic", "xla"),
        peer=CAUSAL if lengths is None else DOCUMENTS,
        peer_sizes=(h.B, h.S, h.N, h.G, h.D, h.E, *(lengths or ())),
    )


def _run(q, k, v, segment_ids_BS=None, *, implementation):
    return causal_attention(q, k, v, segment_ids_BS=segment_ids_BS, implementation=implementation)
