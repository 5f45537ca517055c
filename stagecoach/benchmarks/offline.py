"""Timing without a server: one batch again and again, or many prompts once.

Owns the figures of `bench latency` and `bench throughput`, by vLLM's names; what is timed is a
function that the caller gives. Knows no engine.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from stagecoach.errors import ConfigError

PERCENTAGES = (10, 25, 50, 75, 90, 99)


def measure_latency(
    run_batch: Callable[[], object],
    *,
    num_warmups: int,
    num_iterations: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Seconds of whole batches: `avg_latency`, `std_latency`, `percentiles`, `latencies`.

    Percentiles are interpolated linearly; the deviation is that of the population.

    Raises:
        ConfigError: a number of iterations is out of range.
    """
    if num_warmups < 0:
        raise ConfigError(f"--num-iters-warmup={num_warmups}: must not be negative")
    if num_iterations < 1:
        raise ConfigError(f"--num-iters={num_iterations}: must be at least 1")
    for _ in range(num_warmups):
        run_batch()
    latencies = []
    for _ in range(num_iterations):
        start = clock()
        run_batch()
        latencies.append(clock() - start)
    values = np.percentile(latencies, PERCENTAGES).tolist()
    return {
        "avg_latency": float(np.mean(latencies)),
        "std_latency": float(np.std(latencies)),
        "latencies": latencies,
        "percentiles": dict(zip(map(str, PERCENTAGES), values, strict=True)),
    }


def summarize_throughput(
    elapsed_seconds: float,
    *,
    num_requests: int,
    num_prompt_tokens: int,
    num_output_tokens: int,
) -> dict[str, Any]:
    """Rates of a run over all tokens, and over those of the output."""
    num_tokens = num_prompt_tokens + num_output_tokens
    return {
        "elapsed_time": elapsed_seconds,
        "num_requests": num_requests,
        "total_num_tokens": num_tokens,
        "requests_per_second": num_requests / elapsed_seconds,
        "tokens_per_second": num_tokens / elapsed_seconds,
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "output_tokens_per_second": num_output_tokens / elapsed_seconds,
    }
