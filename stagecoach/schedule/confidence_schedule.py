"""How many drafts of each window to verify: pure arithmetic on confidences and step times.

Method: DSpark, confidence-scheduled verification (its Algorithm 1). A draft is worth its
survival, the chance that it and all before it are accepted; drafts are admitted in descending
survival while the expected tokens a second rise.

Dimensions: R windows, K places of the longest, M numbers of admitted drafts, 0 to R * K.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from stagecoach.schedule.step_cost import Floats

# A confidence that is 0 or 1 in single precision is not a certainty.
_LEAST_DOUBT = 1e-6
_MOST_LOGIT = 40.0


def calibrate(confidences: Sequence[float], temperatures: Sequence[float]) -> list[float]:
    """sigmoid(logit(c) / temperature) of each place; as they are where `temperatures` is empty.

    Args:
        confidences: raw, one a draft, in [0, 1] or NaN.
        temperatures: one a place, positive; places beyond the last use the last.
    """
    # In this order what is not a number, from a draft that overflows, becomes a doubt.
    clipped = [min(max(_LEAST_DOUBT, c), 1 - _LEAST_DOUBT) for c in confidences]
    if not temperatures:
        return clipped
    logits = [math.log(c / (1 - c)) for c in clipped]
    last = len(temperatures) - 1
    cooled = [logit / temperatures[min(place, last)] for place, logit in enumerate(logits)]
    return [1 / (1 + math.exp(-min(max(x, -_MOST_LOGIT), _MOST_LOGIT))) for x in cooled]


def choose_lengths(
    confidences: Sequence[Sequence[float]],
    step_seconds: Callable[[Floats, Floats], Floats],
    *,
    num_other_tokens: int = 0,
    stops_early: bool = False,
) -> list[int]:
    """Drafts to verify in each window.

    Args:
        confidences: of each window, calibrated; as many as drafts may be verified now.
        step_seconds: ([M] tokens of a step, [M] tokens of its widest window) -> [M] seconds.
        num_other_tokens: tokens of the step beside the windows.
        stops_early: stop at the first draft that does not raise the rate, instead of where the
            rate is highest. Then no draft is admitted or left out for a confidence that was
            computed from its own token, as a rule needs that accepts at random.
    """
    num_windows = len(confidences)
    num_places = max(map(len, confidences), default=0)
    padded = [[*row, *[0.0] * (num_places - len(row))] for row in confidences]
    padded_RK = np.array(padded, dtype=np.float64).reshape(num_windows, num_places)
    survivals = np.cumprod(padded_RK, axis=1).ravel()
    # Stable: among equals of one window the earlier place comes first.
    order = np.argsort(-survivals, kind="stable")[: np.count_nonzero(survivals)]
    if not len(order):
        return [0] * num_windows
    windows, places = np.divmod(order, num_places)
    expected_M = np.full(len(order) + 1, float(num_windows))
    expected_M[1:] += np.cumsum(survivals[order])
    num_tokens_M = np.arange(len(order) + 1.0) + (num_other_tokens + num_windows)
    widest_M = np.ones(len(order) + 1)
    widest_M[1:] += 1 + np.maximum.accumulate(places)
    rates_M = expected_M / step_seconds(num_tokens_M, widest_M)
    if stops_early:
        falls = np.flatnonzero(np.diff(rates_M) <= 0)
        num_admitted = int(falls[0]) if len(falls) else len(order)
    else:
        num_admitted = int(np.argmax(rates_M))
    return list(np.bincount(windows[:num_admitted], minlength=num_windows).tolist())
