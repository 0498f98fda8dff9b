"""Random bits from a counter: a hash of two words and of an element's index.

Nothing is stored and no state is carried, so who needs the same bits again draws them again, and
whatever computes them (XLA, a kernel, any number of devices) gets the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def random_bits(first: jax.Array, second: jax.Array, index: jax.Array) -> jax.Array:
    """32 random bits of the element `index` under two words; all of uint32."""
    return mix(mix(index ^ first) + second)


def mix(word: jax.Array) -> jax.Array:
    """A bijection of 32-bit words whose output bits each depend on all input bits (the "lowbias32"
    constants of Wellons 2018)."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
    return word ^ (word >> 16)


def round_stochastically(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """fp32 to bf16: up or down, with probabilities that make the mean of the result `x`.

    Args:
      x: of any shape, split over devices in any way: the bits are those of an element's place in
        the whole array (mod 2**32).
      first, second: words, see `random_bits`.
    """
    index = jnp.uint32(0)
    for dim, size in enumerate(x.shape):
        index = index * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, x.shape, dim)
    # A bf16 is the upper half of an fp32. What the sum carries into that half rounds away from 0.
    random = random_bits(first, second, index) & jnp.uint32(0xFFFF)
    bits = lax.bitcast_convert_type(x, jnp.uint32) + random
    upper = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return upper.astype(jnp.bfloat16)
