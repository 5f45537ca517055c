"""How fast bytes come and how long the rest will take, in words.

Owns the window over which a rate is taken; knows nobody's clock but its own.
"""

import time
from collections import deque

# A rate over the whole time would still tell of a slow beginning at the end.
_WINDOW_SECONDS = 20.0


class TransferRate:
    """The rate over the latest seconds of a transfer whose state is told now and then."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # (seconds, bytes done), oldest first

    def describe(self, done_bytes: int, total_bytes: int) -> str:
        """Note how much is done; "12.3 of 45.6 GB, 1.20 GB/s, 28 s left", as far as is known."""
        now = time.monotonic()
        self._seen.append((now, done_bytes))
        while len(self._seen) > 2 and now - self._seen[1][0] > _WINDOW_SECONDS:
            self._seen.popleft()
        text = f"{done_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB"
        began, before = self._seen[0]
        if done_bytes <= before or now <= began:
            return text
        rate = (done_bytes - before) / (now - began)
        return f"{text}, {rate / 1e9:.2f} GB/s, {(total_bytes - done_bytes) / rate:.0f} s left"
