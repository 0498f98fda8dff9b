"""Weighted blends of sample streams: which source sample i comes from, without counting up to i.

The order is the quota method of Balinski and Young ("The quota method of apportionment", American
Mathematical Monthly 82, 1975): after any n samples, a source with share w has given fewer than one
sample more or less than w n. Megatron-LM's BlendedDataset, which always takes the source that lags
most, drifts further (up to 1.7 samples in a trial with 15 sources).

Shares are fractions of a whole number P, so the order repeats after P samples and a table of one
period answers everything.
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Literal

import numpy as np

from mxjax.data.errors import DataError
from mxjax.data.packing import PackedSamples, Sample, check_index, fingerprint

LONGEST_PERIOD = 1_000_000
"""Weights that need a longer one are rounded to this many parts of their sum."""


def whole_parts(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportions of `weights`, which are taken as the decimals they print as.

    Raises:
      DataError: a weight is too small a part of the sum to be kept.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    common = lcm(*(fraction.denominator for fraction in exact))
    parts = [int(fraction * common) for fraction in exact]
    total = sum(parts) // gcd(*parts)
    if total > LONGEST_PERIOD:
        parts = _largest_remainders(parts, LONGEST_PERIOD)
    for weight, part in zip(weights, parts, strict=True):
        if part == 0:
            raise DataError(
                f"data.blend: the weight {weight:g} is less than a {LONGEST_PERIOD:,}th of the "
                "sum of all; raise it or remove its source"
            )
    divisor = gcd(*parts)
    return [part // divisor for part in parts]


def _largest_remainders(parts: Sequence[int], total: int) -> list[int]:
    """`parts` scaled to the sum `total` and rounded, with no error above one."""
    quotients = [divmod(part * total, sum(parts)) for part in parts]
    rounded = [quotient for quotient, _ in quotients]
    by_remainder = sorted(range(len(parts)), key=lambda d: -quotients[d][1])
    for d in by_remainder[: total - sum(rounded)]:
        rounded[d] += 1
    return rounded


def quota_order(parts: Sequence[int]) -> np.ndarray:
    """Source of each sample of one period, int32 [sum of parts].

    The j-th sample of source d (from 0) may come once the share of d exceeds j, and must have come
    when it reaches j + 1. Among those that may, the one that must come first does; equal ones come
    in the order of the sources.
    """
    period = sum(parts)
    given = [0] * len(parts)
    waiting = [(0, d) for d in range(len(parts))]  # (first place the next sample may have, source)
    ready: list[tuple[int, int]] = []  # (place that it must come before, source)
    order = np.empty(period, np.int32)
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, d = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(given[d] + 1) * period // parts[d]), d))
        _, d = heapq.heappop(ready)
        order[place] = d
        given[d] += 1
        heapq.heappush(waiting, (given[d] * period // parts[d], d))
    return order


class BlendedSamples:
    """Samples of several sources in proportion to weights; see `Samples`.

    Each source goes through its own epochs, in the order that it has on its own.

    Args:
      sources: endless ones (`num_epochs=None`), of one length.
      weights: of the sources, positive; only their proportions matter.
      num_epochs: None: endless. Else the samples end by `stop`.
      stop: ``first_exhausted``: before the first sample that would begin pass `num_epochs` + 1 of
        its source; ``all_exhausted``: when every source has given `num_epochs` passes, by which
        time others have begun further ones.

    Raises:
      DataError: a weight is too small.
    """

    samples_per_epoch = None

    def __init__(
        self,
        sources: Sequence[PackedSamples],
        weights: Sequence[float],
        *,
        num_epochs: int | None,
        stop: Literal["first_exhausted", "all_exhausted"] = "first_exhausted",
    ):
        self.sources = sources
        self.seq_length = sources[0].seq_length
        self.parts = whole_parts(weights)
        self._order = quota_order(self.parts)
        self._places = [np.flatnonzero(self._order == d) for d in range(len(sources))]
        self._ranks = np.empty(len(self._order), np.int32)
        for places in self._places:
            self._ranks[places] = np.arange(len(places))
        self.num_samples = None
        if num_epochs is not None:
            ends = [num_epochs * source.samples_per_epoch for source in sources]
            if stop == "first_exhausted":
                self.num_samples = min(self._index(d, end) for d, end in enumerate(ends))
            else:
                self.num_samples = max(self._index(d, end - 1) + 1 for d, end in enumerate(ends))

    def locate(self, index: int) -> tuple[int, int]:
        """(source, index among the samples of this source) of a sample."""
        period, place = divmod(index, len(self._order))
        source = int(self._order[place])
        return source, period * self.parts[source] + int(self._ranks[place])

    def _index(self, source: int, own_index: int) -> int:
        """The sample that is number `own_index` of a source: the inverse of `locate`."""
        period, rank = divmod(own_index, self.parts[source])
        return period * len(self._order) + int(self._places[source][rank])

    def __getitem__(self, index: int) -> Sample:
        check_index(index, self.num_samples)
        source, own_index = self.locate(index)
        return self.sources[source][own_index]

    def epoch(self, index: int) -> int:
        source, own_index = self.locate(index)
        return self.sources[source].epoch(own_index)

    @property
    def fingerprint(self) -> str:
        return fingerprint((self.parts, [source.fingerprint for source in self.sources]))

    def describe(self) -> str:
        total = sum(self.parts)
        shares = zip(self.parts, self.sources, strict=True)
        return "; ".join(
            f"{100 * part / total:.4g}% of {source.describe()}" for part, source in shares
        )
