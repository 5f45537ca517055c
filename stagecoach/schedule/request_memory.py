"""What running requests hold by number, and what of it stays behind for others.

Owns the fields of a Request that name pages, a state slot and a sampling row, and what a request
publishes and files as its plans are made. Decides nothing: who gets memory, and from whom it is
taken, is the scheduler's choice; what is evicted for it is the cache's.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagecoach.cache.id_pool import IdPool
from stagecoach.cache.prefix_cache import Checkpoint, Hit, PrefixCache
from stagecoach.cache.prefix_hash import BlockChain, salted_root
from stagecoach.cache.state_slots import NUM_RESERVED_SLOTS, ZERO_SLOT
from stagecoach.request import Request
from stagecoach.schedule.checkpoint_positions import (
    Ladder,
    demanded_position,
    grid_interval,
    hit_limit,
)
from stagecoach.schedule.chunking import pages_for
from stagecoach.schedule.slot_tags import SlotTags
from stagecoach.schedule.step_plan import Save, StepPlan

NO_HIT = Hit(position=0, num_found_tokens=0, num_taken_pages=0, checkpoint=None)


def owner_of(request_id: int, epoch: int) -> int:
    """One admission of a request, as the cache knows it."""
    return request_id << 32 | epoch


class LastState(NamedTuple):
    """The deepest state of a request that its slot holds for certain."""

    position: int  # tokens that it is the fold of
    replay: int  # the last of them, which are in the record only


def last_state(request: Request) -> LastState:
    """What the slot of a request holds when the plans in flight have run.

    A sample in flight leaves the state after all committed tokens, whatever the row; a window
    chained to it, one behind a token that nobody knows, which is not asked for here. Otherwise the
    newest token counts as not forwarded, as it is without drafts: a row that was cut at a
    stop has forwarded it as an accepted draft.
    """
    if request.is_sample_in_flight:
        return LastState(request.num_tokens, 0)
    position = min(request.num_computed, request.num_tokens - 1)
    return LastState(position, request.num_replay - (request.num_computed - position))


def from_scratch(hit: Hit) -> Hit:
    """The same find without its checkpoint."""
    return hit._replace(position=0, num_taken_pages=0, checkpoint=None)


@dataclass(slots=True)
class _Prefix:
    """What the cache needs to know of a request."""

    chain: BlockChain
    ladder: Ladder  # of the present admission
    source: Checkpoint | None = None  # where the present admission began
    suspect: Checkpoint | None = None  # where one began that was not finite

    @property
    def continued(self) -> Checkpoint | None:
        """What it began with, if its prompt goes on behind that: not one asked once more."""
        source = self.source
        return source if source is not None and source.position < self.ladder.prompt_end else None


class RequestMemory:
    """The moves of pages, slots and rows to requests and back.

    Numbers that are freed may be handed out in the very next plan, although plans that use
    them are still in flight: every stage runs plans in the order they were made, so the old
    owner's last access comes before the new owner's first.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        root: bytes,
        num_rows: int,
        block_size: int,
        checkpoint_interval: int,
    ) -> None:
        """`root` and `checkpoint_interval` as in Scheduler."""
        self.cache = cache
        self.rows = IdPool("sampling row", 0, num_rows)
        self._root = root
        self._block_size = block_size
        self._interval = grid_interval(checkpoint_interval, block_size)
        self._prefixes: dict[int, _Prefix] = {}
        self.tags = SlotTags(block_size)

    def begin(self, request: Request) -> None:
        """Get to know a request that holds nothing yet."""
        root = salted_root(self._root, request.cache_salt)
        chain = BlockChain(root, self._block_size, request.token_ids)
        self._prefixes[request.request_id] = _Prefix(chain, self._ladder(request))

    def forget(self, request: Request) -> None:
        """The end of a request that holds nothing any more."""
        del self._prefixes[request.request_id]

    def chain(self, request: Request) -> BlockChain:
        """The hashes of its whole pages."""
        return self._prefixes[request.request_id].chain

    def find(self, request: Request) -> Hit:
        """The deepest checkpoint that an admission of the request could start from."""
        params, prefix = request.params, self._prefixes[request.request_id]
        limit = hit_limit(
            num_tokens=request.num_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            num_prompt_logprobs=(
                None if params.prompt_logprobs is None else len(request.prompt_logprobs)
            ),
            skips_reading=params.skip_reading_prefix_cache or prefix.suspect is not None,
        )
        return self.cache.find(prefix.chain, limit)

    def admit(self, request: Request, hit: Hit) -> None:
        """Give a request its slot, its sampling row and the pages of its hit.

        The other pages come as its tokens are planned.
        """
        is_first = request.num_preemptions == 0
        [request.sampling_row] = self.rows.take(1)
        slot = self._take_slot(hit)
        adopted = self.cache.adopt(
            hit,
            slot,
            is_query=is_first and not request.is_shadow,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        request.page_ids.extend(adopted.page_ids)
        request.read_slot = adopted.read_slot
        request.slot = adopted.read_slot if slot is None else slot
        request.num_computed = hit.position
        request.num_replay = adopted.replay
        if is_first:
            request.num_cached_tokens = hit.position
        prefix = self._prefixes[request.request_id]
        prefix.ladder = self._ladder(request, hit)
        prefix.source = hit.checkpoint
        prefix.chain.num_published = hit.position // self._block_size

    def start_shadow(self, request: Request) -> None:
        """Give a shadow all that it will need; it shares nothing."""
        self.begin(request)
        self.admit(request, NO_HIT)
        self.cover(request, request.num_tokens)

    def check_slots(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        """Prove that each segment reads the state that it needs, and note what it leaves.

        Args:
            requests: of each segment.
        """
        self.tags.run(plan, [self.chain(request) for request in requests])

    def num_open_positions(self, request: Request) -> int:
        """Tokens not computed yet that the request has pages for."""
        return len(request.page_ids) * self._block_size - request.num_computed

    def cover(self, request: Request, end: int) -> None:
        """Take what tokens [0, end) lack in pages; the caller has seen to it that they are free.

        What a window did not use of its pages stays with the request, for the next one.
        """
        num_missing = pages_for(end, self._block_size) - len(request.page_ids)
        if num_missing > 0:
            request.page_ids.extend(self.cache.take_pages(num_missing))

    def file(self, request: Request, end: int, *, is_window: bool) -> tuple[Save, ...]:
        """Publish the pages that tokens [0, end) fill, and file states, as their plan is made.

        Args:
            end: of the segment's certain tokens, which begin at `num_computed`. A page that the
                token of a chained window fills has no name yet: the next segment publishes it.
            is_window: the segment folds what it replays row by row and can keep states there.
        """
        if not request.is_filed:
            return ()
        prefix = self._prefixes[request.request_id]
        owner = owner_of(request.request_id, request.epoch)
        num_known = min(end, request.num_tokens)
        if num_known // self._block_size > prefix.chain.num_published:
            self.cache.publish(prefix.chain, request.page_ids, num_known, owner)
        first = request.num_computed - (request.num_replay if is_window else 0)
        rungs = prefix.ladder.rungs(first, end)
        if not rungs:
            return ()
        assert end == num_known, f"files a state under tokens that nobody knows: {request}"
        saves = []
        for position, claim in rungs:
            slot = self.cache.save(
                prefix.chain,
                request.page_ids,
                position,
                claim,
                owner,
                # Whoever takes a seat next finds a slot, not one that is still to be written.
                num_reserved_slots=self.rows.num_free,
            )
            if slot is not None:
                saves.append(Save(position, slot))
            if position == prefix.ladder.prompt_end:
                self.cache.note_end(prefix.chain, position, prefix.continued)
        return tuple(sorted(saves, key=lambda save: save.position))

    def passes_rung(self, request: Request, end: int) -> bool:
        """Whether a window that ends there would file a state."""
        if not request.is_filed:
            return False
        ladder = self._prefixes[request.request_id].ladder
        return bool(ladder.rungs(request.num_computed - request.num_replay, end))

    def release(self, request: Request) -> None:
        """Free all that a request holds; its last state and the pages up to it stay cached.

        Not so a state behind a token that is still to be sampled: it has no name.
        """
        if request.slot is None:
            return
        is_nameless = request.num_samples_in_flight > 1
        has_state = request.read_slot == request.slot and not is_nameless
        if request.is_filed and has_state:
            chain, owner = self.chain(request), owner_of(request.request_id, request.epoch)
            position, replay = last_state(request)
            self.tags.file(request, position, replay, chain)
            self.cache.publish(chain, request.page_ids, position, owner)
            self.cache.donate(
                chain,
                request.page_ids,
                position,
                request.slot,
                replay,
                owner,
                is_ready=not request.num_plans_in_flight,
            )
            continued = self._prefixes[request.request_id].continued
            self.cache.note_end(chain, position, continued)
        else:
            self.cache.release_slot(request.slot)
        self._give_back(request)

    def discard(self, request: Request) -> None:
        """Free all that a request holds, which may be anything but numbers; nothing stays.

        If it is admitted again it reads nothing and leaves nothing.
        """
        request.is_filed = False
        prefix = self._prefixes[request.request_id]
        prefix.suspect, prefix.source = prefix.source, None
        assert request.slot is not None, f"computed without a slot: {request}"
        self.cache.scrub(request.page_ids, request.slot)
        self.cache.release_slot(request.slot)
        self._give_back(request)

    def has_read(self, request: Request) -> bool:
        """Whether the present admission began with a state that others left."""
        return self._prefixes[request.request_id].source is not None

    def note_finite(self, request: Request) -> None:
        """All committed tokens were computed and are finite.

        If they were not when an earlier admission had read a checkpoint, that one is at fault.
        """
        prefix = self._prefixes[request.request_id]
        if prefix.suspect is not None:
            self.cache.quarantine(prefix.suspect)
            prefix.suspect = None

    def slot_states(self, running: Collection[Request]) -> bytes:
        """One byte a state slot, from slot 1 on: 0 vacant, 1 a request's, 2 a checkpoint's."""
        states = bytearray(self.cache.taken_slots.replace(b"\x01", b"\x02"))
        for request in running:
            assert request.slot is not None, f"runs without a slot: {request}"
            states[request.slot - NUM_RESERVED_SLOTS] = 1
        return bytes(states)

    def check_integrity(self, running: Collection[Request]) -> None:
        """Prove that every page, slot and row is where it must be, and no token without one."""
        self.cache.check_integrity(
            [request.page_ids for request in running],
            [request.slot for request in running if request.slot is not None],
        )
        self.rows.check_integrity(
            [request.sampling_row] for request in running if request.sampling_row is not None
        )
        for request in running:
            is_covered = self.num_open_positions(request) >= 0
            assert is_covered, f"computed tokens without a page: {request}"

    def _take_slot(self, hit: Hit) -> int | None:
        """A slot for a request; None if the last one to be had is that of its own hit."""
        if hit.checkpoint is None:
            return self.cache.take_slot()
        self.cache.pin(hit.checkpoint)
        slot = self.cache.take_slot() if self.cache.can_take_slot() else None
        self.cache.unpin(hit.checkpoint)
        return slot

    def _give_back(self, request: Request) -> None:
        self.cache.release_pages(request.page_ids)
        del request.page_ids[:]
        assert request.sampling_row is not None, f"ran without a row: {request}"
        self.rows.free([request.sampling_row])
        request.slot = request.sampling_row = None
        request.read_slot = ZERO_SLOT

    def _ladder(self, request: Request, hit: Hit | None = None) -> Ladder:
        """The rungs of an admission that starts from `hit`."""
        prompt_end = request.checkpoint_position
        if prompt_end is None:
            prompt_end = request.num_prompt_tokens - 1
        if hit is None:
            return Ladder(self._interval, prompt_end, page_size=self._block_size)
        demand = demanded_position(
            num_found_tokens=hit.num_found_tokens,
            hit=hit.position,
            limit=request.num_tokens - 1,
            block_size=self._block_size,
        )
        return Ladder(self._interval, prompt_end, demand, hit.num_found_tokens, self._block_size)
