"""How much is open, in this API process and in those beside it.

Owns the counts that all API processes of a server share, so that one limit holds for all of
them however the clients are spread. Each process writes its own place only.
"""

from collections.abc import Sequence
from multiprocessing import sharedctypes
from typing import Any, Protocol

from stagecoach.api.error_body import QueueFullError
from stagecoach.errors import RequestError


class _Numbers(Protocol):
    def __getitem__(self, index: Any) -> Any: ...

    def __setitem__(self, index: Any, value: Any) -> None: ...


def shared_numbers(num_processes: int) -> _Numbers:
    """Zeros for that many processes, in memory that can be passed to children."""
    numbers: _Numbers = sharedctypes.RawArray("q", 2 * num_processes)
    return numbers


class OpenCounts:
    """Open requests and completions; `num_*` are of all processes together."""

    def __init__(self, numbers: _Numbers | None = None, place: int = 0) -> None:
        """
        Args:
            numbers: of `shared_numbers`; None: this is the only process.
            place: which of the processes this is.
        """
        self._numbers = [0, 0] if numbers is None else numbers
        self._place = place

    def add(self, num_requests: int, num_completions: int) -> None:
        """Begin that many here, or end them where negative."""
        self._numbers[2 * self._place] += num_requests
        self._numbers[2 * self._place + 1] += num_completions

    def check_room(self, num_completions: int, most: int) -> None:
        """
        Raises:
            RequestError: one request with so many could never be taken.
            QueueFullError: more than `most` would be open.
        """
        options = "(--max-num-seqs + --max-queue-requests)"
        if num_completions > most:
            raise RequestError(
                "prompt",
                f"{num_completions} completions in one request; this server takes {most} {options}",
            )
        if self.num_completions + num_completions > most:
            raise QueueFullError(
                f"{self.num_completions} completions are open and this request wants "
                f"{num_completions}; the limit is {most} {options}"
            )

    def clear(self) -> None:
        """The process of this place has ended."""
        self._numbers[2 * self._place : 2 * self._place + 2] = [0, 0]

    @property
    def num_requests(self) -> int:
        return sum(self._all()[0::2])

    @property
    def num_completions(self) -> int:
        return sum(self._all()[1::2])

    def _all(self) -> Sequence[int]:
        numbers: Sequence[int] = self._numbers[:]
        return numbers
