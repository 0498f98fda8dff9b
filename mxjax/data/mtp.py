"""Inputs and targets of multi-token prediction (`models/mtp.py`).

They are made from whole samples: later a sequence may be split over ranks and put into another
order, and its neighbours are elsewhere.
"""

from __future__ import annotations

import numpy as np

from mxjax.data.packing import IGNORED_TARGET, Sample


def mtp_names(num_layers: int) -> tuple[list[str], list[str]]:
    """Names of the arrays with the inputs and with the targets of modules 1 to `num_layers`."""
    depths = range(1, num_layers + 1)
    return [f"mtp_tokens_{k}" for k in depths], [f"mtp_targets_{k}" for k in depths]


def with_mtp(sample: Sample, num_layers: int) -> Sample:
    """Adds for k = 1 to `num_layers` the token k places ahead and the target k places ahead.

    Arrays are [..., seq_length]. Where these would belong to another segment or to padding, or lie
    behind the end of the sample, the token is 0 and the target `IGNORED_TARGET`.
    """
    segments = sample["segment_ids"]
    added = {}
    for k, (tokens, targets) in enumerate(zip(*mtp_names(num_layers), strict=True), start=1):
        same = (_ahead(segments, k) == segments) & (segments > 0)
        added[tokens] = np.where(same, _ahead(sample["tokens"], k), 0)
        added[targets] = np.where(same, _ahead(sample["targets"], k), IGNORED_TARGET)
    return sample | added


def _ahead(array: np.ndarray, k: int) -> np.ndarray:
    """`array[..., i + k]` at i, and 0 behind the end."""
    padding = [(0, 0)] * (array.ndim - 1) + [(0, min(k, array.shape[-1]))]
    return np.pad(array[..., k:], padding)
