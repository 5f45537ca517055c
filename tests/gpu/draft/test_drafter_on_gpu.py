"""The drafter on the GPU: rows, blocks and confidences of the CPU, eager and captured."""

from bench.kernels.drafter import check_drafter
from bench.kernels.timing import Report


def test_proposals_are_those_of_the_cpu() -> None:
    """Both backbones, causal or not, in float32 and bfloat16."""
    report = Report()
    check_drafter(report)
    assert report.num_failed == 0
