"""One stage's memory, simulated without a tensor: what every slot and page row holds.

A KDA state is a fold over all tokens and a cache row is a function of the tokens before it, so
one number, the hash of a token prefix, stands for both: a slot holds the hash of the prefix that
it is the state of and, as its record, the drafts behind it; a page row the hash of the prefix
that ends with its token. A stage folds what the segment replays and asserts that it then stands
exactly before the segment and that every page row up to its end holds the request's own prefix,
whoever wrote it; scrubbed memory holds nothing. What follows the token BAD is not finite.
"""

from collections.abc import Sequence
from typing import NamedTuple

from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.cache.page_pool import NULL_PAGE
from stagecoach.cache.state_slots import ZERO_SLOT
from stagecoach.schedule.step_plan import Segment, StepPlan

VOCAB_SIZE = 13
BAD = VOCAB_SIZE  # never sampled; behind it everything is NaN
EMPTY_PREFIX = 1
NAN = -1


def extend(prefix: int, token_id: int) -> int:
    if token_id == BAD or prefix == NAN:
        return NAN
    return (prefix * 1_000_003 + token_id + 1) % (2**61 - 1)


def prefix_hashes(token_ids: Sequence[int]) -> list[int]:
    """Entry i is the hash of the first i + 1 tokens."""
    hashes, prefix = [], EMPTY_PREFIX
    for token_id in token_ids:
        prefix = extend(prefix, token_id)
        hashes.append(prefix)
    return hashes


class SlotContent(NamedTuple):
    prefix: int  # hash of the tokens that the state is the fold of
    record: tuple[int, ...] = ()  # the drafts behind them


class Stage:
    """One stage's simulated memory. None is NaN: nobody may read it."""

    def __init__(self, memory: MemoryPlan, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[SlotContent | None] = [None] * memory.num_slots
        self.slots[ZERO_SLOT] = SlotContent(EMPTY_PREFIX)
        self.pages: list[list[int | None]] = [[None] * block_size for _ in range(memory.num_pages)]
        self.host_slots: list[SlotContent | None] = [None] * memory.num_host_slots
        self.host_pages = [[None] * block_size for _ in range(memory.num_host_pages)]

    def run(self, plan: StepPlan, histories: Sequence[Sequence[int]]) -> list[list[int]]:
        """Execute the plan; per segment the hash of the prefix that each token ends.

        Args:
            histories: of each segment, all tokens [0, end) of its request.
        """
        self._move(plan)
        for comparison in plan.comparisons:
            states = {
                self._state(comparison.slot, comparison.replay, plan),
                self._state(comparison.other_slot, comparison.other_replay, plan),
            }
            assert len(states) == 1, f"{comparison} differs:\n{plan}"
        inputs = [self._state(segment.read_slot, segment.replay, plan) for segment in plan.segments]
        rows = []
        for segment, history, prefix in zip(plan.segments, histories, inputs, strict=True):
            hashes = prefix_hashes(history)
            self._check_read(plan, segment, hashes, prefix)
            rows.append(self._write(segment, hashes))
        # What a segment reads must not be what a later one of the plan overwrites.
        for segment, history in zip(plan.segments, histories, strict=True):
            self._check_pages(plan, segment, prefix_hashes(history), segment.end)
        return rows

    def _move(self, plan: StepPlan) -> None:
        moves = plan.moves
        for transfer in moves.store_pages:
            self.host_pages[transfer.host] = list(self.pages[transfer.device])
        for transfer in moves.store_slots:
            self.host_slots[transfer.host] = self.slots[transfer.device]
        for page in moves.scrub_pages:
            self.pages[page] = [None] * self.block_size
        for slot in moves.scrub_slots:
            self.slots[slot] = None
        for transfer in moves.load_pages:
            self.pages[transfer.device] = list(self.host_pages[transfer.host])
        for transfer in moves.load_slots:
            self.slots[transfer.device] = self.host_slots[transfer.host]
        for copy in moves.copies:
            rows = self.pages[copy.source][: copy.num_tokens]
            assert None not in rows, f"copies what nobody wrote:\n{plan}"
            self.pages[copy.target][: copy.num_tokens] = rows

    def _state(self, slot: int, replay: int, plan: StepPlan) -> int:
        """The prefix that a slot with some rows replayed is the state of."""
        content = self.slots[slot]
        assert content is not None, f"slot {slot} is poisoned:\n{plan}"
        assert replay <= len(content.record), f"slot {slot} has no such record:\n{plan}"
        prefix = content.prefix
        for token_id in content.record[:replay]:
            prefix = extend(prefix, token_id)
        return prefix

    def _check_read(self, plan: StepPlan, segment: Segment, hashes: list[int], prefix: int) -> None:
        expected = hashes[segment.start - 1] if segment.start else EMPTY_PREFIX
        assert prefix == expected, f"the state of other tokens:\n{plan.marked(segment)}"
        pages = segment.page_ids
        assert NULL_PAGE not in pages and len(set(pages)) == len(pages), plan.marked(segment)
        self._check_pages(plan, segment, hashes, segment.start)

    def _check_pages(self, plan: StepPlan, segment: Segment, hashes: list[int], end: int) -> None:
        for position, expected in enumerate(hashes[:end]):
            page, row = divmod(position, self.block_size)
            assert self.pages[segment.page_ids[page]][row] == expected, (
                f"wrong cache row at {position}:\n{plan.marked(segment)}"
            )

    def _write(self, segment: Segment, hashes: list[int]) -> list[int]:
        for position in range(segment.start, segment.end):
            page, row = divmod(position, self.block_size)
            self.pages[segment.page_ids[page]][row] = hashes[position]
        for save in segment.saves:
            self.slots[save.slot] = SlotContent(hashes[save.position - 1])
        self.slots[segment.write_slot] = SlotContent(
            hashes[segment.certain_end - 1],
            segment.token_ids[segment.num_tokens - segment.num_draft_tokens :],
        )
        return hashes[segment.start :]
