"""Slots and the checkpoints in them: taken, filed, pinned, evicted, moved.

Owns the numbers of slots on both tiers and the order in which checkpoints are evicted. Every slot
is vacant, a request's, or a checkpoint's. What the index loses with a checkpoint is
`cache_memory.py`'s to say.
"""

from collections.abc import Callable, Iterable
from enum import Enum

from stagecoach.cache.host_tier import HostShelf
from stagecoach.cache.memory_account import Cause, MemoryAccount
from stagecoach.cache.memory_moves import Transfer
from stagecoach.cache.prefix_index import Checkpoint
from stagecoach.cache.segmented_lru import SegmentedLru
from stagecoach.cache.state_slots import StateSlots


class Claim(Enum):
    """What may be evicted for a slot, beside what is vacant."""

    VACANT = "vacant"  # nothing
    PROBATION = "probation"  # a checkpoint that was never hit
    ANY = "any"  # any checkpoint, those never hit first


class SlotMemory:
    """Where every slot is."""

    def __init__(
        self,
        num_slots: int,
        shelf: HostShelf[Checkpoint],
        account: MemoryAccount,
        drop: Callable[[Checkpoint, Cause], None],
        *,
        debug_poison: bool,
    ) -> None:
        """Take over all slots.

        Args:
            num_slots: counts the zero slot.
            shelf: of the host tier.
            drop: unindexes a checkpoint, and settles it.
            debug_poison: every slot that is freed is listed to be scrubbed.
        """
        self.ids = StateSlots(num_slots)
        self._shelf = shelf
        self._account = account
        self._drop = drop
        self._scrubs_all = debug_poison
        self._evictable: SegmentedLru[Checkpoint] = SegmentedLru(self.ids.num_total)
        self._uncommitted: dict[int, list[Checkpoint]] = {}  # by the step that makes them
        self._pinned: set[Checkpoint] = set()  # by anybody
        self._pinned_for_plan: list[Checkpoint] = []
        self._bad_slots: set[int] = set()  # of requests; cleared when freed

    @property
    def num_free(self) -> int:
        return self.ids.num_free + len(self._evictable)

    def take(self, claim: Claim) -> int | None:
        """A slot, or None if nothing that the claim allows can be evicted for it."""
        if not self.ids.num_free:
            if claim is Claim.VACANT:
                return None
            in_probation = claim is Claim.PROBATION
            checkpoint = self._evictable.least(in_probation=in_probation)
            if checkpoint is None:
                return None
            self._evict(checkpoint)
        [slot] = self.ids.take(1)
        return slot

    def free(self, slot: int, *, is_bad: bool = False) -> None:
        self._account.num_gains += 1
        self.ids.free([slot])
        if self._scrubs_all or is_bad or slot in self._bad_slots:
            self._account.moves.scrub_slots.add(slot)
        self._bad_slots.discard(slot)

    def is_bad(self, slot: int) -> bool:
        return slot in self._bad_slots

    def pin(self, checkpoint: Checkpoint) -> None:
        """Keep its slot, and its place unless it proves wrong, until `unpin`."""
        lru = self._lru_of(checkpoint)
        if checkpoint in lru:
            lru.remove(checkpoint)
        checkpoint.num_pins += 1
        self._pinned.add(checkpoint)

    def pin_for_plan(self, checkpoint: Checkpoint) -> None:
        self.pin(checkpoint)
        self._pinned_for_plan.append(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.num_pins, f"unpinned too often: position {checkpoint.position}"
        checkpoint.num_pins -= 1
        if not checkpoint.num_pins:
            self._pinned.remove(checkpoint)
        self.settle(checkpoint)

    def touch(self, checkpoint: Checkpoint) -> None:
        """It is wanted again: among the last to be evicted from now on."""
        lru = self._lru_of(checkpoint)
        is_evictable = checkpoint in lru
        if is_evictable:
            lru.remove(checkpoint)
        checkpoint.is_protected = True
        if is_evictable:
            lru.add(checkpoint)

    def demote(self, checkpoint: Checkpoint) -> None:
        """Nobody is expected to want it again: the next to be evicted."""
        lru = self._lru_of(checkpoint)
        if checkpoint in lru:
            lru.demote(checkpoint)
        checkpoint.is_protected = False

    def settle(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint that is not pinned in the order of eviction, or free its slot."""
        lru = self._lru_of(checkpoint)
        if checkpoint.num_pins:
            return
        if checkpoint.is_indexed:
            if checkpoint.step <= self._account.committed_step and checkpoint not in lru:
                self._account.num_gains += 1
                lru.add(checkpoint)
            return
        if checkpoint in lru:
            lru.remove(checkpoint)
        if checkpoint.slot is not None:
            self.free(checkpoint.slot, is_bad=checkpoint.is_bad)
            checkpoint.slot = None
        elif checkpoint.host_slot is not None:
            self._shelf.free(checkpoint.host_slot)
            checkpoint.host_slot = None

    def load(self, checkpoint: Checkpoint, slot: int) -> None:
        """Copy a checkpoint of the host tier into a request's slot; it stays there as well."""
        assert checkpoint.host_slot is not None, f"not on the host: {checkpoint.position}"
        self._account.moves.load_slots.append(Transfer(slot, checkpoint.host_slot))
        self._account.num_loaded += 1

    def take_over(self, checkpoint: Checkpoint) -> int:
        """Evict a checkpoint and hand its slot, as it is, to the request that has it pinned."""
        slot = checkpoint.slot
        assert slot is not None and checkpoint.num_pins == 1, f"not for one alone: {checkpoint}"
        checkpoint.slot = None
        self._drop(checkpoint, Cause.ROOM)
        return slot

    def bring(self, checkpoint: Checkpoint) -> bool:
        """Move a pinned checkpoint of the host tier to the device; False if no slot may be had."""
        assert checkpoint.num_pins, f"evicted on its way: position {checkpoint.position}"
        slot = self.take(Claim.ANY)
        if slot is None:
            return False
        self.load(checkpoint, slot)
        assert checkpoint.host_slot is not None, "it was there"
        self._shelf.free_after_plan(checkpoint.host_slot)
        checkpoint.slot, checkpoint.host_slot = slot, None
        return True

    def note_filed(self, checkpoint: Checkpoint) -> None:
        """It is in the index: it may be evicted once the step that makes it is committed."""
        if checkpoint.step > self._account.committed_step:
            self._uncommitted.setdefault(checkpoint.step, []).append(checkpoint)
        else:
            self.settle(checkpoint)

    def end_plan(self) -> None:
        """Nothing is pinned for the plan any more."""
        checkpoints, self._pinned_for_plan = self._pinned_for_plan, []
        for checkpoint in checkpoints:
            self.unpin(checkpoint)

    def is_made_in(self, step: int) -> bool:
        """Whether a step that is not committed leaves a checkpoint."""
        return step in self._uncommitted

    def note_committed(self) -> None:
        """What steps up to the account's committed one made may be evicted."""
        step = self._account.committed_step
        for made_by in [made_by for made_by in self._uncommitted if made_by <= step]:
            for checkpoint in self._uncommitted.pop(made_by):
                self.settle(checkpoint)

    def scrub(self, slot: int) -> None:
        """Clear a slot before anybody else has it: now if it is vacant, else when freed."""
        if self.ids.is_free(slot):
            self._account.moves.scrub_slots.add(slot)
        else:
            self._bad_slots.add(slot)

    def check_integrity(self, held: list[int], indexed: Iterable[Checkpoint]) -> None:
        """Prove that every number is accounted for once, and the order of eviction exact.

        Checkpoints that were dropped while pinned still have their slots.

        Args:
            held: the slots of requests.
            indexed: all checkpoints of the index.
        """
        checkpoints = {*indexed, *self._pinned}
        slots = [c.slot for c in checkpoints if c.slot is not None]
        host_slots = [c.host_slot for c in checkpoints if c.host_slot is not None]
        self.ids.check_integrity([slots, held])
        self._shelf.check_integrity(host_slots)
        committed_step = self._account.committed_step
        evictable = [c for c in checkpoints if not c.num_pins and c.step <= committed_step]
        num_evictable = len(self._evictable) + len(self._shelf.evictable)
        assert num_evictable == len(evictable), "a checkpoint in the queue that is not there"
        assert all(c in self._lru_of(c) for c in evictable), "one not in the queue"

    def _evict(self, checkpoint: Checkpoint) -> None:
        """Make its slot vacant: the checkpoint moves to the host tier, or is lost."""
        if not self._make_host_room():
            self._drop(checkpoint, Cause.ROOM)
            return
        slot = checkpoint.slot
        assert slot is not None, f"on the host already: {checkpoint.position}"
        self._evictable.remove(checkpoint)
        checkpoint.slot, checkpoint.host_slot = None, self._shelf.take()
        checkpoint.stored_in = self._account.step
        self._account.moves.store_slots.append(Transfer(slot, checkpoint.host_slot))
        self._account.num_stored += 1
        self.pin_for_plan(checkpoint)
        self.free(slot)

    def _make_host_room(self) -> bool:
        shelf = self._shelf
        if not shelf.numbers.num_free:
            checkpoint = shelf.evictable.least()
            if checkpoint is not None:
                self._drop(checkpoint, Cause.HOST_ROOM)
        return bool(shelf.numbers.num_free)

    def _lru_of(self, checkpoint: Checkpoint) -> SegmentedLru[Checkpoint]:
        is_on_device = checkpoint.host_slot is None
        return self._evictable if is_on_device else self._shelf.evictable
