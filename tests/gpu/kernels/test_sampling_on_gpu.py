"""The choice of tokens on the GPU: not one may differ from the reference's."""

from bench.kernels.sampling import check
from bench.kernels.timing import Report


def test_every_choice_is_that_of_the_reference() -> None:
    """bfloat16 and float32, any vocabulary, captured, with rows that are not finite."""
    report = Report()
    check(report)
    assert report.num_failed == 0
