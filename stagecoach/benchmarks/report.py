"""How a run is told: a table for people, one JSON object for programs.

Owns the labels and the names of result files; the figures come from metrics.py.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stagecoach.benchmarks.metrics import METRICS, RequestRecord, percentile_key
from stagecoach.errors import ConfigError

_WIDTH = 50
_COUNTS = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Maximum request concurrency:", "max_concurrency"),
    ("Request rate configured (RPS):", "request_rate"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
    ("Total token throughput (tok/s):", "total_token_throughput"),
    ("Mean tokens per chunk:", "mean_tokens_per_chunk"),
)


def table(result: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """A run's figures, one a line; those that do not apply are left out."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [
        _line(label, result[key])
        for label, key in _COUNTS
        if result[key] is not None and result[key] != "inf"
    ]
    for name in metrics:
        lines.append(METRICS[name].center(_WIDTH, "-"))
        for key, label in (
            ("mean", "Mean"),
            ("median", "Median"),
            *((percentile_key(value), percentile_key(value).upper()) for value in percentiles),
        ):
            lines.append(_line(f"{label} {name.upper()} (ms):", result[f"{key}_{name}_ms"]))
    lines.append("=" * _WIDTH)
    return "\n".join(lines) + "\n"


def details(records: Iterable[RequestRecord]) -> dict[str, list[Any]]:
    """What --save-detailed adds: one entry a request, in seconds; zeros for a failed one."""
    columns: dict[str, list[Any]] = {name: [] for name in _DETAILS}
    for record in records:
        for name, value in zip(_DETAILS, _details_of(record), strict=True):
            columns[name].append(value)
    return columns


def result_path(directory: Path | None, filename: str | None, parameters: dict[str, Any]) -> Path:
    """Where a result goes: LABEL-RATEqps[-concurrencyN]-MODEL-DATE.json unless named."""
    if filename is None:
        limit = parameters["max_concurrency"]
        concurrency = "" if limit is None else f"-concurrency{limit}"
        model = str(parameters["model_id"]).rsplit("/", 1)[-1]
        label = parameters["label"] or parameters["backend"]
        rate = f"{parameters['request_rate']}qps"
        filename = f"{label}-{rate}{concurrency}-{model}-{parameters['date']}.json"
    return (directory or Path()) / filename


def make_room(path: Path) -> None:
    """Make the folders that a file needs, before what it is to hold is measured.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path}: cannot be written")


def save(path: Path, result: dict[str, Any]) -> None:
    """Write a result, and the folders that it needs.

    Raises:
        ConfigError: the file cannot be written.
    """
    make_room(path)
    try:
        path.write_text(to_json(result) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


def to_json(result: dict[str, Any]) -> str:
    """One object on one line; no value of it is NaN or infinite."""
    return json.dumps(result, allow_nan=False)


def rate_or_inf(rate: float) -> float | str:
    """A rate as JSON can hold it."""
    return "inf" if math.isinf(rate) else rate


_DETAILS = (
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
)


def _details_of(record: RequestRecord) -> Iterator[Any]:
    answer = record.answer
    yield record.num_prompt_tokens
    yield 0 if answer is None else answer.num_tokens
    yield 0.0 if answer is None else record.ttft
    yield [] if answer is None else record.itl
    yield 0.0 if answer is None else record.e2el
    yield record.start_seconds
    yield record.queued_seconds
    yield "" if answer is None else answer.content
    yield record.error


def _line(label: str, value: float | None) -> str:
    text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {text}"
