"""What a run measured: from the times of each request to the figures of the report.

Owns every definition; the names are those of `vllm bench serve`. Knows no HTTP.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecoach.benchmarks.answer import Answer
from stagecoach.errors import ConfigError

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "icl": "Inter-chunk Latency",
    "e2el": "End-to-end Latency",
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request of a run; all times in seconds, on one clock.

    `answer` is None where it failed, and `error` says why. `queued_seconds` passed between the
    request's turn and its sending, while --max-concurrency others were being answered.
    """

    start_seconds: float
    queued_seconds: float
    num_prompt_tokens: int
    answer: Answer | None = None
    error: str = ""

    @property
    def finished(self) -> Answer:
        """The answer of a request that has one."""
        assert self.answer is not None, self.error
        return self.answer

    @property
    def ttft(self) -> float:
        """From sending to the first event that brought a token."""
        return self.finished.arrivals[0].seconds - self.start_seconds

    @property
    def tpot(self) -> float | None:
        """First to last token, over the number of tokens after the first; None without any."""
        answer = self.finished
        if answer.num_tokens < 2:
            return None
        span = answer.arrivals[-1].seconds - answer.arrivals[0].seconds
        return span / (answer.num_tokens - 1)

    @property
    def e2el(self) -> float:
        """From sending to the last event of the answer."""
        return self.finished.end_seconds - self.start_seconds

    @property
    def icl(self) -> list[float]:
        """Between one event that brought tokens and the next."""
        times = [arrival.seconds for arrival in self.finished.arrivals]
        return [end - start for start, end in itertools.pairwise(times)]

    @property
    def itl(self) -> list[float]:
        """One entry a token: m tokens that came together, after a gap g, took g / m each.

        Tokens of the first event have no gap before them and no entry.
        """
        counts = [arrival.num_tokens for arrival in self.finished.arrivals[1:]]
        return [
            gap / count for gap, count in zip(self.icl, counts, strict=True) for _ in range(count)
        ]


def summarize(
    records: Sequence[RequestRecord],
    duration_seconds: float,
    *,
    percentile_metrics: Iterable[str],
    percentiles: Iterable[float],
    goodput: dict[str, float],
) -> dict[str, Any]:
    """The figures of a run, by the names of `vllm bench serve`.

    Tokens and times of failed requests do not count. A statistic of nothing is None.

    Args:
        records: in the order in which the requests were made.
        percentiles: from 0 to 100.
        goodput: bounds in milliseconds by metric; all of them make a request good.
    """
    done = [record for record in records if record.answer is not None]
    total_input = sum(record.num_prompt_tokens for record in done)
    total_output = sum(record.finished.num_tokens for record in done)
    result: dict[str, Any] = {
        "duration": duration_seconds,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration_seconds,
        "request_goodput": _num_good(done, goodput) / duration_seconds if goodput else None,
        "output_throughput": total_output / duration_seconds,
        "total_token_throughput": (total_input + total_output) / duration_seconds,
        "max_output_tokens_per_s": max_tokens_of_a_second(done),
        "max_concurrent_requests": max_concurrency_of(done),
        "mean_tokens_per_chunk": _mean_tokens_per_chunk(done),
        "token_sources": sorted({record.finished.token_source for record in done}),
    }
    for name in percentile_metrics:
        result |= _statistics(name, values_of(name, done), list(percentiles))
    return result


def values_of(name: str, done: Iterable[RequestRecord]) -> list[float]:
    """All values of a metric, in seconds."""
    if name in ("itl", "icl"):
        return [value for record in done for value in getattr(record, name)]
    values = [getattr(record, name) for record in done]
    return [value for value in values if value is not None]


def max_tokens_of_a_second(done: Sequence[RequestRecord]) -> float:
    """Most tokens that came in one second, counting seconds from the first request's start."""
    if not done:
        return 0.0
    start = min(record.start_seconds for record in done)
    counts: dict[int, int] = {}
    for record in done:
        for arrival in record.finished.arrivals:
            second = int(arrival.seconds - start)
            counts[second] = counts.get(second, 0) + arrival.num_tokens
    return float(max(counts.values()))


def max_concurrency_of(done: Sequence[RequestRecord]) -> int:
    """Most requests between their sending and their end; one that ends leaves first."""
    changes = sorted(
        change
        for record in done
        for change in ((record.start_seconds, 1), (record.finished.end_seconds, -1))
    )
    peak = num_running = 0
    for _, step in changes:
        num_running += step
        peak = max(peak, num_running)
    return peak


def parse_goodput(items: Iterable[str]) -> dict[str, float]:
    """`ttft:500`: milliseconds by metric; several may be separated by commas or spaces.

    Raises:
        ConfigError: an item is of another form, or names another metric.
    """
    bounds = {}
    for item in " ".join(items).replace(",", " ").split():
        name, _, value = item.partition(":")
        bound = _number(value)
        if name not in GOODPUT_METRICS or bound is None or not bound >= 0:
            raise ConfigError(
                f"--goodput={item}: must be METRIC:MILLISECONDS, where METRIC is one of "
                f"{', '.join(GOODPUT_METRICS)}"
            )
        bounds[name] = bound
    return bounds


def parse_metrics(text: str) -> list[str]:
    """`ttft,tpot`: names of METRICS.

    Raises:
        ConfigError: a name is another.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise ConfigError(
                f"--percentile-metrics={text}: {name} is none of {', '.join(METRICS)}"
            )
    return names


def parse_percentiles(text: str) -> list[float]:
    """`50,99.9`: numbers from 0 to 100.

    Raises:
        ConfigError: an item is another.
    """
    values = [_number(item) for item in text.split(",") if item.strip()]
    percentiles = [value for value in values if value is not None and 0 <= value <= 100]
    if len(percentiles) != len(values):
        raise ConfigError(f"--metric-percentiles={text}: must be numbers from 0 to 100")
    return percentiles


def percentile_key(percentile: float) -> str:
    """`p99`, `p99.9`."""
    return f"p{percentile:g}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _statistics(name: str, values: list[float], percentiles: list[float]) -> dict[str, Any]:
    """Percentiles are interpolated linearly; the deviation is that of the population."""
    keys = [percentile_key(percentile) for percentile in percentiles]
    if not values:
        return {f"{key}_{name}_ms": None for key in ("mean", "median", "std", *keys)}
    ms = np.asarray(values) * 1000.0
    statistics = {"mean": np.mean(ms), "median": np.median(ms), "std": np.std(ms)}
    statistics |= dict(zip(keys, np.percentile(ms, percentiles), strict=True))
    return {f"{key}_{name}_ms": float(value) for key, value in statistics.items()}


def _num_good(done: Iterable[RequestRecord], goodput: dict[str, float]) -> int:
    """A request with one token has no time per output token and meets any bound on it."""
    return sum(
        all((getattr(record, name) or 0.0) * 1000.0 <= bound for name, bound in goodput.items())
        for record in done
    )


def _mean_tokens_per_chunk(done: Iterable[RequestRecord]) -> float | None:
    """Over all events but the first of each answer, which ends the prefill."""
    counts = [arrival.num_tokens for record in done for arrival in record.finished.arrivals[1:]]
    return sum(counts) / len(counts) if counts else None
