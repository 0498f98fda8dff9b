"""ZeRO (Rajbhandari et al. 2020) as the place where weights are gathered and gradients reduced.

Master weights are stored with `stored` rules and computed with under `compute` rules; the mesh
axes that only the first has are gathered before use. Every gradient is summed over all axes that
do not split its parameter.

stage 0  nothing to gather; gradients are all-reduced after the last microbatch
stage 1  all weights gathered once a step; gradients reduce-scattered after the last microbatch
stage 2  the same, gradients reduce-scattered after each microbatch
stage 3  each layer's weights gathered where the layer runs, and again in its backward pass;
         gradients reduce-scattered there
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from mxjax.sharding import collectives
from mxjax.sharding.mesh import AXES
from mxjax.sharding.rules import MeshAxes, ParamInfo, ShardingRules


@dataclass(frozen=True)
class LeafPlan:
    """What happens to one parameter."""

    compute_dtype: jnp.dtype
    gather_axes: MeshAxes
    gather_dim: int
    sum_axes: MeshAxes
    """Axes over which its gradient is summed and stays whole."""


@dataclass(frozen=True)
class ZeroPlan:
    """How each parameter gets from its stored to its computed form, and its gradient back."""

    stored: ShardingRules
    compute: ShardingRules
    compute_dtype: jnp.dtype
    reduce_dtype: jnp.dtype

    def leaf(self, info: ParamInfo) -> LeafPlan:
        stored = self.stored.mesh_axes(info.axes)
        compute = self.compute.mesh_axes(info.axes)
        gather_axes: MeshAxes = ()
        gather_dim = 0
        for dim, (have, want) in enumerate(zip(stored, compute, strict=True)):
            if have != want:
                gather_axes, gather_dim = have, dim
        split = {axis for axes in (*stored, *compute) for axis in axes}
        return LeafPlan(
            compute_dtype=info.dtype if info.keep_precision else self.compute_dtype,
            gather_axes=gather_axes,
            gather_dim=gather_dim,
            sum_axes=tuple(axis for axis in AXES if axis not in split),
        )

    def gather(self, params, infos):
        """Weights as layers compute with them. Differentiable: gradients come back
        reduce-scattered over the gathered axes."""
        return jax.tree.map(lambda p, i: _gather(self.leaf(i), self.reduce_dtype, p), params, infos)

    def scatter_gradients(self, grads, infos):
        """Gradients of gathered weights, summed over and split along the gathered axes."""

        def scatter(grad, info):
            plan = self.leaf(info)
            grad = self._reducible(grad, plan.gather_axes)
            return collectives.reduce_scatter(grad, plan.gather_axes, plan.gather_dim)

        return jax.tree.map(scatter, grads, infos)

    def sum_gradients(self, grads, infos):
        """Sum over the axes along which a stored parameter has equal copies."""

        def total(grad, info):
            axes = self.leaf(info).sum_axes
            return collectives.psum(self._reducible(grad, axes), axes)

        return jax.tree.map(total, grads, infos)

    def _reducible(self, grad: jax.Array, axes: MeshAxes) -> jax.Array:
        return grad.astype(self.reduce_dtype) if collectives.axis_size(axes) > 1 else grad


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(plan: LeafPlan, reduce_dtype, shard: jax.Array) -> jax.Array:
    return _gathered(plan, shard)


def _gathered(plan: LeafPlan, shard: jax.Array) -> jax.Array:
    cast = shard.astype(plan.compute_dtype)
    return collectives.all_gather(cast, plan.gather_axes, plan.gather_dim)


def _gather_fwd(plan, reduce_dtype, shard):
    # Not `_gather` itself: recompute policies must see the all-gather, not a call that hides it.
    # The empty array carries the shard's dtype to the backward pass without keeping its values.
    return _gathered(plan, shard), jnp.zeros((0,), shard.dtype)


def _gather_bwd(plan, reduce_dtype, like, grad):
    if collectives.axis_size(plan.gather_axes) > 1:
        grad = grad.astype(reduce_dtype)
    grad = collectives.reduce_scatter(grad, plan.gather_axes, plan.gather_dim)
    return (grad.astype(like.dtype),)


_gather.defvjp(_gather_fwd, _gather_bwd)
