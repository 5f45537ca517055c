"""Who is evicted first: what was used once before what was used again, each oldest first.

Owns the order of entries that may be evicted. Knows neither what they are nor why they are used.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

_PROTECTED_SHARE = 0.8


class Entry(Protocol):
    """Something that can be evicted."""

    is_protected: bool  # it was used again since it was made


E = TypeVar("E", bound=Entry)


class SegmentedLru(Generic[E]):
    """Two queues: *probation* for what was used once, *protected* for what was used again.

    So a flood of prompts that nobody asks for again passes through probation and leaves what is
    shared alone. The protected queue has a limit; its least recent entry goes back to the recent
    end of probation, where it may earn its place again.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: most entries there can be; a share of them may be protected."""
        self._most_protected = int(capacity * _PROTECTED_SHARE)
        self._probation: OrderedDict[E, None] = OrderedDict()
        self._protected: OrderedDict[E, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, entry: E) -> bool:
        return entry in self._probation or entry in self._protected

    def __iter__(self) -> Iterator[E]:
        """Entries in the order in which they would be evicted."""
        yield from self._probation
        yield from self._protected

    def add(self, entry: E) -> None:
        """Put an entry at the recent end of its queue; it is in neither."""
        assert entry not in self, f"in the queue already: {entry}"
        if not entry.is_protected:
            self._probation[entry] = None
            return
        self._protected[entry] = None
        if len(self._protected) > self._most_protected:
            oldest, _ = self._protected.popitem(last=False)
            oldest.is_protected = False
            self._probation[oldest] = None

    def demote(self, entry: E) -> None:
        """Have an entry evicted next."""
        self.remove(entry)
        entry.is_protected = False
        self._probation[entry] = None
        self._probation.move_to_end(entry, last=False)

    def remove(self, entry: E) -> None:
        """Take an entry out, wherever it stands."""
        del (self._protected if entry.is_protected else self._probation)[entry]

    def least(self, *, in_probation: bool = False) -> E | None:
        """The entry to evict next, of all or of those in probation; None if there is none."""
        if self._probation:
            return next(iter(self._probation))
        return None if in_probation or not self._protected else next(iter(self._protected))
