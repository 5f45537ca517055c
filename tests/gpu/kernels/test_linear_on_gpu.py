"""Products of few rows on the GPU against float64."""

from bench.kernels.linear import chain, check
from bench.kernels.timing import Report


def test_products_agree_with_float64() -> None:
    """bfloat16 and float32, odd sizes, every cut that is timed."""
    report = Report()
    check(report)
    assert report.num_failed == 0


def test_kernels_that_start_early_change_nothing() -> None:
    """Layers of decode in a graph, replayed: the same bits as without an early start."""
    report = Report()
    chain(report)
    assert report.num_failed == 0
