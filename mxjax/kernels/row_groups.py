"""Rows of several groups in one array, each group padded to whole tiles of rows.

A group (an expert) owns an unbroken run of tiles, so that no tile has rows of two groups: a kernel
that works tile by tile needs no mask. The number of rows is static and the number of tiles in use
is not; rows of unused tiles hold anything, and nothing may read them.

Shapes: G groups, R rows, t rows of a tile, N = R / t tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowGroups:
    """Which group owns which tile."""

    group_N: jax.Array
    """int32 group of each tile in use; the last group for the others."""
    first_G1: jax.Array
    """int32 [G + 1]: group g owns the tiles first_G1[g] to first_G1[g + 1] - 1; the last number is
    that of the tiles in use."""
    tile: int = field(metadata={"static": True})
    """Rows of a tile."""

    @property
    def num_rows(self) -> int:
        """R."""
        return self.group_N.shape[0] * self.tile

    @property
    def num_groups(self) -> int:
        """G."""
        return self.first_G1.shape[0] - 1


def row_groups(counts_G: jax.Array, num_rows: int, tile: int) -> RowGroups:
    """Groups of so many rows, one after the other from row 0 on.

    Args:
      counts_G: int32; each is padded to a multiple of `tile`.
      num_rows: R, a multiple of `tile`. Tiles past it are cut off: callers who cannot rule that out
        with `sufficient_rows` compare.
    """
    if num_rows % tile:
        raise ValueError(f"num_rows={num_rows} is no multiple of the tile of {tile} rows")
    ends_G = jnp.cumsum((counts_G + tile - 1) // tile, dtype=jnp.int32)
    ends_G = jnp.minimum(ends_G, num_rows // tile)
    first_G1 = jnp.concatenate([jnp.zeros_like(ends_G[:1]), ends_G])
    tiles_N = jnp.arange(num_rows // tile, dtype=jnp.int32)
    group_N = jnp.sum(tiles_N[:, None] >= ends_G[None, :], axis=1, dtype=jnp.int32)
    return RowGroups(jnp.minimum(group_N, counts_G.shape[0] - 1), first_G1, tile)


def equal_groups(num_groups: int, rows: int, tile: int) -> RowGroups:
    """Groups of `rows` rows each, a multiple of `tile`; every tile is in use."""
    if rows % tile:
        raise ValueError(f"{rows} rows of a group are no multiple of the tile of {tile} rows")
    first_G1 = jnp.arange(num_groups + 1, dtype=jnp.int32) * (rows // tile)
    group_N = jnp.repeat(jnp.arange(num_groups, dtype=jnp.int32), rows // tile)
    return RowGroups(group_N, first_G1, tile)


def sufficient_rows(rows: int, num_groups: int, tile: int) -> int:
    """Least R that holds `rows` rows in all, however they fall to groups.

    In the worst case as many groups as there can be have one row more than whole tiles hold.
    """
    occupied = min(rows, num_groups)
    return occupied * tile + (rows - occupied) // tile * tile
