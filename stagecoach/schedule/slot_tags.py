"""What every state slot holds: of which tokens, how many, and whose.

Owns a tag for each slot and host slot, and checks every read of a plan against them when the plan
is made: a state is read at its own position, by the request that left it or by one whose tokens
it was filed under. Knows no tensor and no cache; workers prove the same of their memory in debug
mode. A tag is looked at once a segment, however long the request is.

    tag       | position tokens | num_recorded rows |
    segment   ......... position + replay == start  | token_ids ...
"""

from collections.abc import Sequence
from typing import NamedTuple

from stagecoach.cache.memory_moves import NO_MOVES, MemoryMoves
from stagecoach.cache.prefix_hash import BlockChain
from stagecoach.cache.state_slots import ZERO_SLOT
from stagecoach.request import Request
from stagecoach.schedule.step_plan import Comparison, Segment, StepPlan


class Admission(NamedTuple):
    """One admission of a request: the only reader of a slot that is not filed."""

    request_id: int
    epoch: int

    def __str__(self) -> str:
        return f"request {self.request_id}.{self.epoch}"


class Prefix(NamedTuple):
    """The tokens that a state was filed under, salt and model included."""

    block_hash: bytes  # of the whole blocks
    tail: tuple[int, ...]  # the tokens behind them

    def __str__(self) -> str:
        return f"prefix {self.block_hash.hex()[:16] or '-'} and {len(self.tail)} tokens"


class SlotTag(NamedTuple):
    """What a slot holds once all plans made so far have run."""

    position: int  # the state is that after so many tokens
    num_recorded: int  # rows of its record that may be replayed
    identity: Admission | Prefix

    def stands_at(self, start: int, replay: int) -> bool:
        """Whether the state after `start` tokens is there with `replay` rows of the record."""
        return self.position + replay == start and replay <= self.num_recorded

    def __str__(self) -> str:
        record = f" and {self.num_recorded} recorded rows" if self.num_recorded else ""
        return f"the state after {self.position} tokens{record} of {self.identity}"


class SlotTags:
    """The tags of all slots. Raises AssertionError at the first read that is not what it says."""

    def __init__(self, block_size: int) -> None:
        self._slots: dict[int, SlotTag] = {}  # without those that hold nothing
        self._host_slots: dict[int, SlotTag] = {}
        self._block_size = block_size

    def run(self, plan: StepPlan, chains: Sequence[BlockChain]) -> None:
        """Check all that the plan reads, then tag all that it writes, as the workers will run it.

        Args:
            chains: of the request of each segment, in the plan's order.
        """
        if plan.moves is not NO_MOVES:
            self._move(plan.moves, plan)
        for comparison in plan.comparisons:
            self._check_comparison(comparison, plan)
        slots = self._slots
        # No segment reads what another one writes or saves, so the order does not matter.
        for segment, chain in zip(plan.segments, chains, strict=True):
            owner = Admission(segment.request_id, segment.epoch)
            read_slot, start, num_drafts = (
                segment.read_slot,
                segment.start,
                segment.num_draft_tokens,
            )
            if read_slot != ZERO_SLOT:
                tag = slots.get(read_slot)
                # Nearly always a request reads what it has left itself.
                if tag is None or tag.identity != owner or not tag.stands_at(start, segment.replay):
                    self._check_read(segment, owner, chain, plan)
            for save in segment.saves:
                prefix = self._prefix(chain, save.position)
                slots[save.slot] = SlotTag(save.position, 0, prefix)
            certain_end = start + segment.num_tokens - num_drafts
            slots[segment.write_slot] = SlotTag(certain_end, num_drafts, owner)

    def file(self, request: Request, position: int, replay: int, chain: BlockChain) -> None:
        """The slot of a request becomes a checkpoint: it stands for `position` tokens.

        Args:
            replay: rows of its record among them.
        """
        slot, owner = request.slot, Admission(request.request_id, request.epoch)
        assert slot is not None, f"files a slot and has none: {request}"
        tag = self._slots.get(slot)
        wanted = f"slot {slot} is filed as {position - replay} tokens and {replay} rows of {owner}"
        assert tag is not None, f"{wanted}; it holds nothing"
        is_there = tag.position + replay == position and replay <= tag.num_recorded
        assert tag.identity == owner and is_there, f"{wanted}; it holds {tag}"
        self._slots[slot] = SlotTag(tag.position, replay, self._prefix(chain, position))

    def tag(self, slot: int) -> SlotTag | None:
        """What the slot holds; None: nothing that anybody may read."""
        return self._slots.get(slot)

    def _prefix(self, chain: BlockChain, position: int) -> Prefix:
        return Prefix(chain.hash_after(position // self._block_size), chain.tail(position))

    def _move(self, moves: MemoryMoves, plan: StepPlan) -> None:
        for transfer in moves.store_slots:
            tag = self._slots.get(transfer.device)
            assert tag is not None and isinstance(tag.identity, Prefix), (
                f"step {plan.step}: slot {transfer.device} goes to the host and is no checkpoint: "
                f"it holds {tag or 'nothing'}"
            )
            self._host_slots[transfer.host] = tag
        for slot in moves.scrub_slots:
            self._slots.pop(slot, None)
        for transfer in moves.load_slots:
            tag = self._host_slots.get(transfer.host)
            assert tag is not None, f"step {plan.step}: host slot {transfer.host} holds nothing"
            self._slots[transfer.device] = tag

    def _check_comparison(self, comparison: Comparison, plan: StepPlan) -> None:
        sides = (
            (comparison.slot, comparison.replay),
            (comparison.other_slot, comparison.other_replay),
        )
        ends = set()
        for slot, replay in sides:
            tag = self._slots.get(slot)
            assert tag is not None and replay <= tag.num_recorded, (
                f"step {plan.step}: slot {slot} is compared with {replay} rows replayed; it holds "
                f"{tag or 'nothing'}"
            )
            ends.add(tag.position + replay)
        assert len(ends) == 1, f"step {plan.step}: {comparison} compares states after {ends} tokens"

    def _check_read(
        self, segment: Segment, owner: Admission, chain: BlockChain, plan: StepPlan
    ) -> None:
        tag = self._slots.get(segment.read_slot)
        identity: Admission | Prefix = owner
        if tag is not None:
            if isinstance(tag.identity, Prefix):
                identity = self._prefix(chain, segment.start)
            if tag.stands_at(segment.start, segment.replay) and tag.identity == identity:
                return
        raise AssertionError(
            f"step {plan.step}: slot {segment.read_slot} holds {tag or 'nothing'}; wanted is the "
            f"state after {segment.start - segment.replay} tokens and {segment.replay} recorded "
            f"rows of {identity}:\n{plan.marked(segment)}"
        )
