"""Bytes -> pages and slots: the tightest worker decides, and refusals say what would fit."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.cache.memory_plan import MemoryNeeds, MemoryPlan, describe, plan_memory
from stagecoach.errors import CapacityError, ConfigError

SIZES: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 100, "block_size": 16}
SLOTS, PAGES_OF_ONE, MOST_PAGES = 1 + 3, 7, 1 + 3 * 7


def needs(available: int, page: int = 10, slot: int = 100) -> MemoryNeeds:
    return MemoryNeeds(bytes_per_page=page, bytes_per_slot=slot, available_bytes=available)


@pytest.mark.parametrize(
    ("workers", "num_pages"),
    [
        ([needs(10_000)], MOST_PAGES),  # never more than the largest batch can use
        ([needs(400 + 10 * MOST_PAGES)], MOST_PAGES),
        ([needs(400 + 10 * MOST_PAGES - 1)], MOST_PAGES - 1),
        ([needs(400 + 80)], 8),  # exactly one longest request
        ([needs(10_000), needs(400 + 125)], 12),  # the tightest worker
        ([needs(520), needs(520, page=15, slot=0), needs(520, slot=105)], 10),
        ([needs(400, page=0)], MOST_PAGES),  # a stage without MLA layers
        ([needs(0, page=0, slot=0)], MOST_PAGES),
    ],
)
def test_number_of_pages(workers: list[MemoryNeeds], num_pages: int) -> None:
    assert plan_memory(workers, **SIZES) == MemoryPlan(num_pages=num_pages, num_slots=SLOTS)


def test_all_workers_get_the_same_plan_in_any_order() -> None:
    """One plan for all stages, whatever their layers cost (I12)."""
    workers = [needs(700), needs(900, page=20), needs(500, page=5, slot=90)]
    assert plan_memory(workers, **SIZES) == plan_memory(workers[::-1], **SIZES)


@pytest.mark.parametrize("workers", [[needs(479)], [needs(10_000), needs(0)], [needs(399, page=0)]])
def test_less_than_one_longest_request_is_refused_with_the_numbers(
    workers: list[MemoryNeeds],
) -> None:
    with pytest.raises(CapacityError) as error:
        plan_memory(workers, **SIZES)
    message = str(error.value)
    for part in (
        f"the worker of rank {len(workers) - 1} may use {workers[-1].available_bytes} bytes",
        "--kv-cache-memory-bytes",
        "--max-num-seqs=3",
        "--max-model-len=100",
        "4 state slots of 100 bytes",
        f"8 pages of {workers[-1].bytes_per_page} bytes",
    ):
        assert part in message


@given(
    st.lists(
        st.builds(needs, st.integers(0, 2000), st.integers(0, 30), st.integers(0, 200)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 8),
    st.integers(1, 200),
    st.integers(1, 32),
)
def test_a_plan_fits_every_worker_and_each_remedy_of_a_refusal_works(
    workers: list[MemoryNeeds], max_num_seqs: int, max_model_len: int, block_size: int
) -> None:
    sizes = {
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "block_size": block_size,
    }
    try:
        plan = plan_memory(workers, **sizes)
    except CapacityError as error:
        remedy_text = str(error).split("It fits with ")[1]
        for name, value in re.findall(r"--([a-z-]+)=(\d+)", remedy_text):
            if name == "kv-cache-memory-bytes":
                roomy = [needs(int(value), w.bytes_per_page, w.bytes_per_slot) for w in workers]
                plan_memory(roomy, **sizes)
            else:
                plan_memory(workers, **{**sizes, name.replace("-", "_"): int(value)})
        return
    assert plan.num_slots == 1 + max_num_seqs
    assert (plan.num_pages - 1) * block_size >= max_model_len
    for worker in workers:
        used = plan.num_pages * worker.bytes_per_page + plan.num_slots * worker.bytes_per_slot
        assert used <= worker.available_bytes


def test_a_refusal_on_a_gpu_names_the_share_of_it_that_would_do() -> None:
    """1000 bytes each, of which 480 are needed; the weights took more than was allowed."""

    def with_share(*shares: float) -> list[MemoryNeeds]:
        return [
            MemoryNeeds(
                bytes_per_page=10,
                bytes_per_slot=100,
                available_bytes=round(1000 * (share - taken)),
                gpu_bytes=1000,
                gpu_share=share,
            )
            for share, taken in zip(shares, (0.25, 0.5), strict=True)
        ]

    with pytest.raises(CapacityError) as error:
        plan_memory(with_share(0.4, 0.4), **SIZES)
    message = str(error.value)
    assert "rank 1 may use 0 bytes (--gpu-memory-utilization) and needs 480" in message
    assert message.endswith("It fits with --gpu-memory-utilization=0.98")
    assert plan_memory(with_share(0.98, 0.98), **SIZES).num_pages == 8
    with pytest.raises(CapacityError, match=r"fits with --gpu-memory-utilization=0\.98"):
        plan_memory(with_share(0.97, 0.97), **SIZES)
    # A checkpoint takes 100 more, which are there only if little else is.
    with pytest.raises(CapacityError, match=r"fits with --max-state-checkpoints=0$"):
        plan_memory(with_share(0.98, 0.98), **SIZES, max_state_checkpoints=1)
    with pytest.raises(CapacityError, match=r"utilization=0\.83 or --max-state-checkpoints=0$"):
        plan_memory(with_share(0.75, 0.75)[:1], **SIZES, max_state_checkpoints=1)


def test_where_no_share_of_a_gpu_is_enough_more_workers_are() -> None:
    worker = MemoryNeeds(
        bytes_per_page=10, bytes_per_slot=100, available_bytes=-50, gpu_bytes=400, gpu_share=0.9
    )
    with pytest.raises(CapacityError, match="fits with more workers"):
        plan_memory([worker], **SIZES)


def test_an_override_sets_the_pages_whatever_the_memory_says() -> None:
    plan = plan_memory([needs(0)], **SIZES, num_gpu_blocks_override=5)
    assert plan == MemoryPlan(num_pages=5, num_slots=SLOTS)


def test_an_override_without_a_usable_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="--num-gpu-blocks-override=1: must be at least 2"):
        plan_memory([needs(10_000)], **SIZES, num_gpu_blocks_override=1)


@pytest.mark.parametrize(
    ("workers", "num_pages", "num_checkpoints"),
    [
        ([needs(10_000)], MOST_PAGES, 6),  # each its most
        ([needs(480)], 8, 0),  # the floors alone: as much as without checkpoints
        ([needs(480 + 600 + 140)], MOST_PAGES, 6),
        ([needs(480 + 600 + 139)], MOST_PAGES, 5),  # no whole slot is left
        ([needs(480 + 399)], MOST_PAGES, 2),  # pages need less than half, checkpoints get the rest
        ([needs(480 + 240)], 8 + 14, 1),  # half each; what is no whole slot goes to pages
        ([needs(480 + 160, slot=100)], MOST_PAGES, 0),
        # The second worker has no room for checkpoints, whatever the first one has.
        ([needs(10_000), needs(490)], 9, 0),
        # It limits the pages, and what they leave on the first one is for checkpoints.
        ([needs(480 + 380), needs(90, page=10, slot=0)], 9, 3),
        ([needs(0, page=0, slot=0)], MOST_PAGES, 6),
    ],
)
def test_checkpoints_and_further_pages_share_what_is_left(
    workers: list[MemoryNeeds], num_pages: int, num_checkpoints: int
) -> None:
    plan = plan_memory(workers, **SIZES, max_state_checkpoints=None)
    assert plan == MemoryPlan(num_pages=num_pages, num_slots=SLOTS + num_checkpoints)


@given(
    st.lists(
        st.builds(needs, st.integers(0, 4000), st.integers(0, 30), st.integers(0, 200)),
        min_size=1,
        max_size=4,
    )
)
def test_checkpoints_refuse_no_engine_and_starve_no_pages(workers: list[MemoryNeeds]) -> None:
    try:
        without = plan_memory(workers, **SIZES)
    except CapacityError:
        with pytest.raises(CapacityError):
            plan_memory(workers, **SIZES, max_state_checkpoints=None)
        return
    plan = plan_memory(workers, **SIZES, max_state_checkpoints=None)
    for worker in workers:
        used = plan.num_pages * worker.bytes_per_page + plan.num_slots * worker.bytes_per_slot
        assert used <= worker.available_bytes
    # At least half of the pages that there could be beside the first request's.
    least_pages = 1 + PAGES_OF_ONE
    assert plan.num_pages - least_pages >= (without.num_pages - least_pages) // 2
    assert SLOTS <= plan.num_slots <= SLOTS + 6


def test_an_explicit_number_of_checkpoints_is_honoured_or_refused_with_the_numbers() -> None:
    plan = plan_memory([needs(480 + 300)], **SIZES, max_state_checkpoints=3)
    assert plan == MemoryPlan(num_pages=8, num_slots=SLOTS + 3)
    workers = [needs(10_000), needs(480 + 299)]
    with pytest.raises(CapacityError) as error:
        plan_memory(workers, **SIZES, max_state_checkpoints=3)
    message = str(error.value)
    assert "--max-state-checkpoints=3" in message
    assert "the worker of rank 1 may use 779 bytes" in message
    remedies = dict(re.findall(r"--([a-z-]+)=(\d+)", message.split("It fits with ")[1]))
    assert remedies == {"kv-cache-memory-bytes": "780", "max-state-checkpoints": "2"}
    plan_memory(workers, **SIZES, max_state_checkpoints=2)
    plan_memory([workers[0], needs(780)], **SIZES, max_state_checkpoints=3)


def test_the_host_tier_has_the_proportion_of_the_device() -> None:
    workers = [needs(1620), needs(1620)]
    plan = plan_memory(
        workers, **SIZES, max_state_checkpoints=None, kv_offloading_size=2 * 2220 / 2**30
    )
    assert (plan.num_pages - 1, plan.num_slots - 1) == (21, 9)
    # 21 pages of 20 bytes and 9 slots of 200, over both workers, are 2,220 bytes.
    assert (plan.num_host_pages, plan.num_host_slots) == (42, 18)


@pytest.mark.parametrize(
    ("budget", "pages", "slots"), [(220, 1, 1), (239, 1, 1), (240, 2, 1), (439, 11, 1)]
)
def test_a_small_host_tier_holds_one_of_each_at_least(budget: int, pages: int, slots: int) -> None:
    sizes = {**SIZES, "kv_offloading_size": budget / 2**30}
    plan = plan_memory([needs(1620), needs(1620)], **sizes, max_state_checkpoints=6)
    assert (plan.num_host_pages, plan.num_host_slots) == (pages, slots)


def test_a_host_tier_that_holds_nothing_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--kv-offloading-size=.*219 bytes do not hold one page"):
        plan_memory([needs(1620), needs(1620)], **SIZES, kv_offloading_size=219 / 2**30)


def test_what_there_is_is_told_without_what_is_reserved() -> None:
    plan = MemoryPlan(num_pages=9, num_slots=6)
    text = "8 pages of 16 tokens, slots for 2 requests and 3 checkpoints"
    assert describe(plan, max_num_seqs=2, block_size=16) == text
    with_host = MemoryPlan(num_pages=9, num_slots=6, num_host_pages=4, num_host_slots=1)
    told = describe(with_host, max_num_seqs=2, block_size=16)
    assert told == f"{text}; on the host 4 pages and 1 checkpoints"
