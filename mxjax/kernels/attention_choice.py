"""Which implementation computes an attention.

`model.attention_implementation` names one. `auto` takes the first that can run: with documents, or
where every run must give the same bits, Mosaic's, which passes over what documents exclude; then
cuDNN's, unless every run must give the same bits; then plain JAX.

Shapes: B batch, Q queries, K keys, N query heads, G key/value heads, D width of query and key
heads, E of value heads.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import jax

from mxjax.kernels.attention_cudnn import cudnn_obstacle
from mxjax.kernels.attention_mosaic import mosaic_attention_obstacle
from mxjax.kernels.implementation import ImplementationError

Implementation = Literal["auto", "cudnn", "mosaic", "xla"]


class AttentionChoice(NamedTuple):
    """What runs, and why nothing that `auto` likes better does."""

    implementation: Literal["cudnn", "mosaic", "xla"]
    obstacles: dict[str, str]
    """Of those that were looked at first."""


def choose_attention(
    named: Implementation,
    q_BQND: jax.Array | jax.ShapeDtypeStruct,
    k_BKGD: jax.Array | jax.ShapeDtypeStruct,
    v_BKGE: jax.Array | jax.ShapeDtypeStruct,
    *,
    documents: bool,
    dropout: bool,
    scale: float,
    deterministic: bool,
) -> AttentionChoice:
    """What runs this call, here or where it is planned for.

    Args:
      documents: there are segment ids.
      dropout: of probabilities.
      scale: of the scores.
      deterministic: `auto` leaves out cuDNN, whose backward pass adds in no fixed order.

    Raises:
      ImplementationError: an implementation was named that does not exist or cannot run.
    """
    if named not in get_args(Implementation):
        raise ImplementationError(
            f"model.attention_implementation: {named} is none of "
            f"{', '.join(get_args(Implementation))}"
        )
    arrays, obstacles = (q_BQND, k_BKGD, v_BKGE), {}
    if named == "mosaic" or (named == "auto" and (documents or deterministic)):
        obstacles["mosaic"] = mosaic_attention_obstacle(*arrays, dropout=dropout, scale=scale)
    if named == "cudnn" or (named == "auto" and not deterministic):
        obstacles["cudnn"] = cudnn_obstacle(*arrays, documents=documents, dropout=dropout)
    passed = {}
    for implementation, obstacle in obstacles.items():
        if obstacle is None:
            return AttentionChoice(implementation, passed)
        if named == implementation:
            raise ImplementationError(
                f"model.attention_implementation: {named} cannot run here: {obstacle}; use auto"
            )
        passed[implementation] = obstacle
    return AttentionChoice("xla", passed)
