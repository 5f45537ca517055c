"""Counts by size, against counting one by one."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.observe.histogram import Histogram, HistogramCounter

BOUNDS = (1.0, 8.0, 16.0)


@given(st.lists(st.integers(0, 40)))
def test_a_histogram_counts_what_is_at_most_each_bound(values: list[int]) -> None:
    counter = HistogramCounter(BOUNDS)
    for value in values:
        counter.note(value)
    histogram = msgspec.msgpack.decode(msgspec.msgpack.encode(counter.read()), type=Histogram)
    expected = [sum(value <= bound for value in values) for bound in BOUNDS]
    assert histogram.cumulative() == [*expected, len(values)]
    assert (histogram.bounds, histogram.total) == (BOUNDS, sum(values))
