"""Waiting for the end of processes, whosever children they are, without polling."""

import os
import select
import time
from collections.abc import Iterable


class Watch:
    """Processes by id, and whether they have ended; ids are not reused while it is open."""

    def __init__(self, process_ids: Iterable[int]) -> None:
        self._descriptors = {os.pidfd_open(process_id): process_id for process_id in process_ids}

    def running_after(self, seconds: float) -> set[int]:
        """Wait until all have ended, or that long; those that have not."""
        deadline = time.monotonic() + seconds
        running = dict(self._descriptors)
        while running and (left := deadline - time.monotonic()) > 0:
            for descriptor in select.select(list(running), [], [], left)[0]:
                del running[descriptor]
        return set(running.values())

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
