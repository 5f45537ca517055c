"""The numbers of the host tier: where evicted pages and checkpoints go, and who goes from there.

Owns which host numbers are free and which entries may be evicted for room. Knows neither the
index nor how memory is moved.
"""

from typing import Generic

from stagecoach.cache.id_pool import IdPool
from stagecoach.cache.prefix_index import Checkpoint, Page
from stagecoach.cache.segmented_lru import E, SegmentedLru


class HostShelf(Generic[E]):
    """Host pages or host slots: numbers 0..count-1, and the entries in them by recency.

    A number that the plan being made loads from, or stores to, is not handed out before the next
    plan, since the loads of a plan come after its stores.
    """

    def __init__(self, noun: str, count: int) -> None:
        self.numbers = IdPool(noun, 0, count)
        self.evictable: SegmentedLru[E] = SegmentedLru(count)
        self._read: list[int] = []  # loaded by the plan being made, and empty afterwards

    @property
    def num_used(self) -> int:
        """Numbers with an entry in them."""
        return self.numbers.num_total - self.numbers.num_free - len(self._read)

    def take(self) -> int:
        [number] = self.numbers.take(1)
        return number

    def free(self, number: int) -> None:
        self.numbers.free([number])

    def free_after_plan(self, number: int) -> None:
        self._read.append(number)

    def end_plan(self) -> None:
        self.numbers.free(self._read)
        self._read.clear()

    def check_integrity(self, used: list[int]) -> None:
        """Prove that free + used + read by this plan = total."""
        self.numbers.check_integrity([used, self._read])


class HostTier:
    """Both shelves."""

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.pages: HostShelf[Page] = HostShelf("host page", num_pages)
        self.slots: HostShelf[Checkpoint] = HostShelf("host slot", num_slots)

    def end_plan(self) -> None:
        self.pages.end_plan()
        self.slots.end_plan()
