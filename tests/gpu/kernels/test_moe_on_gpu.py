"""The choice of experts and their products on the GPU against their references."""

from bench.kernels.moe import check
from bench.kernels.timing import Report


def test_choice_and_products_agree_with_their_references() -> None:
    """bfloat16 and float32, odd sizes, tokens that are nobody's, NaN memory, graphs replayed."""
    report = Report()
    check(report)
    assert report.num_failed == 0
