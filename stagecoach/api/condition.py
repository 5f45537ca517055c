"""Whether a server is well: what is said of it, and the judgement that it stands still.

Asks nobody; the counts are brought here.
"""

import time
from typing import NamedTuple

from stagecoach.engine.messages import CaptureProgress, EngineStats, LoadProgress


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


class LoadShare:
    """How far the start is; as a text, what a loading server adds to its reason."""

    def __init__(self) -> None:
        self._bytes: dict[str, tuple[int, int]] = {}
        self._graphs: dict[str, tuple[int, int]] = {}

    def note(self, progress: LoadProgress | CaptureProgress) -> None:
        if isinstance(progress, LoadProgress):
            self._bytes[progress.worker] = (progress.done_bytes, progress.total_bytes)
        else:
            self._graphs[progress.worker] = (progress.num_captured, progress.num_graphs)

    def __str__(self) -> str:
        """The share of the weights that is loaded, or of the graphs that are captured."""
        shares = list((self._graphs or self._bytes).values())
        total = sum(share[1] for share in shares)
        return f" ({100 * sum(share[0] for share in shares) // total}%)" if total else ""
