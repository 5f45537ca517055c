"""Norms, mixture and activations on the GPU against their references in float64."""

from bench.kernels.elementwise import check
from bench.kernels.timing import Report


def test_every_door_agrees_with_its_reference() -> None:
    """bfloat16 and float32; views with NaN between their rows."""
    report = Report()
    check(report)
    assert report.num_failed == 0
