"""Known kinds of bugs, planted into the real engine one at a time.

Each is a few lines put over the code that owns the matter, as somebody might have written them.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from stagecoach.cache.memory_moves import MemoryMoves
from stagecoach.cache.page_memory import PageMemory
from stagecoach.cache.prefix_cache import PrefixCache
from stagecoach.cache.prefix_hash import BlockChain
from stagecoach.cache.slot_memory import SlotMemory
from stagecoach.engine import token_masks
from stagecoach.fuzz import drafts
from stagecoach.fuzz.drafts import Knowledge
from stagecoach.kernels.short_conv import reference as short_conv
from stagecoach.model.stage_memory import KdaMemory
from stagecoach.runner import last_stage, memory_moves, stage_runner, step_inputs
from stagecoach.runner.last_stage import LastStage
from stagecoach.runner.memory_moves import MovablePools
from stagecoach.runner.newest_tokens import NewestTokens
from stagecoach.schedule import checkpoint_positions, request_memory
from stagecoach.schedule.scheduler import Scheduler
from stagecoach.schedule.slot_tags import SlotTags
from stagecoach.schedule.step_plan import Segment

Plant = Callable[[pytest.MonkeyPatch], None]
# One slot: what a request leaves in it goes to the host when the next one comes.
HOST = MappingProxyType(
    {
        "kv_offloading_size": 0.0001,
        "max_num_seqs": 1,
        "max_state_checkpoints": 0,
        "state_checkpoint_interval": 0,
    }
)


class Mutation(NamedTuple):
    """A bug, and how it is planted."""

    name: str
    what: str
    plant: Plant
    options: Mapping[str, Any] = MappingProxyType(
        {}
    )  # engine options that are fixed, so that it matters
    drafts: bool = False  # speculation is on in every schedule
    grammars: bool = False  # some requests obey one


def each_group(change: Callable[[Any], Any]) -> Plant:
    """Workers see other numbers than the plan's."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        build = stage_runner.build_step_tensors

        def changed(*arguments: Any) -> Any:
            step = build(*arguments)
            return step._replace(
                windows=tuple(map(change, step.windows)), chunks=tuple(map(change, step.chunks))
            )

        monkeypatch.setattr(stage_runner, "build_step_tensors", changed)

    return plant


def replay_one_too_few(group: Any) -> Any:
    return group._replace(replay_B=(group.replay_B - 1).clamp(min=0))


def own_slot_of_a_hit(group: Any) -> Any:
    is_own = (group.read_slots_B == group.write_slots_B) | (group.read_slots_B == 0)
    slots_B = torch.where(is_own, group.read_slots_B, group.write_slots_B)
    return group._replace(read_slots_B=slots_B)


def no_page_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MovablePools, "_copy", lambda self, copies: None)


def copies_one_row_short(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = MovablePools._copy

    def short(self: MovablePools, copies: Any) -> None:
        copy(self, [msgspec.structs.replace(c, num_tokens=c.num_tokens - 1) for c in copies])

    monkeypatch.setattr(MovablePools, "_copy", short)


def salt_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_memory, "salted_root", lambda root, salt: root)


def saves_one_row_late(monkeypatch: pytest.MonkeyPatch) -> None:
    build = step_inputs._build_saves

    def late(segment: Segment) -> Segment:
        saves = tuple(
            msgspec.structs.replace(save, position=min(save.position + 1, segment.certain_end))
            for save in segment.saves
        )
        return msgspec.structs.replace(segment, saves=saves)

    monkeypatch.setattr(
        step_inputs, "_build_saves", lambda segments: build(tuple(map(late, segments)))
    )


def saves_without_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_conv, "_save_rows", lambda *arguments: None)


def draft_rows_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    make = MovablePools.__init__

    def without_drafts(self: MovablePools, memory: Any, *arguments: Any) -> None:
        make(self, memory, *arguments)
        if memory.draft_rows_YRD is not None:
            del self._pages[-len(memory.draft_rows_YRD) :]

    monkeypatch.setattr(MovablePools, "__init__", without_drafts)


def draft_rows_written_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LastStage, "finish_context", lambda self: None)


def pinned_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageMemory, "pin", lambda self, page: None)
    monkeypatch.setattr(SlotMemory, "pin", lambda self, checkpoint: None)
    monkeypatch.setattr(SlotMemory, "unpin", lambda self, checkpoint: None)


def one_reader_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that two requests share is free when the first of them ends."""
    hold = PageMemory.hold

    def hold_once(self: PageMemory, page: Any) -> None:
        if not page.num_holders:
            hold(self, page)

    monkeypatch.setattr(PageMemory, "hold", hold_once)


def hit_one_too_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    find = PrefixCache.find

    def deep(self: PrefixCache, chain: Any, limit: int) -> Any:
        hit = find(self, chain, limit)
        return hit._replace(position=hit.position + 1) if hit.checkpoint else hit

    monkeypatch.setattr(PrefixCache, "find", deep)


def whole_prompt_is_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = checkpoint_positions.hit_limit
    monkeypatch.setattr(
        request_memory, "hit_limit", lambda **numbers: limit(**numbers) and limit(**numbers) + 1
    )


def tails_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        BlockChain, "tail", lambda self, position: (0,) * (position % self._block_size)
    )


def stop_cut_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A donated slot replays the rows that were accepted, also those behind a stop."""
    last_state = request_memory.last_state

    def uncut(request: Any) -> Any:
        position, replay = last_state(request)
        if request.is_sample_in_flight:
            return request_memory.LastState(position, replay)
        return request_memory.LastState(position, request.num_replay)

    monkeypatch.setattr(request_memory, "last_state", uncut)


def preemption_forgets_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    last_state = request_memory.last_state
    monkeypatch.setattr(
        request_memory, "last_state", lambda request: last_state(request)._replace(replay=0)
    )


def epochs_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Scheduler._release

    def same_epoch(self: Scheduler, request: Any, *arguments: Any, **named: Any) -> None:
        release(self, request, *arguments, **named)
        request.epoch -= 1

    monkeypatch.setattr(Scheduler, "_release", same_epoch)


def host_loads_without_record(monkeypatch: pytest.MonkeyPatch) -> None:
    make = MovablePools.__init__

    def make_noting(self: MovablePools, memory: Any, *arguments: Any) -> None:
        make(self, memory, *arguments)
        self._records = [  # type: ignore[attr-defined]
            layer.record_SNHX for layer in memory.layers.values() if isinstance(layer, KdaMemory)
        ]

    apply = MovablePools.apply

    def without_records(self: MovablePools, moves: MemoryMoves, host: MovablePools) -> None:
        before = [record.clone() for record in self._records]  # type: ignore[attr-defined]
        apply(self, moves, host)
        slots = torch.tensor([item.device for item in moves.load_slots], dtype=torch.int64)
        for record, old in zip(self._records, before, strict=True):  # type: ignore[attr-defined]
            record[slots] = old[slots]

    monkeypatch.setattr(MovablePools, "__init__", make_noting)
    monkeypatch.setattr(MovablePools, "apply", without_records)


def stored_after_scrub(monkeypatch: pytest.MonkeyPatch) -> None:
    def scrubbing_first(self: MovablePools, moves: MemoryMoves, host: MovablePools) -> None:
        self.scrub(moves.scrub_pages, moves.scrub_slots)
        transfer = memory_moves._transfer
        transfer(moves.store_pages, self._pages, host._pages, to_host=True)
        transfer(moves.store_slots, self._slots, host._slots, to_host=True)
        transfer(moves.load_pages, self._pages, host._pages, to_host=False)
        transfer(moves.load_slots, self._slots, host._slots, to_host=False)
        self._copy(moves.copies)

    monkeypatch.setattr(MovablePools, "apply", scrubbing_first)


def host_pages_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = memory_moves._transfer

    def only_first(transfers: Any, device: Any, host: Any, *, to_host: bool) -> None:
        transfer(transfers[:1], device, host, to_host=to_host)

    monkeypatch.setattr(memory_moves, "_transfer", only_first)


def pages_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    release = PrefixCache.release_pages
    monkeypatch.setattr(
        PrefixCache, "release_pages", lambda self, page_ids: release(self, page_ids[:-1])
    )


def masks_of_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = last_stage.mask_logits
    monkeypatch.setattr(
        last_stage,
        "mask_logits",
        lambda logits_RV, rows, masks: right(logits_RV, rows[::-1], masks),
    )


def masks_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = token_masks._fill

    def as_if_behind_the_anchor(windows: Any, masks: memoryview) -> None:
        fill([window._replace(draft_token_ids=()) for window in windows], masks)
        view = masks.cast("B")
        size = len(view) // len(masks)
        for window in windows:
            first, count = window.first_row, 1 + len(window.draft_token_ids)
            view[size * first : size * (first + count)] = (
                bytes(view[size * first : size * (first + 1)]) * count
            )

    monkeypatch.setattr(token_masks, "_fill", as_if_behind_the_anchor)


def chained_to_an_older_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen is kept one step too late."""
    note = NewestTokens.note
    chosen: dict[NewestTokens, Any] = {}

    def note_late(self: NewestTokens, *arguments: Any) -> None:
        if self in chosen:
            note(self, *chosen[self])
        chosen[self] = arguments

    monkeypatch.setattr(NewestTokens, "note", note_late)


def without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only checks, in head and drafter, is out of work: for what tokens alone show."""
    behind = Knowledge.drafts_behind

    def lenient(self: Knowledge, prefix: tuple[int, ...]) -> list[int]:
        try:
            return behind(self, prefix)
        except AssertionError:
            return [1] * self.num_drafts

    for name in ("run", "file"):
        monkeypatch.setattr(SlotTags, name, lambda self, *arguments: None)
    monkeypatch.setattr(Knowledge, "drafts_behind", lenient)
    monkeypatch.setattr(
        drafts, "_tokens", lambda rows: [int(row[0]) if row[0] == row[0] else 0 for row in rows]
    )


MUTATIONS = (
    Mutation("replay", "one recorded row too few is folded in", each_group(replay_one_too_few),
             drafts=True),
    Mutation("stale slot", "a hit reads the request's own new slot", each_group(own_slot_of_a_hit)),
    Mutation("no copy", "the partly filled page is not copied", no_page_copies),
    Mutation("short copy", "it is copied one row short", copies_one_row_short),
    Mutation("salt", "requests of all salts share prefixes", salt_ignored),
    Mutation("late save", "a state is saved one token late", saves_one_row_late),
    Mutation("convolution", "a save leaves out the convolution's rows", saves_without_convolution),
    Mutation("draft rows", "a page is copied without the draft's rows", draft_rows_not_copied,
             drafts=True),
    Mutation("late draft rows", "the draft's rows are written after their page was copied",
             draft_rows_written_late, drafts=True),
    Mutation("pin", "what the plan reads may be evicted by it", pinned_is_evicted),
    Mutation("one reader", "a shared page counts one reader", one_reader_counted),
    Mutation("deep hit", "a hit counts one token too many", hit_one_too_deep),
    Mutation("whole hit", "a hit may be the whole prompt", whole_prompt_is_hit),
    Mutation("tail", "the tokens of the partly filled page are not compared", tails_not_compared),
    Mutation("stop", "a slot is filed with the rows behind a stop", stop_cut_forgotten,
             drafts=True),
    Mutation("kept replay", "a slot is filed without its recorded rows", preemption_forgets_replay,
             drafts=True),
    Mutation("epoch", "results of an earlier admission count", epochs_ignored,
             {"pipeline_parallel_size": 2}),
    Mutation("host record", "a state comes back from the host without its record",
             host_loads_without_record, HOST, drafts=True),
    Mutation("store", "evicted memory is cleared before it is stored", stored_after_scrub, HOST),
    Mutation("host moves", "of several moves to the host only one is made", host_pages_lost,
             HOST | {"kv_offloading_size": 0.001, "max_num_seqs": 2, "block_size": 4}),
    Mutation("leak", "a request's last page is never given back", pages_leak),
    Mutation("newest", "a chained window goes on from an older token", chained_to_an_older_token,
             {"async_scheduling": True, "pipeline_parallel_size": 1}),
    Mutation("mask rows", "a mask is that of another row", masks_of_other_rows, grammars=True),
    Mutation("draft masks", "behind a draft stands the anchor's mask", masks_without_drafts,
             drafts=True, grammars=True),
)  # fmt: skip
