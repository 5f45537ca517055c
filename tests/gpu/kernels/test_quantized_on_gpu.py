"""Products of packed experts and of E4M3 matrices on the GPU against their references."""

from bench.kernels import fp8, mxfp4
from bench.kernels.timing import Report


def test_packed_experts_agree_with_their_reference() -> None:
    """Both forms, odd sizes, every cut, tokens that are nobody's, NaN memory, graphs replayed."""
    report = Report()
    mxfp4.check(report)
    assert report.num_failed == 0


def test_products_with_e4m3_agree_with_their_reference() -> None:
    """One row, few and many, odd sizes, every cut, and rows quantised bit by bit."""
    report = Report()
    fp8.check(report)
    assert report.num_failed == 0
