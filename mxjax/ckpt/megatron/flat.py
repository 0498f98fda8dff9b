"""Flat buffers of Megatron's distributed optimizer.

A model chunk has a buffer for each dtype and one more for experts that are spread over ``ep``. A
buffer is a row of buckets, and a bucket a row of parameters: the last one registered comes first,
and each begins at a multiple of 64 elements (`optimizer/param_layout.py` of megatron-core 0.19.2).
Only what pads the end of a bucket depends on the number of data parallel ranks, and it is not
stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_ALIGNMENT = 64


class Slot(NamedTuple):
    """Where a parameter lies: number of the bucket, and its first element in it."""

    bucket: int
    start: int


def slots(sizes: Sequence[int], buckets: Sequence[int]) -> list[Slot] | None:
    """Where parameters lie in buckets of known sizes; None: they do not fill them exactly.

    Args:
      sizes: elements of each parameter, in the order of registration.
      buckets: elements of each bucket, without the padding at its end.
    """
    found: list[Slot] = []
    bucket = end = 0
    for size in reversed(sizes):
        start = _aligned(end)
        if end and bucket < len(buckets) and start + size > buckets[bucket]:
            # Before a shared embedding, a bucket ends where the next parameter would begin.
            if buckets[bucket] not in (end, start):
                return None
            bucket, start = bucket + 1, 0
        if bucket >= len(buckets):
            return None
        found.append(Slot(bucket, start))
        end = start + size
    filled = bool(found) and bucket == len(buckets) - 1 and end == buckets[bucket]
    return found[::-1] if filled else None


def bucket_sizes(
    sizes: Sequence[int], shared: Sequence[bool], bucket_size: int | None
) -> list[int]:
    """Elements of the buckets that Megatron makes for these parameters, in order of registration.

    Args:
      shared: for each, whether it is an embedding that several pipeline stages have: alone in a
        bucket.
      bucket_size: a bucket ends when it has so many elements; None: never.
    """
    found: list[int] = []
    end = 0
    for size, alone in zip(reversed(sizes), reversed(shared), strict=True):
        start = _aligned(end)
        if alone and end:
            found.append(start)
            start = 0
        end = start + size
        if alone or (bucket_size is not None and end >= bucket_size):
            found.append(end)
            end = 0
    return [*found, end] if end else found


def _aligned(index: int) -> int:
    return -(-index // _ALIGNMENT) * _ALIGNMENT
