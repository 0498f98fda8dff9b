"""What a layer gets to know besides its weights and its input."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from mxjax.sharding import collectives
from mxjax.sharding.context_parallel import ContextParallel


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerContext:
    """One microbatch's side inputs, the same for every layer. B batch, S sequence, D head width."""

    positions_BS: jax.Array
    segment_ids_BS: jax.Array | None
    """None: attention does not stop at documents. 0 marks padding."""
    valid_Bs: jax.Array
    """bool, split like the residual stream: false where there is padding."""
    rope: tuple[jax.Array, jax.Array] | None
    """cos and sin, [B, S, D / 2]."""
    key: jax.Array | None
    """Randomness of this microbatch on this data rank; None: no dropout."""
    sequence_parallel: bool = field(metadata={"static": True})
    """The residual stream is split over `tp` along the sequence."""
    context_parallel: ContextParallel = field(metadata={"static": True})
    deterministic: bool = field(metadata={"static": True})
    """Every run gives the same bits."""

    def residual_key(self, layer_key: jax.Array | None) -> jax.Array | None:
        """Key for values laid out as the residual stream: equal over `tp` where that is equal."""
        if layer_key is None or not self.sequence_parallel:
            return layer_key
        return jax.random.fold_in(layer_key, 1 + collectives.axis_index("tp"))

    def tensor_key(self, layer_key: jax.Array | None) -> jax.Array | None:
        """Key for values split over `tp` by heads or width."""
        if layer_key is None:
            return None
        return jax.random.fold_in(layer_key, 1 + collectives.axis_index("tp"))
