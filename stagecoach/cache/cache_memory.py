"""Pages and slots with what is cached in them: taken, held, pinned, evicted, moved.

Owns the numbers of both tiers, the order of eviction and the moves of the plan being made. Every
page is vacant, held (by requests or the plan), or only cached; the last can be evicted. Every
slot is vacant, a request's, or a checkpoint's. Knows no chain of hashes and no policy of what is
worth keeping.
"""

from collections.abc import Iterable, Sequence
from enum import Enum

from stagecoach.cache.host_tier import HostTier
from stagecoach.cache.memory_moves import MemoryMoves, MovesDraft, PageCopy, Transfer
from stagecoach.cache.page_pool import PagePool
from stagecoach.cache.prefix_index import Checkpoint, Node, Page, PrefixIndex
from stagecoach.cache.segmented_lru import SegmentedLru
from stagecoach.cache.state_slots import StateSlots


class Claim(Enum):
    """What may be evicted for a slot, beside what is vacant."""

    VACANT = "vacant"  # nothing
    PROBATION = "probation"  # a checkpoint that was never hit
    ANY = "any"  # any checkpoint, those never hit first


class Cause(Enum):
    """Why something is cached no more, on neither tier."""

    ROOM = "room"  # its page or slot went to somebody else
    HOST_ROOM = "host_room"  # its place in the host tier did
    PAGE = "page"  # it lies behind, or in, a page that was lost
    NOT_FINITE = "not_finite"  # NaN or infinity in what its owner computed
    QUARANTINE = "quarantine"  # a verification found it wrong
    RESET = "reset"


class CacheMemory:
    """Where everything is.

    What the plan being made reads or writes beside its requests' own memory is *pinned*: held
    until the plan is finished, so that nothing of it is evicted in the same plan.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        num_slots: int,
        num_host_pages: int,
        num_host_slots: int,
        block_size: int,
        debug_poison: bool,
    ) -> None:
        self.index = PrefixIndex(block_size)
        self.page_ids = PagePool(num_pages)
        self.slot_ids = StateSlots(num_slots)
        self.host = HostTier(num_host_pages, num_host_slots)
        self.evictions = dict.fromkeys(Cause, 0)
        self.num_stored = 0
        self.num_loaded = 0
        self.step = 0  # of the plan being made, or to be made next
        # Grows whenever a page or a slot becomes free or a checkpoint can be read.
        self.num_gains = 0
        self.committed_step = -1
        self._pages: dict[int, Page] = {}  # all that are not vacant, by number
        self._evictable_pages: SegmentedLru[Page] = SegmentedLru(self.page_ids.num_total)
        self._evictable_slots: SegmentedLru[Checkpoint] = SegmentedLru(self.slot_ids.num_total)
        self._uncommitted: dict[int, list[Checkpoint]] = {}  # by the step that makes them
        self._pinned_pages: list[Page] = []  # by the plan being made
        self._pinned_checkpoints: list[Checkpoint] = []
        self._loaded_pages: dict[Page, int] = {}  # by the plan being made, and from where
        self._pinned: set[Checkpoint] = set()  # by anybody
        self._bad_slots: set[int] = set()  # of requests; cleared when freed
        self._scrubs_all = debug_poison
        self._moves = MovesDraft()

    @property
    def num_free_pages(self) -> int:
        return self.page_ids.num_free + len(self._evictable_pages)

    @property
    def num_free_slots(self) -> int:
        return self.slot_ids.num_free + len(self._evictable_slots)

    @property
    def num_cached_pages(self) -> int:
        return sum(page.is_cached for page in self._pages.values())

    def page(self, page_id: int) -> Page:
        """The page of that number, which somebody holds."""
        return self._pages[page_id]

    # -- plans

    def begin_plan(self, step: int) -> None:
        self._unpin_all()
        self.step = step

    def finish_plan(self) -> MemoryMoves:
        """The moves since the last call. What was pinned may be evicted by the next plan."""
        moves, self._moves = self._moves.finish(), MovesDraft()
        self._unpin_all()
        self.num_gains += self.step in self._uncommitted
        self.step += 1
        return moves

    def note_committed(self, step: int) -> None:
        """What steps up to this one made is there on every stage, and may be evicted."""
        self.committed_step = max(self.committed_step, step)
        for made_by in [made_by for made_by in self._uncommitted if made_by <= step]:
            for checkpoint in self._uncommitted.pop(made_by):
                self.settle_checkpoint(checkpoint)

    def _unpin_all(self) -> None:
        pages, self._pinned_pages = self._pinned_pages, []
        checkpoints, self._pinned_checkpoints = self._pinned_checkpoints, []
        for checkpoint in checkpoints:
            self.unpin(checkpoint)
        for page in pages:
            self.unhold(page)
        self._loaded_pages.clear()
        self.host.end_plan()

    # -- pages

    def take_page(self) -> int:
        """A page of its own for a request; the caller has looked at `num_free_pages`."""
        page_id = self._take_page_id()
        self._pages[page_id] = Page(page_id, num_holders=1)
        return page_id

    def hold(self, page: Page) -> None:
        if not page.num_holders:
            self._lru_of_page(page).remove(page)
        page.num_holders += 1

    def unhold(self, page: Page) -> None:
        assert page.num_holders, f"page {page.page_id} released by nobody"
        page.num_holders -= 1
        self.settle_page(page)

    def pin_page(self, page: Page) -> None:
        """Hold it for the plan being made."""
        self.hold(page)
        self._pinned_pages.append(page)

    def settle_page(self, page: Page) -> None:
        """Put a page that nobody holds where it belongs: in the order of eviction, or vacant."""
        if page.num_holders:
            return
        self.num_gains += 1
        lru = self._lru_of_page(page)
        if page.is_cached:
            if page not in lru:
                lru.add(page)
            return
        if page in lru:
            lru.remove(page)
        if page.host_id is not None:
            self.host.pages.free(page.host_id)
        elif page.page_id is not None:
            del self._pages[page.page_id]
            self.page_ids.free([page.page_id])
            if self._scrubs_all or page.is_bad:
                self._moves.scrub_pages.add(page.page_id)
        page.page_id = page.host_id = None

    def bring_page(self, page: Page) -> int:
        """The device page of a page that is held already, loaded if it is on the host."""
        if page.page_id is not None:
            return page.page_id
        assert page.host_id is not None and page.num_holders, "a page of neither tier"
        page_id = self._take_page_id()
        self._load_page(page_id, page.host_id)
        self.host.pages.free_after_plan(page.host_id)
        self._loaded_pages[page] = page.host_id
        page.page_id, page.host_id = page_id, None
        self._pages[page_id] = page
        return page_id

    def copy_page(self, source: Page, num_rows: int) -> int:
        """A page of its own for a request, with the first rows of one that the plan has pinned."""
        target = self.take_page()
        # What this plan loads is loaded twice rather than loaded and copied.
        host_id = self._loaded_pages.get(source, source.host_id)
        if host_id is not None:
            self._load_page(target, host_id)
        else:
            assert source.page_id is not None, "a page of neither tier"
            self._moves.copies.append(PageCopy(source.page_id, target, num_rows))
        return target

    def _load_page(self, page_id: int, host_id: int) -> None:
        self._moves.load_pages.append(Transfer(page_id, host_id))
        self.num_loaded += 1

    def _take_page_id(self) -> int:
        while not self.page_ids.num_free:
            page = self._evictable_pages.least()
            assert page is not None, "no page is free: the caller did not look"
            self._evict_page(page)
        [page_id] = self.page_ids.take(1)
        return page_id

    def _evict_page(self, page: Page) -> None:
        """Make its number vacant: the page moves to the host tier, or is lost."""
        if not self._make_host_page_room():
            self.lose_page(page, Cause.ROOM)
        elif page.is_cached:  # what made room there may have stood before it
            assert page.page_id is not None
            self._evictable_pages.remove(page)
            old_id, page.page_id, page.host_id = page.page_id, None, self.host.pages.take()
            self._moves.store_pages.append(Transfer(old_id, page.host_id))
            page.stored_in = self.step
            self.num_stored += 1
            page.num_holders = 1
            self._pinned_pages.append(page)
            del self._pages[old_id]
            self.page_ids.free([old_id])
            if self._scrubs_all:
                self._moves.scrub_pages.add(old_id)

    def _make_host_page_room(self) -> bool:
        shelf = self.host.pages
        if not shelf.numbers.num_free:
            page = shelf.evictable.least()
            if page is not None:
                self.lose_page(page, Cause.HOST_ROOM)
        return bool(shelf.numbers.num_free)

    def lose_page(self, page: Page, cause: Cause) -> None:
        """Drop a page that nobody holds from the index, with all that needs it."""
        for checkpoint in tuple(page.tails):
            self.drop_checkpoint(checkpoint, Cause.PAGE)
        if page.node is not None:
            self.remove(page.node, cause)
        else:
            self.evictions[cause] += 1

    def remove(self, top: Node, cause: Cause, *, is_bad: bool = False) -> None:
        """Drop a node and all under it; pages that are held stay with their holders.

        Args:
            cause: the top's; also that of the rest, unless it is for want of room.
            is_bad: none of it may be cached again, and it is cleared when it is freed.
        """
        is_for_room = cause in (Cause.ROOM, Cause.HOST_ROOM)
        for node in self.index.detach(top):
            below = Cause.PAGE if is_for_room else cause
            for checkpoint in tuple(node.checkpoints.values()):
                self.drop_checkpoint(checkpoint, below, is_bad=is_bad)
            page = node.page
            if page is not None:
                self.evictions[cause if node is top else below] += 1
                page.node = None
                if is_bad:
                    self._spoil(page, cause)
                self.settle_page(page)

    def _spoil(self, page: Page, cause: Cause) -> None:
        """Never cache a page again, nor what ends in it."""
        page.is_bad = True
        for checkpoint in tuple(page.tails):
            self.drop_checkpoint(checkpoint, cause, is_bad=True)

    def _lru_of_page(self, page: Page) -> SegmentedLru[Page]:
        return self._evictable_pages if page.host_id is None else self.host.pages.evictable

    # -- slots and checkpoints

    def take_slot(self, claim: Claim) -> int | None:
        """A slot, or None if nothing that the claim allows can be evicted for it."""
        if not self.slot_ids.num_free:
            if claim is Claim.VACANT:
                return None
            in_probation = claim is Claim.PROBATION
            checkpoint = self._evictable_slots.least(in_probation=in_probation)
            if checkpoint is None:
                return None
            self._evict_checkpoint(checkpoint)
        [slot] = self.slot_ids.take(1)
        return slot

    def free_slot(self, slot: int, *, is_bad: bool = False) -> None:
        self.num_gains += 1
        self.slot_ids.free([slot])
        if self._scrubs_all or is_bad or slot in self._bad_slots:
            self._moves.scrub_slots.add(slot)
        self._bad_slots.discard(slot)

    def is_bad_slot(self, slot: int) -> bool:
        return slot in self._bad_slots

    def file(
        self, checkpoint: Checkpoint, node: Node, tail: tuple[int, ...], tail_page: Page | None
    ) -> None:
        """Index a checkpoint whose slot is no request's any more."""
        self.index.add_checkpoint(checkpoint, node, tail, tail_page)
        if checkpoint.step > self.committed_step:
            self._uncommitted.setdefault(checkpoint.step, []).append(checkpoint)
        else:
            self.settle_checkpoint(checkpoint)

    def pin(self, checkpoint: Checkpoint) -> None:
        """Keep its slot, and its place unless it proves wrong, until `unpin`."""
        lru = self._lru_of_checkpoint(checkpoint)
        if checkpoint in lru:
            lru.remove(checkpoint)
        checkpoint.num_pins += 1
        self._pinned.add(checkpoint)

    def pin_for_plan(self, checkpoint: Checkpoint) -> None:
        self.pin(checkpoint)
        self._pinned_checkpoints.append(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.num_pins, f"unpinned too often: position {checkpoint.position}"
        checkpoint.num_pins -= 1
        if not checkpoint.num_pins:
            self._pinned.remove(checkpoint)
        self.settle_checkpoint(checkpoint)

    def touch(self, checkpoint: Checkpoint) -> None:
        """It is wanted again: among the last to be evicted from now on."""
        lru = self._lru_of_checkpoint(checkpoint)
        is_evictable = checkpoint in lru
        if is_evictable:
            lru.remove(checkpoint)
        checkpoint.is_protected = True
        if is_evictable:
            lru.add(checkpoint)

    def demote(self, checkpoint: Checkpoint) -> None:
        """Nobody is expected to want it again: the next to be evicted."""
        lru = self._lru_of_checkpoint(checkpoint)
        if checkpoint in lru:
            lru.demote(checkpoint)
        checkpoint.is_protected = False

    def settle_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint that is not pinned in the order of eviction, or free its slot."""
        lru = self._lru_of_checkpoint(checkpoint)
        if checkpoint.num_pins:
            return
        if checkpoint.is_indexed:
            if checkpoint.step <= self.committed_step and checkpoint not in lru:
                self.num_gains += 1
                lru.add(checkpoint)
            return
        if checkpoint in lru:
            lru.remove(checkpoint)
        if checkpoint.slot is not None:
            self.free_slot(checkpoint.slot, is_bad=checkpoint.is_bad)
            checkpoint.slot = None
        elif checkpoint.host_slot is not None:
            self.host.slots.free(checkpoint.host_slot)
            checkpoint.host_slot = None

    def load_checkpoint(self, checkpoint: Checkpoint, slot: int) -> None:
        """Copy a checkpoint of the host tier into a request's slot; it stays there as well."""
        assert checkpoint.host_slot is not None, f"not on the host: {checkpoint.position}"
        self._moves.load_slots.append(Transfer(slot, checkpoint.host_slot))
        self.num_loaded += 1

    def take_over(self, checkpoint: Checkpoint) -> int:
        """Evict a checkpoint and hand its slot, as it is, to the request that has it pinned."""
        slot = checkpoint.slot
        assert slot is not None and checkpoint.num_pins == 1, f"not for one alone: {checkpoint}"
        checkpoint.slot = None
        self.drop_checkpoint(checkpoint, Cause.ROOM)
        return slot

    def bring_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Move a pinned checkpoint of the host tier to the device; False if no slot may be had."""
        assert checkpoint.num_pins, f"evicted on its way: position {checkpoint.position}"
        slot = self.take_slot(Claim.ANY)
        if slot is None:
            return False
        self.load_checkpoint(checkpoint, slot)
        assert checkpoint.host_slot is not None, "it was there"
        self.host.slots.free_after_plan(checkpoint.host_slot)
        checkpoint.slot, checkpoint.host_slot = slot, None
        return True

    def drop_checkpoint(
        self, checkpoint: Checkpoint, cause: Cause, *, is_bad: bool = False
    ) -> None:
        """Unindex it, if it is not yet; its slot is free when nobody has it pinned."""
        if not checkpoint.is_indexed:
            return
        self.evictions[cause] += 1
        checkpoint.is_bad |= is_bad
        self.index.remove_checkpoint(checkpoint)
        self.settle_checkpoint(checkpoint)
        if checkpoint.tail_page is not None:
            if is_bad:
                self._spoil(checkpoint.tail_page, cause)
            self.settle_page(checkpoint.tail_page)

    def _evict_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Make its slot vacant: the checkpoint moves to the host tier, or is lost."""
        if not self._make_host_slot_room():
            self.drop_checkpoint(checkpoint, Cause.ROOM)
            return
        slot = checkpoint.slot
        assert slot is not None, f"on the host already: {checkpoint.position}"
        self._evictable_slots.remove(checkpoint)
        checkpoint.slot, checkpoint.host_slot = None, self.host.slots.take()
        checkpoint.stored_in = self.step
        self._moves.store_slots.append(Transfer(slot, checkpoint.host_slot))
        self.num_stored += 1
        self.pin_for_plan(checkpoint)
        self.free_slot(slot)

    def _make_host_slot_room(self) -> bool:
        shelf = self.host.slots
        if not shelf.numbers.num_free:
            checkpoint = shelf.evictable.least()
            if checkpoint is not None:
                self.drop_checkpoint(checkpoint, Cause.HOST_ROOM)
        return bool(shelf.numbers.num_free)

    def _lru_of_checkpoint(self, checkpoint: Checkpoint) -> SegmentedLru[Checkpoint]:
        is_on_device = checkpoint.host_slot is None
        return self._evictable_slots if is_on_device else self.host.slots.evictable

    # -- clearing and proof

    def scrub(self, page_ids: Iterable[int], slot: int | None) -> None:
        """Clear them before anybody else has them: now if they are vacant, else when freed.

        A page that is cached still was computed by somebody else.
        """
        for page_id in page_ids:
            page = self._pages.get(page_id)
            if page is None:
                self._moves.scrub_pages.add(page_id)
            elif not page.is_cached:
                page.is_bad = True
        if slot is not None:
            if self.slot_ids.is_free(slot):
                self._moves.scrub_slots.add(slot)
            else:
                self._bad_slots.add(slot)

    def check_integrity(self, held_pages: Iterable[Sequence[int]], held_slots: list[int]) -> None:
        """Prove that every number is accounted for once, and the order of eviction exact."""
        self.index.check_integrity()
        num_holders: dict[int, int] = {}
        for page_ids in held_pages:
            assert len(set(page_ids)) == len(page_ids), f"a page twice in one table: {page_ids}"
            for page_id in page_ids:
                num_holders[page_id] = num_holders.get(page_id, 0) + 1
        for page in self._pinned_pages:
            if page.page_id is not None:
                num_holders[page.page_id] = num_holders.get(page.page_id, 0) + 1
        self.page_ids.check_integrity([list(self._pages)])
        for page_id, page in self._pages.items():
            assert page.page_id == page_id and page.host_id is None, f"page {page_id}: {page}"
            assert page.num_holders == num_holders.pop(page_id, 0), f"holders of page {page_id}"
            assert page.num_holders or page.is_cached, f"page {page_id} is lost"
            is_evictable = page in self._evictable_pages
            assert is_evictable == (not page.num_holders), f"page {page_id} in its queue"
        assert not num_holders, f"pages that are held and vacant: {sorted(num_holders)}"
        cached = [node.page for node in self.index if node.page is not None]
        tails = [c.tail_page for c in self.index.checkpoints() if c.tail_page is not None]
        on_host = {page.host_id: page for page in [*cached, *tails] if page.host_id is not None}
        for page in [*cached, *tails]:
            is_on_device = page.page_id is not None and self._pages.get(page.page_id) is page
            is_on_host = page.host_id is not None and on_host.get(page.host_id) is page
            assert is_on_device != is_on_host, f"a cached page of no tier: {page}"
        dropped = [p for p in self._pinned_pages if p.host_id is not None and not p.is_cached]
        host_ids = [*on_host, *{page.host_id for page in dropped if page.host_id is not None}]
        self.host.pages.check_integrity(host_ids)
        self._check_checkpoints(held_slots)
        for lru, members in (
            (self._evictable_pages, [p for p in self._pages.values() if not p.num_holders]),
            (self.host.pages.evictable, [p for p in on_host.values() if not p.num_holders]),
        ):
            assert len(lru) == len(members), "a page in the queue that is not there"
            assert all(page in lru for page in members), "a page that is not in the queue"

    def _check_checkpoints(self, held_slots: list[int]) -> None:
        """Prove the same of slots. Checkpoints that were dropped while pinned still have theirs."""
        checkpoints = {*self.index.checkpoints(), *self._pinned}
        slots = [c.slot for c in checkpoints if c.slot is not None]
        host_slots = [c.host_slot for c in checkpoints if c.host_slot is not None]
        self.slot_ids.check_integrity([slots, held_slots])
        self.host.slots.check_integrity(host_slots)
        evictable = [c for c in checkpoints if not c.num_pins and c.step <= self.committed_step]
        num_evictable = len(self._evictable_slots) + len(self.host.slots.evictable)
        assert num_evictable == len(evictable), "a checkpoint in the queue that is not there"
        assert all(c in self._lru_of_checkpoint(c) for c in evictable), "one not in the queue"
