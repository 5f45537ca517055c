"""Pages: taken, held, pinned, evicted, moved.

Owns the numbers of pages on both tiers and the order of their eviction. Every page is vacant, held
(by requests or the plan), or only cached; the last can be evicted. Who loses what with a page is
`cache_memory.py`'s to say.
"""

from collections.abc import Callable, Iterable, Sequence

from stagecoach.cache.host_tier import HostShelf
from stagecoach.cache.memory_account import Cause, MemoryAccount
from stagecoach.cache.memory_moves import PageCopy, Transfer
from stagecoach.cache.page_pool import PagePool
from stagecoach.cache.prefix_index import Page
from stagecoach.cache.segmented_lru import SegmentedLru


class PageMemory:
    """Where every page is."""

    def __init__(
        self,
        num_pages: int,
        shelf: HostShelf[Page],
        account: MemoryAccount,
        lose: Callable[[Page, Cause], None],
        *,
        debug_poison: bool,
    ) -> None:
        """Take over all pages.

        Args:
            num_pages: counts the null page.
            shelf: of the host tier.
            lose: drops a page that nobody holds from the index, and settles it.
            debug_poison: every page that is freed is listed to be scrubbed.
        """
        self.ids = PagePool(num_pages)
        self._shelf = shelf
        self._account = account
        self._lose = lose
        self._scrubs_all = debug_poison
        self._pages: dict[int, Page] = {}  # all that are not vacant, by number
        self._evictable: SegmentedLru[Page] = SegmentedLru(self.ids.num_total)
        self._pinned: list[Page] = []  # by the plan being made
        self._loaded: dict[Page, int] = {}  # by the plan being made, and from where

    @property
    def num_free(self) -> int:
        return self.ids.num_free + len(self._evictable)

    @property
    def num_cached(self) -> int:
        return sum(page.is_cached for page in self._pages.values())

    def get(self, page_id: int) -> Page:
        """The page of that number, which somebody holds."""
        return self._pages[page_id]

    def take(self) -> int:
        """A page of its own for a request; the caller has looked at `num_free`."""
        page_id = self._take_id()
        self._pages[page_id] = Page(page_id, num_holders=1)
        return page_id

    def hold(self, page: Page) -> None:
        if not page.num_holders:
            self._lru_of(page).remove(page)
        page.num_holders += 1

    def unhold(self, page: Page) -> None:
        assert page.num_holders, f"page {page.page_id} released by nobody"
        page.num_holders -= 1
        self.settle(page)

    def pin(self, page: Page) -> None:
        """Hold it for the plan being made."""
        self.hold(page)
        self._pinned.append(page)

    def settle(self, page: Page) -> None:
        """Put a page that nobody holds where it belongs: in the order of eviction, or vacant."""
        if page.num_holders:
            return
        self._account.num_gains += 1
        lru = self._lru_of(page)
        if page.is_cached:
            if page not in lru:
                lru.add(page)
            return
        if page in lru:
            lru.remove(page)
        if page.host_id is not None:
            self._shelf.free(page.host_id)
        elif page.page_id is not None:
            del self._pages[page.page_id]
            self.ids.free([page.page_id])
            if self._scrubs_all or page.is_bad:
                self._account.moves.scrub_pages.add(page.page_id)
        page.page_id = page.host_id = None

    def bring(self, page: Page) -> int:
        """The device page of a page that is held already, loaded if it is on the host."""
        if page.page_id is not None:
            return page.page_id
        assert page.host_id is not None and page.num_holders, "a page of neither tier"
        page_id = self._take_id()
        self._load(page_id, page.host_id)
        self._shelf.free_after_plan(page.host_id)
        self._loaded[page] = page.host_id
        page.page_id, page.host_id = page_id, None
        self._pages[page_id] = page
        return page_id

    def copy(self, source: Page, num_rows: int) -> int:
        """A page of its own for a request, with the first rows of one that the plan has pinned."""
        target = self.take()
        # What this plan loads is loaded twice rather than loaded and copied.
        host_id = self._loaded.get(source, source.host_id)
        if host_id is not None:
            self._load(target, host_id)
        else:
            assert source.page_id is not None, "a page of neither tier"
            self._account.moves.copies.append(PageCopy(source.page_id, target, num_rows))
        return target

    def end_plan(self) -> None:
        """Nothing is pinned or being loaded any more."""
        pages, self._pinned = self._pinned, []
        for page in pages:
            self.unhold(page)
        self._loaded.clear()

    def scrub(self, page_ids: Iterable[int]) -> None:
        """Clear pages before anybody else has them: now if they are vacant, else when freed.

        A page that is cached still was computed by somebody else.
        """
        for page_id in page_ids:
            page = self._pages.get(page_id)
            if page is None:
                self._account.moves.scrub_pages.add(page_id)
            elif not page.is_cached:
                page.is_bad = True

    def check_integrity(self, held: Iterable[Sequence[int]], cached: Sequence[Page]) -> None:
        """Prove that every number is accounted for once, and the order of eviction exact.

        Args:
            held: the page table of each request.
            cached: what the index has, tail pages too, each as often as it stands there.
        """
        num_holders: dict[int, int] = {}
        for page_ids in held:
            assert len(set(page_ids)) == len(page_ids), f"a page twice in one table: {page_ids}"
            for page_id in page_ids:
                num_holders[page_id] = num_holders.get(page_id, 0) + 1
        for page in self._pinned:
            if page.page_id is not None:
                num_holders[page.page_id] = num_holders.get(page.page_id, 0) + 1
        self.ids.check_integrity([list(self._pages)])
        for page_id, page in self._pages.items():
            assert page.page_id == page_id and page.host_id is None, f"page {page_id}: {page}"
            assert page.num_holders == num_holders.pop(page_id, 0), f"holders of page {page_id}"
            assert page.num_holders or page.is_cached, f"page {page_id} is lost"
            is_evictable = page in self._evictable
            assert is_evictable == (not page.num_holders), f"page {page_id} in its queue"
        assert not num_holders, f"pages that are held and vacant: {sorted(num_holders)}"
        on_host = {page.host_id: page for page in cached if page.host_id is not None}
        for page in cached:
            is_on_device = page.page_id is not None and self._pages.get(page.page_id) is page
            is_on_host = page.host_id is not None and on_host.get(page.host_id) is page
            assert is_on_device != is_on_host, f"a cached page of no tier: {page}"
        dropped = [p for p in self._pinned if p.host_id is not None and not p.is_cached]
        host_ids = [*on_host, *{page.host_id for page in dropped if page.host_id is not None}]
        self._shelf.check_integrity(host_ids)
        for lru, members in (
            (self._evictable, [p for p in self._pages.values() if not p.num_holders]),
            (self._shelf.evictable, [p for p in on_host.values() if not p.num_holders]),
        ):
            assert len(lru) == len(members), "a page in the queue that is not there"
            assert all(page in lru for page in members), "a page that is not in the queue"

    def _load(self, page_id: int, host_id: int) -> None:
        self._account.moves.load_pages.append(Transfer(page_id, host_id))
        self._account.num_loaded += 1

    def _take_id(self) -> int:
        while not self.ids.num_free:
            page = self._evictable.least()
            assert page is not None, "no page is free: the caller did not look"
            self._evict(page)
        [page_id] = self.ids.take(1)
        return page_id

    def _evict(self, page: Page) -> None:
        """Make its number vacant: the page moves to the host tier, or is lost."""
        if not self._make_host_room():
            self._lose(page, Cause.ROOM)
        elif page.is_cached:  # what made room there may have stood before it
            assert page.page_id is not None
            self._evictable.remove(page)
            old_id, page.page_id, page.host_id = page.page_id, None, self._shelf.take()
            self._account.moves.store_pages.append(Transfer(old_id, page.host_id))
            page.stored_in = self._account.step
            self._account.num_stored += 1
            page.num_holders = 1
            self._pinned.append(page)
            del self._pages[old_id]
            self.ids.free([old_id])
            if self._scrubs_all:
                self._account.moves.scrub_pages.add(old_id)

    def _make_host_room(self) -> bool:
        shelf = self._shelf
        if not shelf.numbers.num_free:
            page = shelf.evictable.least()
            if page is not None:
                self._lose(page, Cause.HOST_ROOM)
        return bool(shelf.numbers.num_free)

    def _lru_of(self, page: Page) -> SegmentedLru[Page]:
        return self._evictable if page.host_id is None else self._shelf.evictable
