"""Bytes -> pages and slots: the tightest worker decides, and refusals say what would fit."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.cache.memory_plan import MemoryNeeds, MemoryPlan, plan_memory
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


def test_an_override_sets_the_pages_whatever_the_memory_says() -> None:
    plan = plan_memory([needs(0)], **SIZES, num_gpu_blocks_override=5)
    assert plan == MemoryPlan(num_pages=5, num_slots=SLOTS)


def test_an_override_without_a_usable_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="--num-gpu-blocks-override=1: must be at least 2"):
        plan_memory([needs(10_000)], **SIZES, num_gpu_blocks_override=1)
