"""What a layer's backward pass keeps and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax import lax

from mxjax.config.schema import RematConfig
from mxjax.kernels.attention_block import RESULTS
from mxjax.sharding.mesh import DATA_AXES

LayerFunction = Callable[..., tuple]


def rematerialise(
    layer: LayerFunction, remat: RematConfig, *, gathers_weights: bool, in_scan: bool
) -> LayerFunction:
    """`layer` with the policy of `remat` around it.

    `gathers_weights`: the layer gathers its own weights (ZeRO-3). They must not outlive the
    layer's forward pass, so even policy `none` then gathers them again in the backward pass.
    `in_scan`: the layer is the body of a scan. Outside of one, XLA would see that a value is
    computed twice and keep the first, unless barriers prevent that.
    """
    checkpoint = partial(jax.checkpoint, layer, prevent_cse=not in_scan)
    if remat.policy == "full":
        return checkpoint()
    if remat.policy == "dots":
        return checkpoint(policy=_keep_products)
    if gathers_weights:
        return checkpoint(policy=_keep_all_but_weights)
    return layer


def _keep_products(primitive, *_, **params) -> bool:
    if primitive is lax.dot_general_p:
        # Two batch dims (batch and head) mean attention scores, quadratic in the sequence.
        _, (batch_dims, _) = params["dimension_numbers"]
        return len(batch_dims) < 2
    if primitive.name == "name":
        return params["name"] in RESULTS
    return primitive.name.startswith("dot_product_attention_fwd")


def _keep_all_but_weights(primitive, *_, **params) -> bool:
    if primitive is lax.all_gather_p:
        return not set(params["axis_name"]) <= set(DATA_AXES)
    return True
