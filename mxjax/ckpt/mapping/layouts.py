"""Changes of layout between ``[out, in]`` matrices of torch and our parameters, in pairs.

Each pair is inverse to the other. All return views where numpy can.

Letters: H hidden, N query heads, G key/value groups, D head width, F inner width, L latent,
P width of a head without positions, R with rotary positions.
"""

from __future__ import annotations

import numpy as np


def transposed(weight: np.ndarray) -> np.ndarray:
    """``[out, in]`` <-> ``[in, out]``; its own inverse."""
    return weight.T


def heads_last(weight: np.ndarray, heads: int) -> np.ndarray:
    """``[N D, in]`` -> ``[in, N, D]``."""
    return weight.reshape(heads, -1, weight.shape[1]).transpose(2, 0, 1)


def heads_first(weight: np.ndarray) -> np.ndarray:
    """``[in, N, D]`` -> ``[N D, in]``."""
    return weight.transpose(1, 2, 0).reshape(-1, weight.shape[0])


def out_from_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """``[H, N D]`` -> ``[N, D, H]``."""
    return weight.T.reshape(heads, -1, weight.shape[0])


def heads_to_out(weight: np.ndarray) -> np.ndarray:
    """``[N, D, H]`` -> ``[H, N D]``."""
    return weight.reshape(-1, weight.shape[2]).T


def split_qkv(weight: np.ndarray, groups: int, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Megatron's ``linear_qkv`` -> q ``[H, N, D]`` and kv ``[H, 2, G, D]``.

    Rows: for each group its N/G query heads, then its key head, then its value head.
    """
    hidden, per_group = weight.shape[1], heads // groups + 2
    packed = weight.reshape(groups, per_group, -1, hidden)  # [G, N/G + 2, D, H]
    q = packed[:, :-2].reshape(heads, -1, hidden).transpose(2, 0, 1)
    return q, packed[:, -2:].transpose(3, 1, 0, 2)


def join_qkv(q: np.ndarray, kv: np.ndarray) -> np.ndarray:
    """The inverse of :func:`split_qkv`."""
    hidden, heads, width = q.shape
    groups = kv.shape[2]
    queries = q.transpose(1, 2, 0).reshape(groups, heads // groups, width, hidden)
    packed = np.concatenate([queries, kv.transpose(2, 1, 3, 0)], axis=1)
    return packed.reshape(-1, hidden)


def split_qkv_bias(bias: np.ndarray, groups: int, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """The bias of ``linear_qkv`` -> ``[N, D]`` and ``[2, G, D]``."""
    q, kv = split_qkv(bias[:, None], groups, heads)
    return q[0], kv[0]


def join_qkv_bias(q: np.ndarray, kv: np.ndarray) -> np.ndarray:
    """The inverse of :func:`split_qkv_bias`."""
    return join_qkv(q[None], kv[None])[:, 0]


def split_branches(weight: np.ndarray, branches: int) -> np.ndarray:
    """``[branches F, H]`` -> ``[H, branches, F]``: rows of the gate, then rows of up."""
    return weight.reshape(branches, -1, weight.shape[1]).transpose(2, 0, 1)


def join_branches(weight: np.ndarray) -> np.ndarray:
    """The inverse of :func:`split_branches`."""
    return weight.transpose(1, 2, 0).reshape(-1, weight.shape[0])


def stack_heads(key: np.ndarray, value: np.ndarray, groups: int) -> np.ndarray:
    """Keys and values, each ``[G D, H]`` -> ``[H, 2, G, D]``."""
    return np.stack([heads_last(key, groups), heads_last(value, groups)], axis=1)


def unstack_heads(kv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of :func:`stack_heads`."""
    return heads_first(kv[:, 0]), heads_first(kv[:, 1])


def stack_branches(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Two of ``[F, H]`` -> ``[H, 2, F]``."""
    return np.stack([gate.T, up.T], axis=1)


def unstack_branches(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of :func:`stack_branches`."""
    return weight[:, 0].T, weight[:, 1].T


def pairs_to_halves(weight: np.ndarray, width: int) -> np.ndarray:
    """The last `width` elements of the last dim from rotary pairs side by side to halves.

    DeepSeek and Megatron store MLA's rotary part as x[0], x[1] | x[2], x[3] | ...; here a pair is
    (x[i], x[i + R/2]).
    """
    plain, rotary = weight[..., :-width], weight[..., -width:]
    return np.concatenate([plain, rotary[..., 0::2], rotary[..., 1::2]], axis=-1)


def halves_to_pairs(weight: np.ndarray, width: int) -> np.ndarray:
    """The inverse of :func:`pairs_to_halves`."""
    paired = weight.copy()
    paired[..., -width::2] = weight[..., -width : weight.shape[-1] - width // 2]
    paired[..., weight.shape[-1] - width + 1 :: 2] = weight[..., -(width // 2) :]
    return paired


def fit_rows(weight: np.ndarray, rows: int) -> np.ndarray:
    """Cuts or adds rows of zeros at the end: vocabularies are padded to what TP divides."""
    if weight.shape[0] >= rows:
        return weight[:rows]
    missing = np.zeros((rows - weight.shape[0], *weight.shape[1:]), weight.dtype)
    return np.concatenate([weight, missing])
