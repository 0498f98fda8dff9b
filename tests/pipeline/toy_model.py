"""A small model for the executors, and what plain autodiff says of it."""

import dataclasses
import itertools
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mxjax.pipeline.layout import StageLayout
from mxjax.pipeline.stacks import Stacks

H, T, VOCAB = 8, 6, 11


@dataclass
class Toy:
    """Two kinds of layers with a loss term each; tokens [M, T]. Wide ones may offload, narrow ones
    compute their first product again for the backward pass."""

    tokens: jax.Array
    num_wide: int
    kinds: tuple[str, ...] = ("wide", "narrow")
    offload: tuple[str, ...] = ()
    recompute: bool = True

    def stream(self):
        return jax.ShapeDtypeStruct((T, H), jnp.float32)

    def context(self, microbatch):
        return self.tokens[microbatch].astype(jnp.float32)[:, None] / VOCAB

    def side(self, kind, ctx, index):
        return ctx, index

    def layer(self, kind, weights, x, side):
        again = self.recompute and kind == "narrow"
        run = partial(self._layer, kind)
        return (jax.checkpoint(run, prevent_cse=False) if again else run)(weights, x, side)

    def _layer(self, kind, weights, x, side):
        ctx, index = side
        normed = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-3) + 0.1 * index * ctx
        hidden = checkpoint_name(normed @ weights["up"], "hidden")
        hidden = jnp.tanh(hidden) if kind == "wide" else jax.nn.silu(hidden)
        y = x + hidden @ weights["down"] * weights["scale"]
        return y, 0.01 * jnp.sum(hidden**2), jnp.sum(hidden)

    def offloaded(self, kind):
        return self.offload if kind == "wide" else ()

    def embed(self, outer, microbatch):
        return outer["table"][self.tokens[microbatch]]

    def head(self, outer, x, microbatch):
        logits = jax.nn.log_softmax(x @ outer["table"].T)
        loss = -jnp.mean(jnp.take_along_axis(logits, self.tokens[microbatch][:, None], 1))
        return loss, loss

    def empty_statistics(self):
        return jnp.zeros(()), jnp.zeros((64,))

    def add_layer(self, stats, kind, index, objective, of_layer):
        loss, layers = stats
        return loss + objective, layers.at[index].add(of_layer)

    def add_head(self, stats, microbatch, of_head):
        return stats[0] + of_head, stats[1]

    reduces = False

    def reduce(self, kind, grads):
        return grads


def parameters(num_wide, num_narrow, width=12):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape, scale=0.4), jnp.float32)

    def layer(width):
        return {"up": normal(H, width), "down": normal(width, H), "scale": normal(H)}

    layers = [layer(width) for _ in range(num_wide)] + [layer(5) for _ in range(num_narrow)]
    return layers, {"table": normal(VOCAB, H)}


def plain(toy, layers, outer):
    """Loss, sums per layer, and gradients, without a pipeline and recompute."""
    toy = dataclasses.replace(toy, recompute=False)

    def objective(layers, outer, m):
        stats, x, ctx = toy.empty_statistics(), toy.embed(outer, m), toy.context(m)
        for i, weights in enumerate(layers):
            kind = toy.kinds[i >= toy.num_wide]
            x, extra, of_layer = toy.layer(kind, weights, x, toy.side(kind, ctx, i))
            stats = toy.add_layer(stats, kind, i, extra, of_layer)
        stats = toy.add_head(stats, m, toy.head(outer, x, m)[1])
        return stats[0], stats

    # One microbatch is compiled, not all of them in a row.
    run = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))
    each = [run(layers, outer, m) for m in range(toy.tokens.shape[0])]
    (_, stats), grads = jax.tree.map(lambda *parts: sum(parts), *each)
    return stats, grads


def assert_close(found, expected):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        error = np.max(np.abs(np.asarray(a) - np.asarray(b))) / np.max(np.abs(np.asarray(b)))
        assert error < 1e-5, (path, error)


def toy_model(M, num_wide):
    tokens = np.random.default_rng(1).integers(0, VOCAB, (M, T)).astype(np.int32)
    return Toy(jnp.asarray(tokens), num_wide)


def stacks_of(schedule, stage_layers):
    ends = np.cumsum([0, *map(sum, stage_layers)])
    layers = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))
    placement = "v" if schedule.stage_to_rank[-1] == 0 and schedule.num_ranks > 1 else "loop"
    empty = (0,) * schedule.num_stages
    layout = StageLayout(
        schedule.num_ranks, schedule.num_chunks, placement, layers, ((),) * len(layers), empty
    )
    wide, narrow = (sum(counts[k] for counts in stage_layers) for k in range(2))
    return Stacks(layout, {"wide": wide, "narrow": narrow})
