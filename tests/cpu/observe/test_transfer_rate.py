"""What is said of a transfer: bytes, rate, and how long the rest takes."""

import pytest

from stagecoach.observe import transfer_rate
from stagecoach.observe.transfer_rate import TransferRate

pytestmark = pytest.mark.cpu

GB = 10**9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(transfer_rate.time, "monotonic", lambda: now[0])
    return now


def test_nothing_is_known_at_first(clock: list[float]) -> None:
    rate = TransferRate()
    assert rate.describe(0, 8 * GB) == "0.00 of 8.00 GB"
    clock[0] += 1
    assert rate.describe(0, 8 * GB) == "0.00 of 8.00 GB"


def test_rate_and_rest(clock: list[float]) -> None:
    rate = TransferRate()
    rate.describe(0, 8 * GB)
    clock[0] += 2
    assert rate.describe(4 * GB, 8 * GB) == "4.00 of 8.00 GB, 2.00 GB/s, 2 s left"


def test_a_slow_beginning_is_forgotten(clock: list[float]) -> None:
    rate = TransferRate()
    done = 0
    for step in range(60):
        rate.describe(done, 1000 * GB)
        clock[0] += 1
        done += GB if step >= 30 else 0
    assert "1.00 GB/s" in rate.describe(done, 1000 * GB)
