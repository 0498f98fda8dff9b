"""What a layer's backward pass keeps and what it computes again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_policies

from mxjax.kernels.attention_block import RESULTS
from mxjax.remat.layers import LayerPolicy
from mxjax.remat.names import keeping
from mxjax.sharding.mesh import DATA_AXES

LayerFunction = Callable[..., tuple]


def rematerialise(
    layer: LayerFunction, policy: LayerPolicy, *, gathers_weights: bool, in_scan: bool
) -> LayerFunction:
    """`layer` with `policy` around it.

    `layer`: of its weights and other arguments.
    `gathers_weights`: the layer gathers its own weights (ZeRO-3). They must not outlive the
    layer's forward pass, so even a policy that keeps everything then gathers them again in the
    backward pass.
    `in_scan`: the layer is the body of a scan. Outside of one, XLA would see that a value is
    computed twice and keep the first, unless barriers prevent that.
    """
    keep = _what_to_keep(policy, gathers_weights)
    if keep is None:
        return layer

    # One function for one policy, as JAX remembers by function what it traced.
    def traced(*arguments: Any) -> tuple:
        if policy.kind != "names":
            return layer(*arguments)
        with keeping(policy.save | policy.offload):
            return layer(*arguments)

    def run(weights: Any, *inputs: Any) -> tuple:
        # Weights pass a barrier only if something is made of them alone. A kernel reads a layer's
        # part of the stacked weights where it lies, but a barrier wants a copy.
        barriers = (gathers_weights, *[True] * len(inputs))
        prevent_cse = False if in_scan else barriers
        return jax.checkpoint(traced, policy=keep, prevent_cse=prevent_cse)(weights, *inputs)

    return run


def _what_to_keep(policy: LayerPolicy, gathers_weights: bool) -> Callable | None:
    """For `jax.checkpoint`; None: whatever autodiff wants."""
    if policy.kind == "names":
        return _keep_names(policy)
    if policy.kind == "dots":
        return _keep_products
    return _keep_all_but_weights if gathers_weights else None


@cache  # JAX remembers what it traced under a policy by the function's identity
def _keep_names(policy: LayerPolicy) -> Callable:
    return checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(with_softmax(policy.save)),
        names_which_can_be_offloaded=sorted(with_softmax(policy.offload)),
        offload_src="device",
        offload_dst="pinned_host",
    )


def with_softmax(names: Collection[str]) -> set[str]:
    """`attention_out` stands for all that attention leaves for its backward pass."""
    return set(names) | (set(RESULTS) if "attention_out" in names else set())


def _keep_products(primitive, *_, **params) -> bool:
    if primitive is lax.dot_general_p:
        # Two batch dims (batch and head) mean attention scores, quadratic in the sequence.
        _, (batch_dims, _) = params["dimension_numbers"]
        return len(batch_dims) < 2
    return primitive.name == "name" and params["name"] in RESULTS


_OTHER_FORMS = ("convert_element_type", "expand_dims", "reshape", "slice", "squeeze", "transpose")
"""Of a tensor that is there: kept, they would keep the gathered weights that they are forms of."""


def _keep_all_but_weights(primitive, *_, **params) -> bool:
    if primitive is lax.all_gather_p:
        return not set(params["axis_name"]) <= set(DATA_AXES)
    return primitive.name not in _OTHER_FORMS
