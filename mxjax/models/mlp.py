"""The feed-forward block, split over `tp` by its inner width.

Shapes: B batch, S sequence, s sequence of the residual stream, H hidden, F inner width (local).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mxjax.config.schema import ModelConfig
from mxjax.kernels.gelu import gelu
from mxjax.kernels.swiglu import swiglu
from mxjax.models.parts import param
from mxjax.remat.names import named
from mxjax.sharding import tensor_parallel


class MLP(nnx.Module):
    """down(swiglu(gate x, up x)) or down(gelu(up x)).

    `up` holds gate and up side by side, [H, 2, F], so that one matrix product makes both. Tensors
    are named `<name>_up` and `<name>_act`, see `mxjax/remat/names.py`.
    """

    def __init__(
        self,
        model: ModelConfig,
        ffn_size: int,
        add_bias: bool,
        rngs: nnx.Rngs,
        name: str = "mlp",
    ):
        self.name = name
        self.gated = model.activation == "swiglu"
        self.add_bias = add_bias
        std = model.init_method_std
        branches = 2 if self.gated else 1
        self.up = param(
            rngs, (model.hidden_size, branches, ffn_size), ("hidden", "branch", "ffn"), std=std
        )
        self.down = param(
            rngs,
            (ffn_size, model.hidden_size),
            ("ffn", "hidden"),
            std=std / (2 * model.num_layers) ** 0.5,
        )
        if add_bias:
            self.up_bias = param(rngs, (branches, ffn_size), ("branch", "ffn"))
            self.down_bias = param(rngs, (model.hidden_size,), ("hidden",))

    def __call__(self, x_BsH: jax.Array, sequence_parallel: bool) -> jax.Array:
        x_BSH = tensor_parallel.enter(x_BsH, sequence_parallel)
        up = jnp.einsum("bsh,hgf->bsgf", x_BSH, self.up[...])
        up = named(up, f"{self.name}_up")
        bias = self.up_bias[...] if self.add_bias else None
        if self.gated:
            act_BSF = swiglu(up, bias)
        else:
            act_BSF = gelu(up[:, :, 0], None if bias is None else bias[0])
        act_BSF = named(act_BSF, f"{self.name}_act")
        partial_BSH = jnp.einsum("bsf,fh->bsh", act_BSF, self.down[...])
        out_BsH = tensor_parallel.leave(partial_BSH, sequence_parallel)
        return out_BsH + self.down_bias[...] if self.add_bias else out_BsH
