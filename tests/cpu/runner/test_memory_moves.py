"""Moves of a plan: each alone and all together, against lists moved one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.cache.memory_moves import MemoryMoves, PageCopy, Transfer
from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.kernels.quantization import FP8_DTYPE, movable
from stagecoach.runner.device_memory import DeviceMemory
from stagecoach.runner.memory_moves import moves_pages
from stagecoach.schedule.step_plan import StepPlan
from tests.cpu.engine.fakes import resolved
from tests.cpu.runner.memories import BLOCK_SIZE, pages_of, slots_of, speculating, stage_of

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu

PLAN = MemoryPlan(num_pages=7, num_slots=5, num_host_pages=3, num_host_slots=2)
Page = list[float]  # what each row holds


@dataclass
class Labels:
    """What every row and slot holds: a number each, as moving them one by one leaves it."""

    pages: list[Page] = field(
        default_factory=lambda: [
            [100.0 + 10 * page + row for row in range(BLOCK_SIZE)] for page in range(PLAN.num_pages)
        ]
    )
    slots: list[float] = field(
        default_factory=lambda: [200.0 + slot for slot in range(PLAN.num_slots)]
    )
    host_pages: list[Page] = field(
        default_factory=lambda: [
            [300.0 + 10 * page + row for row in range(BLOCK_SIZE)]
            for page in range(PLAN.num_host_pages)
        ]
    )
    host_slots: list[float] = field(
        default_factory=lambda: [400.0 + slot for slot in range(PLAN.num_host_slots)]
    )

    def apply(self, moves: MemoryMoves) -> None:
        for item in moves.store_pages:
            self.host_pages[item.host] = list(self.pages[item.device])
        for item in moves.store_slots:
            self.host_slots[item.host] = self.slots[item.device]
        for page in moves.scrub_pages:
            self.pages[page] = [0.0] * BLOCK_SIZE
        for slot in moves.scrub_slots:
            self.slots[slot] = 0.0
        for item in moves.load_pages:
            self.pages[item.device] = list(self.host_pages[item.host])
        for item in moves.load_slots:
            self.slots[item.device] = self.host_slots[item.host]
        for copy in moves.copies:
            self.pages[copy.target][: copy.num_tokens] = self.pages[copy.source][: copy.num_tokens]

    def write(self, memory: DeviceMemory) -> None:
        """Each number, in every layer's tensors."""
        for tensors, labels in self._tensors(memory):
            for tensor in tensors:
                values = torch.tensor(labels, dtype=tensor.dtype)
                tensor.copy_(values.view(*values.shape, *(1,) * (tensor.dim() - values.dim())))

    def check(self, memory: DeviceMemory) -> None:
        for tensors, labels in self._tensors(memory):
            assert tensors
            for tensor in tensors:
                values = torch.tensor(labels, dtype=tensor.dtype)
                shape = (*values.shape, *(1,) * (tensor.dim() - values.dim()))
                expected = values.view(shape).expand_as(tensor)
                assert torch.equal(movable(tensor), movable(expected))

    def _tensors(self, memory: DeviceMemory) -> list[tuple[list[Tensor], Sequence[object]]]:
        device, host = memory.stage_memory, memory.host_memory
        return [
            (pages_of(device), self.pages),
            (slots_of(device), self.slots),
            (pages_of(host), self.host_pages),
            (slots_of(host), self.host_slots),
        ]


@pytest.fixture(scope="module")
def memory() -> DeviceMemory:
    """A stage with layers of both kinds and the drafter's rows."""
    config = speculating(resolved())
    memory = DeviceMemory(config, stage_of(config, 0), torch.float32, PLAN)
    assert memory.stage_memory.draft_rows_YRD is not None
    return memory


E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()


def test_rows_of_one_byte_move_like_others() -> None:
    """All moves at once; every page row holds another E4M3 value."""
    config = speculating(resolved(kv_cache_dtype="fp8", debug_poison=True))
    memory = DeviceMemory(config, stage_of(config, 0), torch.float32, PLAN)
    rows_RD = next(rows for rows in pages_of(memory.stage_memory) if rows.dtype == FP8_DTYPE)
    # Free pages are poisoned, the null page is not.
    assert rows_RD[1:].float().isnan().all() and not rows_RD[0].float().any()
    draft_RD = pages_of(memory.stage_memory)[-1]
    assert draft_RD.dtype == torch.float32, "the draft's rows do not follow"
    labels = Labels(
        pages=[E4M3[1 + 4 * page : 5 + 4 * page] for page in range(PLAN.num_pages)],
        host_pages=[E4M3[60 + 4 * page : 64 + 4 * page] for page in range(PLAN.num_host_pages)],
    )
    moves = MemoryMoves(
        store_pages=(Transfer(5, 1), Transfer(2, 0)),
        load_pages=(Transfer(1, 2),),
        copies=(PageCopy(2, 4, 3),),
    )
    labels.write(memory)
    memory.prepare(StepPlan(step=0, segments=(), moves=moves))
    labels.apply(moves)
    labels.check(memory)
    memory.prepare(StepPlan(step=1, segments=(), moves=MemoryMoves(scrub_pages=(3, 6))))
    assert rows_RD[[3, 6]].float().isnan().all() and not rows_RD[[1, 2, 4, 5]].float().isnan().any()


def check_moves(memory: DeviceMemory, moves: MemoryMoves) -> None:
    labels = Labels()
    labels.write(memory)
    labels.check(memory)
    memory.prepare(StepPlan(step=0, segments=(), moves=moves))
    labels.apply(moves)
    labels.check(memory)


@pytest.mark.parametrize(
    "moves",
    [
        MemoryMoves(),
        MemoryMoves(store_pages=(Transfer(5, 1), Transfer(2, 0))),
        MemoryMoves(store_slots=(Transfer(3, 1),)),
        MemoryMoves(scrub_pages=(6, 1)),
        MemoryMoves(scrub_slots=(4,)),
        MemoryMoves(load_pages=(Transfer(1, 2), Transfer(6, 0))),
        MemoryMoves(load_slots=(Transfer(2, 0), Transfer(4, 1))),
        MemoryMoves(copies=(PageCopy(1, 3, 1),)),
        MemoryMoves(copies=(PageCopy(2, 4, 3), PageCopy(2, 6, 1), PageCopy(1, 5, 2))),
    ],
    ids=lambda moves: "nothing" if moves == MemoryMoves() else None,
)
def test_each_kind_of_move_alone(memory: DeviceMemory, moves: MemoryMoves) -> None:
    check_moves(memory, moves)


def test_what_a_page_evicted_holds_is_stored_before_the_new_owner_gets_it(
    memory: DeviceMemory,
) -> None:
    """One page and one slot leave, are cleared, and take in another."""
    check_moves(
        memory,
        MemoryMoves(
            store_pages=(Transfer(3, 0),),
            store_slots=(Transfer(1, 0),),
            scrub_pages=(3, 5),
            scrub_slots=(1,),
            load_pages=(Transfer(3, 2),),
            load_slots=(Transfer(1, 1),),
            copies=(PageCopy(2, 5, 3),),
        ),
    )


@st.composite
def any_moves(draw: st.DrawFn) -> MemoryMoves:
    """No move undoes another, and no copy reads what the plan fills or clears."""
    pages, slots = st.integers(1, PLAN.num_pages - 1), st.integers(1, PLAN.num_slots - 1)
    host_pages = st.integers(0, PLAN.num_host_pages - 1)
    host_slots = st.integers(0, PLAN.num_host_slots - 1)

    def transfers(
        device: st.SearchStrategy[int], host: st.SearchStrategy[int], target: str
    ) -> tuple[Transfer, ...]:
        items = st.builds(Transfer, device, host)
        return tuple(draw(st.lists(items, unique_by=lambda item: getattr(item, target))))

    store_pages = transfers(pages, host_pages, "host")
    store_slots = transfers(slots, host_slots, "host")
    scrub_pages = tuple(draw(st.sets(pages)))
    load_pages = transfers(pages, host_pages, "device")
    load_slots = transfers(slots, host_slots, "device")
    stored_pages = {item.host for item in store_pages}
    stored_slots = {item.host for item in store_slots}
    loaded = {item.device for item in load_pages}
    copies = draw(
        st.lists(
            st.builds(PageCopy, pages, pages, st.integers(1, BLOCK_SIZE - 1)),
            unique_by=lambda copy: copy.target,
        )
    )
    targets = {copy.target for copy in copies}
    return MemoryMoves(
        store_pages=store_pages,
        store_slots=store_slots,
        scrub_pages=scrub_pages,
        scrub_slots=tuple(draw(st.sets(slots))),
        load_pages=tuple(item for item in load_pages if item.host not in stored_pages),
        load_slots=tuple(item for item in load_slots if item.host not in stored_slots),
        copies=tuple(
            copy
            for copy in copies
            if copy.target not in loaded and copy.source not in {*targets, *scrub_pages, *loaded}
        ),
    )


@settings(deadline=None, max_examples=60)
@given(moves=any_moves())
def test_any_moves_together(memory: DeviceMemory, moves: MemoryMoves) -> None:
    check_moves(memory, moves)


def test_a_stage_without_a_kind_of_layer_moves_the_other() -> None:
    # The last stage has no KDA layer, the first no MLA layer.
    config = resolved(pipeline_parallel_size=3, pp_partition=(3, 4, 2))
    moves = MemoryMoves(
        store_pages=(Transfer(1, 0),),
        store_slots=(Transfer(1, 0),),
        scrub_pages=(1,),
        scrub_slots=(1,),
    )
    back = MemoryMoves(load_pages=(Transfer(2, 0),), load_slots=(Transfer(2, 0),))
    for index, tensors_of in ((0, slots_of), (2, pages_of)):
        memory = DeviceMemory(config, stage_of(config, index), torch.float32, PLAN)
        tensors = [tensor for tensor in tensors_of(memory.stage_memory) if tensor.numel()]
        for tensor in tensors:
            tensor[1] = 1.0
        memory.prepare(StepPlan(step=0, segments=(), moves=moves))
        memory.prepare(StepPlan(step=1, segments=(), moves=back))
        assert tensors
        for tensor in tensors:
            assert not tensor[1].any() and (tensor[2] == 1.0).all()


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        (MemoryMoves(), False),
        (MemoryMoves(store_slots=(Transfer(1, 0),), scrub_slots=(1,)), False),
        (MemoryMoves(load_slots=(Transfer(1, 0),)), False),
        (MemoryMoves(store_pages=(Transfer(1, 0),)), True),
        (MemoryMoves(scrub_pages=(1,)), True),
        (MemoryMoves(load_pages=(Transfer(1, 0),)), True),
        (MemoryMoves(copies=(PageCopy(1, 2, 1),)), True),
    ],
)
def test_only_moves_of_pages_wait_for_the_rows_that_are_due(
    *, moves: MemoryMoves, expected: bool
) -> None:
    assert moves_pages(moves) == expected
