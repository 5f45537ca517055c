"""Which requests may be why workers die, and how the one that is gets found.

Owns what is remembered of deaths. A request is suspected when workers died twice in a row while
it was computed, and in between it did not get on. One suspect alone is at fault. Several get
their seats one after the other, the next once the one before has got on: so the next death has
one suspect. Knows neither workers nor plans.
"""

from collections.abc import Sequence
from typing import NamedTuple

from stagecoach.request import Request

_SUSPICIOUS_DEATHS = 2
# Its replay ends with a token; one more shows that its windows do no harm either.
_HARMLESS_TOKENS = 2


class _Record(NamedTuple):
    request: Request
    num_deaths: int  # in a row
    num_tokens: int  # committed when the latest came

    @property
    def is_suspected(self) -> bool:
        return self.num_deaths >= _SUSPICIOUS_DEATHS

    @property
    def is_over(self) -> bool:
        """It was computed since without harm, or is gone."""
        request = self.request
        num_new = request.num_tokens - self.num_tokens
        return request.finish_reason is not None or num_new >= _HARMLESS_TOKENS


class Suspects:
    """Told of every death; asked whether requests may run beside each other."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}  # by request id

    def note_death(self, in_flight: Sequence[Request]) -> Request | None:
        """Workers died while these were computed; returns the one that is at fault, if known."""
        kept = {key: record for key, record in self._records.items() if not record.is_over}
        for request in in_flight:
            before = kept.get(request.request_id)
            num_deaths = 1 + (before.num_deaths if before is not None else 0)
            kept[request.request_id] = _Record(request, num_deaths, request.num_tokens)
        self._records = kept
        suspected = [request for request in in_flight if kept[request.request_id].is_suspected]
        return suspected[0] if len(suspected) == 1 else None

    def num_seats(self) -> int | None:
        """How many requests may run at once; None: as many as ever."""
        suspected = [record for record in self._records.values() if record.is_suspected]
        if all(record.is_over for record in suspected):
            return None
        cleared = [record for record in suspected if record.is_over]
        return 1 + sum(record.request.finish_reason is None for record in cleared)
