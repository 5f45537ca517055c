"""Whether a server is well: what is said of it, and the judgement that it stands still.

Asks nobody; the counts are brought here.
"""

import time
from typing import NamedTuple

from stagecoach.engine.messages import EngineStats


class Condition(NamedTuple):
    """`status` is ok, loading, draining, dead or stalled; `reason` says more."""

    status: str
    reason: str | None = None


class StepWatch:
    """Since when an engine with work has made no step, from its counts at different times."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._num_steps = -1
        self._since = 0.0

    def note(self, stats: EngineStats) -> float | None:
        """Seconds without a step, once they are too many."""
        now = time.monotonic()
        is_idle = stats.num_waiting + stats.num_running == 0
        if is_idle or stats.num_steps != self._num_steps:
            self._num_steps = stats.num_steps
            self._since = now
            return None
        seconds = now - self._since
        return seconds if seconds > self._timeout else None
