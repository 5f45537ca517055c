"""What an error of a check becomes."""

import pytest

from stagecoach.checking.verdict import Verdicts

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "the host gave no more"),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
            ),
            "64 bytes more were needed",
        ),
    ],
)
def test_out_of_memory_is_a_verdict(error: Exception, text: str) -> None:
    def find() -> str:
        raise error

    verdicts = Verdicts(lambda verdict: None)
    verdicts.judge("layers", find)
    (verdict,) = verdicts.found
    assert verdict.status == "failed" and text in verdict.detail
    assert "--memory-gib" in verdict.detail


def test_a_mistake_of_ours_is_raised_on() -> None:
    def find() -> str:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        Verdicts(lambda verdict: None).judge("layers", find)
