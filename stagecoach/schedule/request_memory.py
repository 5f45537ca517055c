"""What running requests hold by number: pages, a state slot, a sampling row.

Owns the three pools and the fields of a Request that name what it holds. Decides nothing: who
gets memory, and from whom it is taken, is the scheduler's choice.
"""

from collections.abc import Collection

from stagecoach.cache.id_pool import IdPool
from stagecoach.cache.page_pool import PagePool
from stagecoach.cache.state_slots import StateSlots
from stagecoach.request import Request
from stagecoach.schedule.chunking import pages_for


class RequestMemory:
    """Pools, and the moves of their numbers to requests and back.

    Numbers that are freed may be handed out in the very next plan, although plans that use
    them are still in flight: every stage runs plans in the order they were made, so the old
    owner's last access comes before the new owner's first.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        num_slots: int,
        num_rows: int,
        block_size: int,
        debug_poison: bool,
    ) -> None:
        """`num_pages` and `num_slots` count the reserved page 0 and slot 0."""
        self.pages = PagePool(num_pages)
        self.slots = StateSlots(num_slots)
        self.rows = IdPool("sampling row", 0, num_rows)
        self._block_size = block_size
        self._debug_poison = debug_poison
        self._dirty_pages: list[int] = []  # freed since they were last asked for; debug mode only
        self._dirty_slots: list[int] = []

    def admit(self, request: Request) -> None:
        """Give a request its slot and its sampling row; pages come as its tokens are planned."""
        [request.slot] = self.slots.take(1)
        [request.sampling_row] = self.rows.take(1)

    def num_open_positions(self, request: Request) -> int:
        """Tokens not computed yet that the request has pages for."""
        return len(request.page_ids) * self._block_size - request.num_computed

    def cover(self, request: Request, end: int) -> None:
        """Take what tokens [0, end) lack in pages; the caller has seen to it that they are free.

        What a window did not use of its pages stays with the request, for the next one.
        """
        num_missing = pages_for(end, self._block_size) - len(request.page_ids)
        request.page_ids.extend(self.pages.take(max(0, num_missing)))

    def release(self, request: Request) -> None:
        """Free all that a request holds."""
        self.pages.free(request.page_ids)
        if self._debug_poison:
            self._dirty_pages.extend(request.page_ids)
        del request.page_ids[:]
        if request.slot is not None:
            self.slots.free([request.slot])
            if self._debug_poison:
                self._dirty_slots.append(request.slot)
            request.slot = None
        if request.sampling_row is not None:
            self.rows.free([request.sampling_row])
            request.sampling_row = None

    def take_dirty(self) -> tuple[list[int], list[int]]:
        """Pages and slots freed since the last call; none outside debug mode."""
        dirty = self._dirty_pages, self._dirty_slots
        self._dirty_pages, self._dirty_slots = [], []
        return dirty

    def check_integrity(self, running: Collection[Request]) -> None:
        """Prove that every page, slot and row is free or owned once, and no token without one."""
        self.pages.check_integrity(request.page_ids for request in running)
        self.slots.check_integrity([request.slot] for request in running if request.slot)
        self.rows.check_integrity(
            [request.sampling_row] for request in running if request.sampling_row is not None
        )
        for request in running:
            is_covered = self.num_open_positions(request) >= 0
            assert is_covered, f"computed tokens without a page: {request}"
