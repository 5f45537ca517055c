"""The figures of a run, from requests whose times are known."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.benchmarks.answer import Answer, Arrival
from stagecoach.benchmarks.metrics import (
    METRICS,
    RequestRecord,
    max_concurrency_of,
    max_tokens_of_a_second,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    percentile_key,
    summarize,
)
from stagecoach.errors import ConfigError


def _record(start: float, *arrivals: tuple[float, int], num_prompt: int = 10) -> RequestRecord:
    """A request that was sent at `start`; arrivals are (seconds after it, tokens)."""
    made = tuple(Arrival(start + seconds, count) for seconds, count in arrivals)
    answer = Answer(
        arrivals=made,
        end_seconds=made[-1].seconds,
        num_prompt_tokens=num_prompt,
        num_tokens=sum(arrival.num_tokens for arrival in made),
        content="",
        token_source="usage",
    )
    return RequestRecord(
        start_seconds=start, queued_seconds=0.0, num_prompt_tokens=num_prompt, answer=answer
    )


_FAILED = RequestRecord(start_seconds=0.0, queued_seconds=0.0, num_prompt_tokens=99, error="no")


def _summarize(records: list[RequestRecord], duration: float, **options: Any) -> dict[str, Any]:
    defaults = {"percentile_metrics": METRICS, "percentiles": [50, 99], "goodput": {}}
    return summarize(records, duration, **(defaults | options))


_gaps = st.lists(st.tuples(st.floats(0.001, 10.0), st.integers(1, 8)), min_size=1, max_size=12)


@st.composite
def _records(draw: st.DrawFn) -> RequestRecord:
    seconds, arrivals = 0.0, []
    for gap, count in draw(_gaps):
        seconds += gap
        arrivals.append((seconds, count))
    return _record(draw(st.floats(0.0, 100.0)), *arrivals)


def test_counts_and_rates() -> None:
    records = [_record(0.0, (1, 1), (2, 3)), _record(1.0, (1, 1), (3, 1)), _FAILED]
    result = _summarize(records, 4.0)
    assert {name: result[name] for name in ("completed", "failed", "duration")} == {
        "completed": 2,
        "failed": 1,
        "duration": 4.0,
    }
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 6)
    assert result["request_throughput"] == 0.5
    assert result["output_throughput"] == 1.5
    assert result["total_token_throughput"] == 6.5
    assert result["mean_tokens_per_chunk"] == 2.0
    assert result["request_goodput"] is None


def test_statistics_are_in_milliseconds_and_interpolated() -> None:
    records = [_record(0.0, (seconds, 1)) for seconds in (1.0, 2.0, 3.0, 4.0)]
    result = _summarize(records, 1.0, percentiles=[25, 99.9])
    assert result["mean_ttft_ms"] == pytest.approx(2500)
    assert result["median_ttft_ms"] == pytest.approx(2500)
    assert result["std_ttft_ms"] == pytest.approx(1000 * math.sqrt(1.25))
    assert result["p25_ttft_ms"] == pytest.approx(1750)
    assert result["p99.9_ttft_ms"] == pytest.approx(3997)


def test_a_statistic_of_nothing_is_none() -> None:
    result = _summarize([_record(0.0, (1, 1))], 1.0)
    assert result["mean_tpot_ms"] is None and result["p99_itl_ms"] is None
    assert result["mean_ttft_ms"] == pytest.approx(1000)
    failed = _summarize([_FAILED], 1.0)
    assert failed["failed"] == 1 and failed["completed"] == 0
    assert failed["mean_ttft_ms"] is None and failed["max_output_tokens_per_s"] == 0.0


def test_the_first_event_s_tokens_have_no_gap() -> None:
    record = _record(0.0, (1, 4), (2, 2))
    assert record.itl == [0.5, 0.5]
    assert record.tpot == pytest.approx(1 / 5)


@given(_records())
def test_gaps_add_up_to_the_time_from_first_to_last_token(record: RequestRecord) -> None:
    arrivals = record.finished.arrivals
    span = arrivals[-1].seconds - arrivals[0].seconds
    assert sum(record.itl) == pytest.approx(span)
    assert sum(record.icl) == pytest.approx(span)
    assert len(record.itl) == record.finished.num_tokens - arrivals[0].num_tokens
    if record.tpot is not None:
        assert record.tpot * (record.finished.num_tokens - 1) == pytest.approx(span)
    assert record.ttft + span == pytest.approx(record.e2el)


@given(st.lists(_records(), min_size=1, max_size=8), st.lists(st.floats(0, 100), max_size=4))
def test_statistics_lie_within_the_values(
    records: list[RequestRecord], percentiles: list[float]
) -> None:
    result = _summarize(records, 1.0, percentiles=[0, *sorted(percentiles), 100])
    values = [record.e2el * 1000 for record in records]
    found = [
        result[f"{percentile_key(percentile)}_e2el_ms"]
        for percentile in (0, *sorted(percentiles), 100)
    ]
    assert found[0] == pytest.approx(min(values)) and found[-1] == pytest.approx(max(values))
    assert all(low <= high + 1e-6 for low, high in itertools.pairwise(found))
    assert min(values) - 1e-6 <= result["mean_e2el_ms"] <= max(values) + 1e-6
    assert sum(record.finished.num_tokens for record in records) == result["total_output_tokens"]


@given(st.lists(_records(), min_size=1, max_size=8))
def test_the_peaks_are_those_of_a_count_at_every_instant(records: list[RequestRecord]) -> None:
    spans = [(record.start_seconds, record.finished.end_seconds) for record in records]
    counted = max(sum(start <= instant < end for start, end in spans) for instant, _ in spans)
    assert max_concurrency_of(records) == counted
    start = min(record.start_seconds for record in records)
    seconds = [
        int(arrival.seconds - start)
        for record in records
        for arrival in record.finished.arrivals
        for _ in range(arrival.num_tokens)
    ]
    assert max_tokens_of_a_second(records) == max(map(seconds.count, seconds))


def test_one_that_ends_as_another_starts_was_not_beside_it() -> None:
    assert max_concurrency_of([_record(0.0, (1, 1)), _record(1.0, (1, 1))]) == 1


def test_goodput_counts_requests_that_meet_every_bound() -> None:
    records = [
        _record(0.0, (0.1, 1), (0.3, 1)),  # ttft 100, tpot 200
        _record(0.0, (0.4, 1), (0.5, 1)),  # ttft 400, tpot 100
        _record(0.0, (0.1, 1)),  # no tpot: it meets any bound
        _FAILED,
    ]

    def good(**bounds: float) -> float:
        return _summarize(records, 2.0, goodput=bounds)["request_goodput"] * 2.0  # type: ignore[no-any-return]

    assert good(ttft=200) == 2
    assert good(tpot=150) == 2
    assert good(ttft=200, tpot=150) == 1
    assert good(e2el=1000) == 3


def test_goodput_is_read_in_every_spelling() -> None:
    expected = {"ttft": 500.0, "tpot": 50.5}
    for items in (["ttft:500", "tpot:50.5"], ["ttft:500 tpot:50.5"], ["ttft:500,tpot:50.5"]):
        assert parse_goodput(items) == expected
    assert parse_goodput([]) == {}


@pytest.mark.parametrize("item", ["ttft", "itl:5", "ttft:fast", "ttft:-1", "ttft:nan", ":5"])
def test_goodput_refuses_other_forms(item: str) -> None:
    with pytest.raises(ConfigError, match=f"--goodput={item}: must be METRIC:MILLISECONDS"):
        parse_goodput([item])


def test_metrics_and_percentiles_are_lists() -> None:
    assert parse_metrics("ttft, e2el") == ["ttft", "e2el"]
    assert parse_percentiles("50,99.9, 100") == [50.0, 99.9, 100.0]
    with pytest.raises(ConfigError, match="--percentile-metrics=ttft,speed: speed is none of"):
        parse_metrics("ttft,speed")
    for text in ("101", "-1", "fast", "nan"):
        with pytest.raises(ConfigError, match=f"--metric-percentiles={text}: "):
            parse_percentiles(text)
