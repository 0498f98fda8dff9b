"""Which implementation computes an attention.

`model.attention_implementation` names one. `auto` takes the fastest that can run: with documents
Mosaic's, which passes over what they exclude, else cuDNN's, else plain JAX.

Shapes: B batch, Q queries, K keys, N query heads, G key/value heads, D width of query and key
heads, E of value heads.
"""

from __future__ import annotations

from typing import Literal

import jax

from mxjax.kernels.attention_cudnn import cudnn_obstacle
from mxjax.kernels.attention_mosaic import mosaic_attention_obstacle
from mxjax.kernels.implementation import ImplementationError

Implementation = Literal["auto", "cudnn", "mosaic", "xla"]


def choose_attention(
    named: Implementation,
    q_BQND: jax.Array,
    k_BKGD: jax.Array,
    v_BKGE: jax.Array,
    *,
    documents: bool,
    dropout: bool,
    deterministic: bool = False,
) -> Literal["cudnn", "mosaic", "xla"]:
    """What runs this call, here or where it is planned for.

    Args:
      deterministic: `auto` leaves out cuDNN, whose backward pass adds in no fixed order.

    Raises:
      ImplementationError: an implementation was named that cannot run.
    """
    arrays = q_BQND, k_BKGD, v_BKGE
    if named == "mosaic" or (named == "auto" and (documents or deterministic)):
        obstacle = mosaic_attention_obstacle(*arrays, dropout=dropout)
        if obstacle is None:
            return "mosaic"
        _raise_if_named("mosaic", named, obstacle)
    if named == "cudnn" or (named == "auto" and not deterministic):
        obstacle = cudnn_obstacle(*arrays, documents=documents, dropout=dropout)
        if obstacle is None:
            return "cudnn"
        _raise_if_named("cudnn", named, obstacle)
    return "xla"


def _raise_if_named(implementation: str, named: str, obstacle: str) -> None:
    if named == implementation:
        message = f"attention_implementation: {named} cannot run here: {obstacle}; use auto"
        raise ImplementationError(message)
