"""The last stage on the GPU: the tokens of the CPU, from the same float32 logits."""

from bench.kernels.drafter import check_last_stage
from bench.kernels.timing import Report


def test_tokens_and_rows_are_those_of_the_cpu() -> None:
    """Both ways, every parameter, log-probabilities, both rules and forced acceptance."""
    report = Report()
    check_last_stage(report)
    assert report.num_failed == 0
