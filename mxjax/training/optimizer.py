"""Optimizers from optax and the learning-rate schedule.

Every optimizer is built for learning rate 1; the training step multiplies its update by the rate of
the step, so that schedules follow the steps of the run even when updates were skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from mxjax.config.schema import OptimizerConfig
from mxjax.kernels.random_bits import mix, round_stochastically
from mxjax.sharding.rules import ParamInfo

MATRIX_DIMS = {"heads", "kv_heads", "head_dim", "ffn", "expert_ffn", "latent_out", "joined"}
"""Logical dims that, against one of HIDDEN_DIMS, make a parameter a matrix for Muon. Embedding,
head and router are not among them: Muon's authors leave first and last layers to AdamW."""

HIDDEN_DIMS = {"hidden", "expert_hidden", "latent"}


def learning_rate(config: OptimizerConfig, num_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Rate of the step with this 0-based index; the first warm-up step is already above zero."""
    decay: Callable
    if config.schedule == "cosine":
        end = config.decay_steps or num_steps
        decay = optax.cosine_decay_schedule(
            config.lr, max(1, end - config.warmup_steps), alpha=config.min_lr / config.lr
        )
    elif config.schedule == "wsd":
        length = config.decay_steps or max(1, num_steps // 10)
        start = num_steps - length - config.warmup_steps
        decay = optax.linear_schedule(config.lr, config.min_lr, length, transition_begin=start)
    else:
        decay = optax.constant_schedule(config.lr)
    warmup = optax.linear_schedule(0.0, config.lr, max(1, config.warmup_steps))
    joined = optax.join_schedules([warmup, decay], [config.warmup_steps])
    return lambda step: joined(step + 1)


def build_optimizer(
    config: OptimizerConfig, infos: dict, filled: Mapping[str, float] | None = None
) -> optax.GradientTransformation:
    """The optimizer for parameters described by `infos`, with learning rate 1.

    Args:
      filled: for each part of the model, the share of a stack's places that hold layers; the
        others are zeros. None: all do.
    """

    def decayed(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not any(word in jax.tree_util.keystr(path) for word in config.no_decay),
            params,
        )

    # Added to the finished update, which has its minus sign already: the same decoupled decay for
    # all. Muon's own would decay all that it leaves to AdamW, SGD's would gather in the momentum.
    decay = optax.add_decayed_weights(-config.weight_decay, mask=decayed)
    optimizer = optax.chain(_without_decay(config, infos, filled or {}), decay)

    def init(params):
        state = optimizer.init(params)
        return _with_moments_in(state, config.moments_dtype) if config.moments_dtype else state

    return optax.GradientTransformation(init, optimizer.update)


def update_moments(
    optimizer: optax.GradientTransformation, grads, state, params, step: jax.Array
) -> tuple[Any, Any]:
    """`optimizer.update` in fp32, whatever dtype the state is kept in: updates, new state.

    To bf16 it is rounded stochastically. A second moment that loses 0.1 % a step (`beta2` 0.999)
    would never fall if it were rounded to the nearest: neighbours are 0.4 to 0.8 % apart.
    """
    updates, new = optimizer.update(grads, _cast(state, jnp.float32), params)
    olds, tree = jax.tree.flatten(state)
    stored = [
        _stored(leaf, old.dtype, step, number)
        for number, (leaf, old) in enumerate(zip(jax.tree.leaves(new), olds, strict=True))
    ]
    return updates, tree.unflatten(stored)


def _stored(leaf: jax.Array, dtype: jnp.dtype, step: jax.Array, number: int) -> jax.Array:
    if dtype != jnp.bfloat16:
        return leaf.astype(dtype)
    return round_stochastically(leaf, mix(step.astype(jnp.uint32)), mix(jnp.uint32(number)))


MOMENTS = {"mu", "nu", "trace"}
"""What optax calls them."""


def _with_moments_in(state, dtype):
    def cast(path, leaf):
        named = any(getattr(key, "name", None) in MOMENTS for key in path)
        return leaf.astype(dtype) if named else leaf

    return jax.tree_util.tree_map_with_path(cast, state)


def _cast(state, dtype):
    """Its real numbers in `dtype`."""

    def cast(leaf):
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, state)


def _without_decay(
    config: OptimizerConfig, infos: dict, filled: Mapping[str, float]
) -> optax.GradientTransformation:
    if config.name == "adamw":
        return optax.adam(1.0, config.beta1, config.beta2, config.eps)
    if config.name == "adafactor":
        # Without parameter scaling a learning rate means the same as in the other optimizers.
        return optax.chain(
            optax.scale_by_factored_rms(), _clip_by_block_rms(filled), optax.scale(-1.0)
        )
    if config.name == "sgd":
        return optax.sgd(1.0, momentum=config.beta1)
    return contrib.muon(
        1.0,
        beta=config.beta1,
        eps=config.eps,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        muon_weight_dimension_numbers=jax.tree.map(_muon_dims, infos),
        # Moonlight (Liu et al. 2025): update size like AdamW's, so that learning rates carry over.
        consistent_rms=0.2,
    )


def _clip_by_block_rms(filled: Mapping[str, float]) -> optax.GradientTransformation:
    """`optax.clip_by_block_rms(1.0)`, for which empty places do not count."""

    def update(updates, state, params=None):
        def clip(path, update):
            places = filled.get(path[0].key, 1.0)
            mean_square = jnp.mean(jnp.square(update)) / places
            return update / jnp.maximum(1.0, jnp.sqrt(mean_square))

        return jax.tree_util.tree_map_with_path(clip, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _muon_dims(info: ParamInfo) -> contrib.MuonDimensionNumbers | None:
    """Which dims form the matrix of `x W = y`; all others are a batch of matrices."""
    hidden = [dim for dim, name in enumerate(info.axes) if name in HIDDEN_DIMS]
    inner = [dim for dim, name in enumerate(info.axes) if name in MATRIX_DIMS]
    if not hidden or not inner:
        return None
    reduction, output = (hidden, inner) if hidden[0] < inner[0] else (inner, hidden)
    return contrib.MuonDimensionNumbers(tuple(reduction), tuple(output))


def global_norm(tree) -> jax.Array:
    """Euclidean norm over all leaves, accumulated in fp32. On global arrays: right under any
    sharding."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares))
