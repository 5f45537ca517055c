"""When requests arrive."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.benchmarks.arrivals import arrival_seconds
from stagecoach.errors import ConfigError


def _variation(burstiness: float) -> float:
    """Deviation of the intervals over their mean; 1 / sqrt(burstiness) for a gamma."""
    times = arrival_seconds(20_000, 10.0, burstiness, np.random.default_rng(1))
    intervals = np.diff([0.0, *times])
    return float(np.std(intervals) / np.mean(intervals))


@given(st.integers(1, 200), st.floats(0.01, 1e4), st.floats(1e-3, 1e3), st.integers(0, 2**32))
def test_times_ascend_and_the_last_is_where_the_rate_puts_it(
    number: int, rate: float, burstiness: float, seed: int
) -> None:
    times = arrival_seconds(number, rate, burstiness, np.random.default_rng(seed))
    assert len(times) == number
    assert times == sorted(times) and times[0] >= 0.0
    assert times[-1] == pytest.approx(number / rate)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrival_seconds(3, math.inf, 1.0, np.random.default_rng(0)) == [0.0] * 3
    assert arrival_seconds(0, 5.0, 1.0, np.random.default_rng(0)) == []


def test_infinite_burstiness_is_a_metronome() -> None:
    times = arrival_seconds(4, 2.0, math.inf, np.random.default_rng(0))
    assert times == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_vary_as_a_gamma_of_that_shape(burstiness: float) -> None:
    assert _variation(burstiness) == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_a_seed_draws_the_same_times() -> None:
    draws = [arrival_seconds(9, 1.0, 1.0, np.random.default_rng(seed)) for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_what_is_not_positive_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="--request-rate="):
        arrival_seconds(1, value, 1.0, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="--burstiness="):
        arrival_seconds(1, 1.0, value, np.random.default_rng(0))
