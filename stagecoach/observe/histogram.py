"""Counts of values by size, kept where they arise and told as one value.

Owns the counting and its form on the wire. Knows neither what is counted nor who reads it.
"""

from bisect import bisect_left

import msgspec


class Histogram(msgspec.Struct, frozen=True, array_like=True):
    """`counts[i]` values are at most `bounds[i]` and above the bound before.

    There is one count more than bounds: of values above them all.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float  # the sum of all values

    def cumulative(self) -> list[int]:
        """How many values are at most each bound; then all of them."""
        reached = 0
        return [reached := reached + count for count in self.counts]


class HistogramCounter:
    """Counts; belongs to one thread."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds` ascend."""
        assert list(bounds) == sorted(set(bounds)), bounds
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def note(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._total)
