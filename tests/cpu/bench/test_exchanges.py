"""Waits at exchanges, read from two made-up traces whose ranks are late by known times."""

import pytest

from bench.h200 import exchanges

pytestmark = pytest.mark.cpu

EXCHANGE_US = 5.0
CLOCK_US = 20.0  # the second rank's clock is ahead by so much; a step is longer
NUM_STEPS = 9


def traces(work: dict[str, tuple[float, float]]) -> tuple[list[exchanges.Kernel], ...]:
    """Of two ranks that run each kernel for so long, and meet behind it."""
    now = [0.0, 0.0]
    ranks: tuple[list[exchanges.Kernel], ...] = ([], [])
    for _ in range(NUM_STEPS):
        for rank in (0, 1):
            ranks[rank].append(("Memcpy HtoD (Pinned -> Device)", now[rank], 1.0))
            now[rank] += 1.0
        for name, durations in work.items():
            begins = []
            for rank in (0, 1):
                ranks[rank].append((name, now[rank], durations[rank]))
                now[rank] += durations[rank] + 2.0  # between two kernels
                begins.append(now[rank])
            end = max(begins) + EXCHANGE_US
            for rank in (0, 1):
                ranks[rank].append(("exchange_kernel", begins[rank], end - begins[rank]))
                now[rank] = end
    second = [(name, begin + CLOCK_US, duration) for name, begin, duration in ranks[1]]
    return ranks[0], second


def summary(dropped: int = 0) -> dict:
    first, second = traces({"attend": (30.0, 40.0), "experts": (90.0, 65.0)})
    pairs = exchanges.pair(
        exchanges.exchanges_of(first[max(0, -dropped) :]),
        exchanges.exchanges_of(second[max(0, dropped) :]),
        most_shift=3,
    )
    return exchanges.summarize(pairs)


@pytest.mark.parametrize("dropped", [0, 5, 9, 23, -9, -23])
def test_waits_are_what_the_other_was_late(dropped: int) -> None:
    """Wherever each recording begins, and whatever the second one's clock says."""
    rows = {row["behind"]: row for row in summary(dropped)["behind"]}
    assert rows["attend"]["wait_us"] == [10.0, 0.0]
    assert rows["experts"]["wait_us"] == [0.0, 25.0]
    assert rows["attend"]["itself_us"] == rows["experts"]["itself_us"] == EXCHANGE_US
    assert rows["experts"]["work_us"] == [90.0, 65.0]
    assert rows["experts"]["idle_us"] == [2.0, 2.0]


def test_sums_are_of_whole_steps() -> None:
    result = summary()
    # One is cut off at each end of the recording.
    assert result["num_steps"] == NUM_STEPS - 2
    assert result["wait_us_a_step"] == pytest.approx([10.0, 25.0])
    assert result["itself_us_a_step"] == pytest.approx(2 * EXCHANGE_US)
    assert [row["behind"] for row in result["positions"]] == ["attend", "experts"]
    assert result["positions"][0]["is_first"] and not result["positions"][1]["is_first"]


def test_the_table_names_the_kernel_before() -> None:
    lines = exchanges.table(summary())
    assert "wait 10 | 25" in lines[0]
    assert any("experts" in line and "25.0" in line for line in lines)


def test_traces_without_exchanges_say_nothing() -> None:
    assert exchanges.exchanges_of([]) == []
    assert exchanges.pair([], []) == []
    assert exchanges.summarize([])["num_steps"] == 0
    assert exchanges.table(exchanges.summarize([]))
