"""What computes attention in a run, for people."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from mxjax.config.schema import Config
from mxjax.kernels.attention_choice import choose_attention


def attention_note(config: Config, mesh: Mesh | AbstractMesh) -> str:
    """Such as `cudnn, with a dense document mask (mosaic: ...)`: the implementation, and why it is
    none that `auto` likes better."""
    model = config.model
    length = config.training.seq_length // config.parallel.sequence_chunks
    q, v = (
        jax.ShapeDtypeStruct((1, length, 1, width), jnp.dtype(config.training.compute_dtype))
        for width in (model.attention_head_dim, model.value_head_dim)
    )
    documents = config.data.document_mask
    with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
        chosen, obstacles = choose_attention(
            model.attention_implementation,
            *(q, q, v),
            documents=documents,
            dropout=model.attention_dropout > 0,
            scale=1.0,
            deterministic=config.training.deterministic,
        )
    mask = ", with a dense document mask" if documents and chosen != "mosaic" else ""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in obstacles.items())
    return f"{chosen}{mask}{f' ({reasons})' if reasons else ''}"
