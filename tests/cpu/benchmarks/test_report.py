"""How a run is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from stagecoach.benchmarks import report
from stagecoach.benchmarks.answer import Answer, Arrival
from stagecoach.benchmarks.metrics import RequestRecord, summarize
from stagecoach.errors import ConfigError


def _records() -> list[RequestRecord]:
    answer = Answer(
        arrivals=(Arrival(11.0, 1), Arrival(12.0, 2)),
        end_seconds=12.5,
        num_prompt_tokens=5,
        num_tokens=3,
        content="abc",
        token_source="usage",
    )
    return [
        RequestRecord(start_seconds=10.0, queued_seconds=0.5, num_prompt_tokens=5, answer=answer),
        RequestRecord(start_seconds=10.0, queued_seconds=0.0, num_prompt_tokens=7, error="no"),
    ]


def _result(**changes: Any) -> dict[str, Any]:
    figures = summarize(
        _records(), 2.0, percentile_metrics=["ttft"], percentiles=[99.0, 99.9], goodput={}
    )
    return {"max_concurrency": 3, "request_rate": "inf", **figures, **changes}


def test_the_table_has_a_line_for_each_figure_that_applies() -> None:
    table = report.table(_result(), ["ttft"], [99.0, 99.9])
    rows = dict(line.rsplit(maxsplit=1) for line in table.splitlines() if ":" in line)
    assert rows["Successful requests:"] == "1" and rows["Failed requests:"] == "1"
    assert rows["Maximum request concurrency:"] == "3"
    assert rows["Request throughput (req/s):"] == "0.50"
    assert (
        rows["Mean TTFT (ms):"] == rows["P99 TTFT (ms):"] == rows["P99.9 TTFT (ms):"] == "1000.00"
    )
    assert "Request rate configured (RPS):" not in rows and "Request goodput (req/s):" not in rows
    assert all(len(line) == 50 for line in table.splitlines() if ":" not in line)


def test_a_figure_of_nothing_is_a_dash() -> None:
    table = report.table(_result(mean_ttft_ms=None), ["ttft"], [99.0])
    assert any(line.split() == ["Mean", "TTFT", "(ms):", "-"] for line in table.splitlines())


def test_details_have_an_entry_for_each_request() -> None:
    assert report.details(_records()) == {
        "input_lens": [5, 7],
        "output_lens": [3, 0],
        "ttfts": [1.0, 0.0],
        "itls": [[0.5, 0.5], []],
        "latencies": [2.5, 0.0],
        "start_times": [10.0, 10.0],
        "queue_times": [0.5, 0.0],
        "generated_texts": ["abc", ""],
        "errors": ["", "no"],
    }


def test_a_file_is_named_after_the_run() -> None:
    parameters = {
        "label": None,
        "backend": "openai",
        "request_rate": 2.0,
        "max_concurrency": None,
        "model_id": "org/model",
        "date": "20260101-000000",
    }
    named = report.result_path(None, None, parameters)
    assert named == Path("openai-2.0qps-model-20260101-000000.json")
    parameters |= {"label": "mine", "max_concurrency": 8, "request_rate": "inf"}
    named = report.result_path(Path("out"), None, parameters)
    assert named == Path("out/mine-infqps-concurrency8-model-20260101-000000.json")
    assert report.result_path(Path("out"), "x.json", parameters) == Path("out/x.json")


def test_a_result_is_saved_with_the_folders_that_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x.json"
    report.save(path, {"a": 1.5})
    assert json.loads(path.read_text()) == {"a": 1.5}
    with pytest.raises(ConfigError, match="cannot be written"):
        report.save(path / "c.json", {})
    report.make_room(tmp_path / "c" / "y.json")
    assert list((tmp_path / "c").iterdir()) == []
    for impossible in (path / "c.json", path.parent):
        with pytest.raises(ConfigError, match="cannot be written"):
            report.make_room(impossible)
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.to_json({"a": float("nan")})
    assert (report.rate_or_inf(float("inf")), report.rate_or_inf(2.0)) == ("inf", 2.0)
