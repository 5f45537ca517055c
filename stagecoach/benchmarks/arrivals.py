"""When requests arrive: one list of times, drawn before the run.

Knows neither requests nor clocks.
"""

import math

import numpy as np

from stagecoach.errors import ConfigError


def arrival_seconds(
    num_requests: int, request_rate: float, burstiness: float, rng: np.random.Generator
) -> list[float]:
    """Seconds from the start of the run at which each request arrives, ascending.

    Intervals are gamma-distributed with shape `burstiness` and mean 1 / `request_rate`: a Poisson
    process at burstiness 1, more even above, in bursts below, a metronome at infinity. The times
    are scaled so that the last request arrives at num_requests / request_rate, as vLLM does:
    runs with other seeds then offer the same load. An infinite rate means all at once.

    Raises:
        ConfigError: the rate or the burstiness is not positive.
    """
    for option, value in (("--request-rate", request_rate), ("--burstiness", burstiness)):
        if not value > 0:
            raise ConfigError(f"{option}={value}: must be greater than 0")
    if math.isinf(request_rate) or num_requests == 0:
        return [0.0] * num_requests
    if math.isinf(burstiness):
        intervals = np.ones(num_requests)
    else:
        intervals = rng.gamma(burstiness, 1.0, num_requests)
    times = np.cumsum(intervals)
    if times[-1] == 0.0:  # intervals too small for a float, at an extreme burstiness
        times = np.arange(1.0, num_requests + 1)
    return [float(time) for time in times * (num_requests / request_rate / times[-1])]
