"""Pages and slots with what is cached in them, and what goes with what.

Owns the index, and that nothing stays in it whose pages or states are gone. Knows no chain of
hashes and no policy of what is worth keeping.
"""

from collections.abc import Iterable, Sequence

from stagecoach.cache.host_tier import HostTier
from stagecoach.cache.memory_account import Cause, MemoryAccount
from stagecoach.cache.memory_moves import MemoryMoves
from stagecoach.cache.page_memory import PageMemory
from stagecoach.cache.prefix_index import Checkpoint, Node, Page, PrefixIndex
from stagecoach.cache.slot_memory import SlotMemory


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
        self.host = HostTier(num_host_pages, num_host_slots)
        self.account = account = MemoryAccount()
        self.pages = PageMemory(
            num_pages, self.host.pages, account, self._lose_page, debug_poison=debug_poison
        )
        self.slots = SlotMemory(
            num_slots, self.host.slots, account, self.drop_checkpoint, debug_poison=debug_poison
        )

    def begin_plan(self, step: int) -> None:
        self._unpin_all()
        self.account.step = step

    def finish_plan(self) -> MemoryMoves:
        """The moves since the last call. What was pinned may be evicted by the next plan."""
        account = self.account
        moves = account.finish_moves()
        self._unpin_all()
        account.num_gains += self.slots.is_made_in(account.step)
        account.step += 1
        return moves

    def note_committed(self, step: int) -> None:
        """What steps up to this one made is there on every stage, and may be evicted."""
        self.account.committed_step = max(self.account.committed_step, step)
        self.slots.note_committed()

    def file(
        self, checkpoint: Checkpoint, node: Node, tail: tuple[int, ...], tail_page: Page | None
    ) -> None:
        """Index a checkpoint whose slot is no request's any more."""
        self.index.add_checkpoint(checkpoint, node, tail, tail_page)
        self.slots.note_filed(checkpoint)

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
                self.account.evictions[cause if node is top else below] += 1
                page.node = None
                if is_bad:
                    self._spoil(page, cause)
                self.pages.settle(page)

    def drop_checkpoint(
        self, checkpoint: Checkpoint, cause: Cause, *, is_bad: bool = False
    ) -> None:
        """Unindex it, if it is not yet; its slot is free when nobody has it pinned."""
        if not checkpoint.is_indexed:
            return
        self.account.evictions[cause] += 1
        checkpoint.is_bad |= is_bad
        self.index.remove_checkpoint(checkpoint)
        self.slots.settle(checkpoint)
        if checkpoint.tail_page is not None:
            if is_bad:
                self._spoil(checkpoint.tail_page, cause)
            self.pages.settle(checkpoint.tail_page)

    def scrub(self, page_ids: Iterable[int], slot: int | None) -> None:
        """Clear them before anybody else has them."""
        self.pages.scrub(page_ids)
        if slot is not None:
            self.slots.scrub(slot)

    def check_integrity(self, held_pages: Iterable[Sequence[int]], held_slots: list[int]) -> None:
        """Prove that every number is accounted for once, and the order of eviction exact."""
        self.index.check_integrity()
        cached = [node.page for node in self.index if node.page is not None]
        tails = [c.tail_page for c in self.index.checkpoints() if c.tail_page is not None]
        self.pages.check_integrity(held_pages, [*cached, *tails])
        self.slots.check_integrity(held_slots, self.index.checkpoints())

    def _lose_page(self, page: Page, cause: Cause) -> None:
        """Drop a page that nobody holds from the index, with all that needs it."""
        for checkpoint in tuple(page.tails):
            self.drop_checkpoint(checkpoint, Cause.PAGE)
        if page.node is not None:
            self.remove(page.node, cause)
        else:
            self.account.evictions[cause] += 1

    def _spoil(self, page: Page, cause: Cause) -> None:
        """Never cache a page again, nor what ends in it."""
        page.is_bad = True
        for checkpoint in tuple(page.tails):
            self.drop_checkpoint(checkpoint, cause, is_bad=True)

    def _unpin_all(self) -> None:
        self.slots.end_plan()
        self.pages.end_plan()
        self.host.end_plan()
