"""Debug mode: what the state in every slot is the state of, kept beside it on each worker.

Owns the tags of device and host slots. They follow each plan as the memory does, and nothing
else: so a slot that is read for what it does not hold fails before anything is computed from
it, whoever made the mistake. Pages carry no tags.

    tag       0 ........... position | drafts
              | folded into `prefix` | tokens of the record's rows
"""

from typing import NamedTuple

from stagecoach.cache.memory_moves import MemoryMoves
from stagecoach.cache.prefix_hash import PrefixDigest
from stagecoach.cache.state_slots import ZERO_SLOT
from stagecoach.schedule.step_plan import Segment, StepPlan


class _Tag(NamedTuple):
    """A state and its record."""

    prefix: PrefixDigest  # of the tokens before `position`
    position: int
    drafts: tuple[int, ...] = ()

    def folded(self, num_rows: int) -> "_Tag | None":
        """The state with so many rows of its record folded in; None if it has fewer."""
        if num_rows > len(self.drafts):
            return None
        prefix = self.prefix.extended(self.drafts[:num_rows])
        return _Tag(prefix, self.position + num_rows, self.drafts[num_rows:])

    def __str__(self) -> str:
        return (
            f"the state after {self.position} tokens, digest {self.prefix.digest().hex()}, with "
            f"{len(self.drafts)} drafts recorded"
        )


class SlotTags:
    """Tags of one worker's slots; all but the zero slot hold nothing at first."""

    def __init__(self) -> None:
        self._device = {ZERO_SLOT: _Tag(PrefixDigest(), 0)}
        self._host: dict[int, _Tag] = {}

    def follow(self, plan: StepPlan) -> None:
        """Check what the plan reads, and note what it writes.

        Raises:
            AssertionError: a slot holds another state than the plan takes it for; shows both.
        """
        self._move(plan.moves)
        for item in plan.comparisons:
            one = self._folded(item.slot, item.replay)
            other = self._folded(item.other_slot, item.other_replay)
            is_same = (
                one is not None
                and other is not None
                and one.position == other.position
                and one.prefix.digest() == other.prefix.digest()
            )
            assert is_same, (
                f"not states of one prefix: {item}\n{self._told(item.slot)}\n"
                f"{self._told(item.other_slot)}"
            )
        # All reads before any write, since no segment reads what the plan leaves in a slot.
        for segment, tag in [(segment, self._read(plan, segment)) for segment in plan.segments]:
            self._write(segment, tag)

    def _move(self, moves: MemoryMoves) -> None:
        for item in moves.store_slots:
            assert item.device in self._device, f"{self._told(item.device)}, to be stored: {item}"
            self._host[item.host] = self._device[item.device]
        for slot in moves.scrub_slots:
            self._device.pop(slot, None)
        for item in moves.load_slots:
            assert item.host in self._host, f"host slot {item.host} holds nothing: {item}"
            self._device[item.device] = self._host[item.host]

    def _read(self, plan: StepPlan, segment: Segment) -> _Tag:
        """What the segment finds, before its replay."""
        tag = self._folded(segment.read_slot, segment.replay)
        is_right = (
            tag is not None
            and tag.position == segment.start
            and segment.read_digest in (b"", tag.prefix.digest())
        )
        assert is_right, (
            f"{self._told(segment.read_slot)}; wanted with {segment.replay} of them folded in: "
            f"{segment.start} tokens, digest {segment.read_digest.hex() or 'any'}\n"
            f"{plan.marked(segment)}"
        )
        return self._device[segment.read_slot]

    def _write(self, segment: Segment, found: _Tag) -> None:
        num_certain = segment.certain_end - segment.start
        # The rows that a window folds in are as good as tokens of its own.
        tokens = found.drafts[: segment.replay] + segment.token_ids[:num_certain]
        for save in segment.saves:
            prefix = found.prefix.extended(tokens[: save.position - found.position])
            self._device[save.slot] = _Tag(prefix, save.position)
        self._device[segment.write_slot] = _Tag(
            found.prefix.extended(tokens), segment.certain_end, segment.token_ids[num_certain:]
        )

    def _folded(self, slot: int, replay: int) -> _Tag | None:
        tag = self._device.get(slot)
        return None if tag is None else tag.folded(replay)

    def _told(self, slot: int) -> str:
        return f"slot {slot} holds {self._device.get(slot, 'nothing')}"
