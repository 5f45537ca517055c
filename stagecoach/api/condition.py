"""Whether a server is well: what is said of it, and the judgement that it stands still.

Asks nobody; the counts are brought here.
"""

import time
from typing import NamedTuple

from stagecoach.engine.messages import CaptureProgress, EngineStats, LoadProgress
from stagecoach.observe.transfer_rate import TransferRate


class Condition(NamedTuple):
    """`status` is ok, loading, recovering, draining, dead or stalled; `reason` says more."""

    status: str
    reason: str | None = None


class StepWatch:
    """Since when an engine with work has made no step, from its counts at different times."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        # Steps, and the seconds of recoveries, after which a step may take its time again.
        self._reached = (-1, 0.0)
        self._since = 0.0

    def note(self, stats: EngineStats) -> float | None:
        """Seconds without a step, once they are too many."""
        now = time.monotonic()
        is_idle = stats.num_waiting + stats.num_running == 0
        reached = (stats.num_steps, stats.recovery_seconds)
        if is_idle or reached != self._reached:
            self._reached = reached
            self._since = now
            return None
        seconds = now - self._since
        return seconds if seconds > self._timeout else None


class LoadShare:
    """How far the start is; as a text, what a loading server adds to its reason."""

    def __init__(self) -> None:
        self._bytes: dict[str, tuple[int, int]] = {}
        self._graphs: dict[str, tuple[int, int]] = {}
        self._rate = TransferRate()
        self._told = ""

    def note(self, progress: LoadProgress | CaptureProgress) -> None:
        if isinstance(progress, LoadProgress):
            self._bytes[progress.worker] = (progress.done_bytes, progress.total_bytes)
            done, total = map(sum, zip(*self._bytes.values(), strict=True))
            self._told = self._rate.describe(done, total)
        else:
            self._graphs[progress.worker] = (progress.num_captured, progress.num_graphs)

    def __str__(self) -> str:
        """The share of the weights that is loaded, and how fast, or of the graphs captured."""
        shares = list((self._graphs or self._bytes).values())
        total = sum(share[1] for share in shares)
        if not total:
            return ""
        percent = 100 * sum(share[0] for share in shares) // total
        return f" ({percent}%)" if self._graphs else f" ({percent}%: {self._told})"
