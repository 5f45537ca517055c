"""Figures of an engine without a server, with a clock that the batches move."""

import pytest

from stagecoach.benchmarks.offline import measure_latency, summarize_throughput
from stagecoach.errors import ConfigError


def test_latency_times_the_batches_after_the_warm_ups() -> None:
    lengths = iter([100.0, 100.0, 1.0, 2.0, 3.0])
    now = 0.0

    def run_batch() -> None:
        nonlocal now
        now += next(lengths)

    result = measure_latency(run_batch, num_warmups=2, num_iterations=3, clock=lambda: now)
    assert result["latencies"] == [1.0, 2.0, 3.0]
    assert result["avg_latency"] == 2.0
    assert result["std_latency"] == pytest.approx((2 / 3) ** 0.5)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == 2.0 and result["percentiles"]["90"] == 2.8


@pytest.mark.parametrize(
    ("warmups", "iterations", "text"),
    [(-1, 1, "--num-iters-warmup=-1: "), (0, 0, "--num-iters=0: must be at least 1")],
)
def test_numbers_of_batches_out_of_range_are_refused(
    warmups: int, iterations: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        measure_latency(lambda: None, num_warmups=warmups, num_iterations=iterations)


def test_throughput_is_over_all_tokens_and_over_those_of_the_output() -> None:
    assert summarize_throughput(
        4.0, num_requests=8, num_prompt_tokens=100, num_output_tokens=20
    ) == {
        "elapsed_time": 4.0,
        "num_requests": 8,
        "total_num_tokens": 120,
        "requests_per_second": 2.0,
        "tokens_per_second": 30.0,
        "num_prompt_tokens": 100,
        "num_output_tokens": 20,
        "output_tokens_per_second": 5.0,
    }
