"""Attention over a sequence that mesh axes split.

Shapes: B batch, s this rank's part of the sequence, N query heads, G key/value heads, D width of
query and key heads, E width of value heads.
"""

from __future__ import annotations

import jax

from mxjax.kernels.attention import Implementation, causal_attention


def attend(
    q_BsND: jax.Array,
    k_BsGD: jax.Array,
    v_BsGE: jax.Array,
    *,
    segment_ids_Bs: jax.Array | None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Causal attention of the whole sequence, [B, s, N, E]; arguments as `causal_attention`."""
    return causal_attention(
        q_BsND,
        k_BsGD,
        v_BsGE,
        segment_ids_BS=segment_ids_Bs,
        scale=scale,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        implementation=implementation,
    )
