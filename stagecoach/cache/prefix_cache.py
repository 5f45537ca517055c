"""What is kept of prompts and answers for requests to come: the one door to the cache.

Owns what is filed, published, found and adopted, and the counts of it. Knows tokens by the hashes
of their chain, requests by a number, and no tensor. A checkpoint is filed when the plan that makes
its state is made: stages run plans in order, so any later plan may read it.

    tokens     0 ...... block ...... block ...... p ...... block
    pages      | shared by count    | tail: copied|
    state      read from the checkpoint at p, ---> own slot from there
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from stagecoach.cache.cache_memory import CacheMemory
from stagecoach.cache.cache_stats import CacheCounts, PrefixCacheStats
from stagecoach.cache.memory_account import Cause
from stagecoach.cache.memory_moves import MemoryMoves
from stagecoach.cache.prefix_hash import BlockChain
from stagecoach.cache.prefix_index import Checkpoint, Node, Page
from stagecoach.cache.published_pages import PublishedPages
from stagecoach.cache.slot_memory import Claim
from stagecoach.cache.state_slots import ZERO_SLOT

__all__ = ["Adopted", "Checkpoint", "Claim", "Hit", "PrefixCache"]


class Hit(NamedTuple):
    """Where a request could go on from. It holds nothing: adopt it, or ask again.

    Taking pages or a slot in between may evict what was found; pin the checkpoint for that.
    """

    position: int  # 0: nothing was found
    num_found_tokens: int  # from the first on, whose pages are there; at least `position`
    num_taken_pages: int  # by how much adopting lowers `num_free_pages`, for this plan
    checkpoint: Checkpoint | None


class Adopted(NamedTuple):
    """What a request has got from a hit: the pages of tokens [0, position), and its first read."""

    page_ids: list[int]
    read_slot: int
    replay: int


class _Place(NamedTuple):
    """Where a checkpoint belongs."""

    node: Node | None  # None: a root that is not there yet
    tail: tuple[int, ...]
    tail_page: Page | None


class PrefixCache:
    """Pages and slots of an engine, those of running requests and those that are only cached."""

    def __init__(
        self,
        *,
        num_pages: int,
        num_slots: int,
        block_size: int,
        num_host_pages: int = 0,
        num_host_slots: int = 0,
        is_enabled: bool = True,
        debug_poison: bool = False,
    ) -> None:
        """`num_pages` and `num_slots` count the reserved page 0 and slot 0.

        Args:
            is_enabled: False: nothing is ever cached; pages and slots are handed out as ever.
            debug_poison: all memory that is freed is listed to be scrubbed.
        """
        self._block_size = block_size
        self._is_enabled = is_enabled
        self._memory = CacheMemory(
            num_pages=num_pages,
            num_slots=num_slots,
            num_host_pages=num_host_pages,
            num_host_slots=num_host_slots,
            block_size=block_size,
            debug_poison=debug_poison,
        )
        self._published = PublishedPages(self._memory.index, self._memory.pages)
        self._counts = CacheCounts()

    @property
    def is_enabled(self) -> bool:
        return self._is_enabled

    @property
    def num_pages(self) -> int:
        """Pages that can be handed out: all but the null page."""
        return self._memory.pages.ids.num_total

    @property
    def num_free_pages(self) -> int:
        """Pages that can be handed out now: vacant, or cached and held by nobody."""
        return self._memory.pages.num_free

    @property
    def num_slots(self) -> int:
        """Slots that can be handed out: all but the zero slot."""
        return self._memory.slots.ids.num_total

    @property
    def num_free_slots(self) -> int:
        """Slots that can be handed out now: vacant, or of checkpoints that can be evicted."""
        return self._memory.slots.num_free

    @property
    def taken_slots(self) -> bytes:
        """One byte a slot, from the first behind the zero slot: 1 where it is not vacant."""
        return self._memory.slots.ids.taken

    @property
    def num_gains(self) -> int:
        """Grows with what may make room: while it stands still, who found none finds none."""
        return self._memory.account.num_gains

    def begin_plan(self, step: int) -> None:
        """Entries made from here to `take_moves` are made by this step."""
        self._memory.begin_plan(step)

    def take_moves(self) -> MemoryMoves:
        """What the plan moves and clears before it computes; ends the making of the plan."""
        moves = self._memory.finish_plan()
        self._published.replace_duplicates()
        return moves

    def note_committed(self, step: int) -> None:
        """The results of all steps up to this one are here."""
        self._memory.note_committed(step)

    def take_pages(self, count: int) -> list[int]:
        """Pages for a request, evicting as needed; the caller looked at `num_free_pages`."""
        return [self._memory.pages.take() for _ in range(count)]

    def release_pages(self, page_ids: Sequence[int]) -> None:
        """Give up one hold of each page of a table; its tail is evicted first."""
        for page_id in reversed(page_ids):
            self._memory.pages.unhold(self._memory.pages.get(page_id))

    def num_exclusive_pages(self, page_ids: Iterable[int]) -> int:
        """How many of them become free if they are released, each as often as it is listed."""
        return sum(
            self._memory.pages.get(page_id).num_holders == count
            for page_id, count in Counter(page_ids).items()
        )

    def can_take_slot(self) -> bool:
        return self._memory.slots.num_free > 0

    def take_slot(self) -> int:
        """A slot for a request; the caller asked `can_take_slot`."""
        slot = self._memory.slots.take(Claim.ANY)
        assert slot is not None, "no slot is free: the caller did not look"
        return slot

    def release_slot(self, slot: int) -> None:
        """Free a request's slot; `donate` keeps what is in it."""
        self._memory.slots.free(slot)

    def find(self, chain: BlockChain, limit: int) -> Hit:
        """The deepest checkpoint at or before `limit` tokens whose pages are all there."""
        if not self._is_enabled or limit <= 0:
            return Hit(0, 0, 0, None)
        checkpoint, num_blocks = self._memory.index.match(chain, limit, self._memory.account.step)
        num_found = num_blocks * self._block_size
        if checkpoint is None:
            return Hit(0, num_found, 0, None)
        position = checkpoint.position
        return Hit(position, max(num_found, position), _num_taken_pages(checkpoint), checkpoint)

    def adopt(
        self, hit: Hit, slot: int | None, *, is_query: bool, num_prompt_tokens: int
    ) -> Adopted:
        """Hold a hit's pages for a request; what it reads is not evicted in this plan.

        Args:
            slot: the request's own, which it has already; a checkpoint of the host tier is
                loaded straight into it. None: it gets the checkpoint's, which can be evicted
                and so is gone.
            is_query: a request's first admission, not one after a preemption.
            num_prompt_tokens: of the request, for the counts.

        Returns:
            Pages of all tokens before the hit's position, the last one a copy if it is partly
            filled. Nothing, and the zero slot, for a hit of nothing.
        """
        self._counts.num_lost_tokens += hit.num_found_tokens - hit.position
        if is_query:
            self._counts.note_query(hit.position, num_prompt_tokens)
        else:
            self._counts.num_resumed_tokens += hit.position
        checkpoint = hit.checkpoint
        if checkpoint is None:
            return Adopted([], ZERO_SLOT, 0)
        assert checkpoint.is_indexed, f"dropped since it was found: position {hit.position}"
        memory, tail_page = self._memory, checkpoint.tail_page
        memory.slots.pin_for_plan(checkpoint)
        checkpoint.is_protected = True
        checkpoint.num_hits += 1
        pages = checkpoint.full_pages()
        # All of it is held before any page is taken, since taking evicts.
        for page in pages:
            memory.pages.hold(page)
            page.is_protected = True
        if tail_page is not None:
            memory.pages.pin(tail_page)
            tail_page.is_protected = True
        page_ids = [memory.pages.bring(page) for page in pages]
        if tail_page is not None:
            page_ids.append(memory.pages.copy(tail_page, len(checkpoint.tail)))
        if slot is None:
            read_slot = memory.slots.take_over(checkpoint)
        elif checkpoint.slot is None:
            memory.slots.load(checkpoint, slot)
            read_slot = slot
        else:
            read_slot = checkpoint.slot
        return Adopted(page_ids, read_slot, checkpoint.replay)

    def publish(self, chain: BlockChain, page_ids: Sequence[int], end: int, owner: int) -> None:
        """Index a request's full pages of tokens [0, end), which are certain and committed.

        Where the index has a page of the same tokens already it keeps it, unless nobody holds
        it: then the request's takes its place when the plan is finished.

        Args:
            page_ids: the request's page table.
            owner: the admission that computed them, for `withdraw`.
        """
        if self._is_enabled:
            self._published.publish(chain, page_ids, end // self._block_size, owner)

    def save(
        self,
        chain: BlockChain,
        page_ids: Sequence[int],
        position: int,
        claim: Claim,
        owner: int,
        *,
        num_reserved_slots: int = 0,
    ) -> int | None:
        """File a checkpoint that the plan being made leaves: the state after `position` tokens.

        The request's full pages before it are published.

        Args:
            num_reserved_slots: that must still be free afterwards, for requests to come.

        Returns:
            The slot for the state; None if it is filed already or no slot may be had.
        """
        if not self._is_enabled:
            return None
        if self._is_filed(chain, position, owner):
            return None
        place = self._place(chain, page_ids, position)
        slot = None
        if place is not None and self._memory.slots.num_free > num_reserved_slots:
            slot = self._memory.slots.take(claim)
        if place is None or slot is None:
            self._counts.num_unfiled += 1
            return None
        checkpoint = Checkpoint(
            position, slot, replay=0, step=self._memory.account.step, owner=owner
        )
        self._file(chain, place, checkpoint)
        # It is written by this plan: nobody else may have the slot in it.
        self._memory.slots.pin_for_plan(checkpoint)
        return slot

    def donate(
        self,
        chain: BlockChain,
        page_ids: Sequence[int],
        position: int,
        slot: int,
        replay: int,
        owner: int,
        *,
        is_ready: bool = False,
    ) -> None:
        """Take over the slot of a request that ends or is preempted, as a checkpoint if it can be.

        Args:
            position: tokens that the state stands for, with `replay` rows of its record.
            is_ready: no plan in flight writes the slot.
        """
        place = None
        if self._is_enabled and position and not self._is_filed(chain, position, owner):
            place = self._place(chain, page_ids, position)
        if place is None or self._memory.slots.is_bad(slot):
            self._memory.slots.free(slot)
            return
        step = self._memory.account.step - 1
        if is_ready:
            step = min(step, self._memory.account.committed_step)
        checkpoint = Checkpoint(position, slot, replay=replay, step=step, owner=owner)
        self._file(chain, place, checkpoint)

    def note_end(self, chain: BlockChain, position: int, source: Checkpoint | None) -> None:
        """A conversation may go on from the checkpoint at `position`, if one is filed there.

        If it came from another end, which served nobody else, the new one takes over that one's
        standing: the end of a conversation that goes on is as safe as what is shared, and
        those that it has left behind are evicted first.

        Args:
            source: what the request that leaves this end had begun with.
        """
        node = self._memory.index.get(chain.hash_after(position // self._block_size))
        checkpoint = None if node is None else node.checkpoints.get(chain.tail(position))
        if checkpoint is None:
            return
        checkpoint.is_end = True
        if source is None or source is checkpoint or not (source.is_end and source.num_hits == 1):
            return
        self._memory.slots.touch(checkpoint)
        for page in [*checkpoint.full_pages(), checkpoint.tail_page]:
            if page is not None and page.num_holders:
                page.is_protected = True
        if source.is_indexed:
            self._memory.slots.demote(source)

    def withdraw(self, owner: int) -> None:
        """What an admission computed is not finite: drop all it published or filed.

        With it goes all that lies behind it. It is cleared when it is freed.
        """
        memory = self._memory
        for node in [node for node in memory.index if node.owner == owner]:
            if memory.index.get(node.name) is node:
                memory.remove(node, Cause.NOT_FINITE, is_bad=True)
        for checkpoint in [c for c in memory.index.checkpoints() if c.owner == owner]:
            memory.drop_checkpoint(checkpoint, Cause.NOT_FINITE, is_bad=True)

    def quarantine(self, checkpoint: Checkpoint) -> None:
        """A checkpoint proved wrong: drop it and all that begins with its first page.

        Which of its pages is wrong is not known, so none may be cached again, nor what follows.
        """
        node = checkpoint.node
        if node is None:
            return
        self._memory.drop_checkpoint(checkpoint, Cause.QUARANTINE, is_bad=True)
        if node.parent is None:
            return
        while node.parent is not None and node.parent.parent is not None:
            node = node.parent
        self._memory.remove(node, Cause.QUARANTINE, is_bad=True)

    def reset(self) -> None:
        """Forget all entries. What requests hold stays with them until they release it."""
        for root in [node for node in self._memory.index if node.parent is None]:
            self._memory.remove(root, Cause.RESET)

    def scrub(self, page_ids: Iterable[int], slot: int | None) -> None:
        """Clear a request's memory before anybody else has it, and file nothing of it."""
        self._memory.scrub(page_ids, slot)

    def pin(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint's slot as it is, over any number of plans, until `unpin`."""
        self._memory.slots.pin(checkpoint)

    def bring_back(self, checkpoint: Checkpoint) -> bool:
        """Have a pinned checkpoint on the device; False if it is not and no slot may be had."""
        return checkpoint.slot is not None or self._memory.slots.bring(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        self._memory.slots.unpin(checkpoint)

    def stats(self) -> PrefixCacheStats:
        """Counts so far. Bytes and verifications are others' to add."""
        memory = self._memory
        num_checkpoints = sum(c.slot is not None for c in memory.index.checkpoints())
        return PrefixCacheStats(
            **asdict(self._counts),
            evictions={cause.value: count for cause, count in memory.account.evictions.items()},
            num_checkpoints=num_checkpoints,
            num_cached_pages=memory.pages.num_cached,
            num_host_checkpoints=memory.host.slots.num_used,
            num_host_pages=memory.host.pages.num_used,
            num_stored=memory.account.num_stored,
            num_loaded=memory.account.num_loaded,
        )

    def check_integrity(
        self, held_pages: Iterable[Sequence[int]], held_slots: Iterable[int]
    ) -> None:
        """Prove that vacant + held + cached = total, on both tiers, and every link and count.

        Args:
            held_pages: the page table of each request.
            held_slots: the slots of requests.

        Raises:
            AssertionError: names what is lost, or held twice, or counted wrongly.
        """
        self._memory.check_integrity(held_pages, list(held_slots))

    def _is_filed(self, chain: BlockChain, position: int, owner: int) -> bool:
        """Whether there is a checkpoint of that prefix; another request's wish makes it last."""
        node = self._memory.index.get(chain.hash_after(position // self._block_size))
        checkpoint = None if node is None else node.checkpoints.get(chain.tail(position))
        if checkpoint is None:
            return False
        if checkpoint.owner != owner:
            self._memory.slots.touch(checkpoint)
        return True

    def _place(self, chain: BlockChain, page_ids: Sequence[int], position: int) -> _Place | None:
        """Where a checkpoint goes; None if its pages are not in the index, or must not be."""
        num_blocks, num_rows = divmod(position, self._block_size)
        node = self._memory.index.get(chain.hash_after(num_blocks))
        if node is None and num_blocks:
            return None
        if not num_rows:
            return _Place(node, (), None)
        tail_page = self._memory.pages.get(page_ids[num_blocks])
        return None if tail_page.is_bad else _Place(node, chain.tail(position), tail_page)

    def _file(self, chain: BlockChain, place: _Place, checkpoint: Checkpoint) -> None:
        # An eviction since may have pruned a root.
        num_blocks = checkpoint.position // self._block_size
        index = self._memory.index
        node = index.root(chain.hash_after(0)) if not num_blocks else place.node
        assert node is not None, f"no place for position {checkpoint.position}"
        self._memory.file(checkpoint, node, place.tail, place.tail_page)
        self._counts.num_filed += 1


def _num_taken_pages(checkpoint: Checkpoint) -> int:
    pages = checkpoint.full_pages()
    num_taken = sum(page.host_id is not None or not page.num_holders for page in pages)
    tail_page = checkpoint.tail_page
    if tail_page is None:
        return num_taken
    # A fresh page for the copy; and the source is pinned for as long as the plan is made.
    return num_taken + 1 + (tail_page.host_id is None and not tail_page.num_holders)
