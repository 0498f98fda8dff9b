"""Table lookup whose gradient is summed in fp32.

The plain gradient of a gather adds rows in the table's precision. A frequent token adds thousands
of bf16 rows into one, and after a few hundred of them most additions are rounded away.

Shapes: V rows of the table, H width; ids of any shape.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

ONE_HOT_ROWS = 4096
"""Up to so many rows the gradient is a matrix product with the one-hot ids. On a GPU the additions
of a small table collide: 2.3 ms against 0.03 ms for 16,384 tokens of source code and 320 rows."""


@jax.custom_vjp
def lookup(table_VH: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of the table, [*ids.shape, H]; zeros for an id outside of it (another rank's)."""
    return table_VH.at[_index(table_VH, ids)].get(mode="fill", fill_value=0)


def _index(table_VH: jax.Array, ids: jax.Array) -> jax.Array:
    """Ids outside of the table, negative ones too, point behind its end."""
    V = table_VH.shape[0]
    return jnp.where((ids >= 0) & (ids < V), ids, V)


def _forward(table_VH, ids):
    # The empty slice carries number of rows and precision without keeping the values.
    return lookup(table_VH, ids), (ids, table_VH[:, :0])


def _backward(residuals, grad):
    ids, like_V0 = residuals
    V, H = like_V0.shape[0], grad.shape[-1]
    ids_T, grad_TH = _index(like_V0, ids).reshape(-1), grad.reshape(-1, H)
    if V <= ONE_HOT_ROWS:
        one_hot_TV = jax.nn.one_hot(ids_T, V, dtype=grad.dtype)
        total = jnp.einsum("tv,th->vh", one_hot_TV, grad_TH, preferred_element_type=jnp.float32)
    else:
        total = (
            jnp.zeros((V, H), jnp.float32).at[ids_T].add(grad_TH.astype(jnp.float32), mode="drop")
        )
    return total.astype(like_V0.dtype), None


lookup.defvjp(_forward, _backward)
