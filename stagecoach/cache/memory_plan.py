"""Bytes -> numbers of pages and state slots, the same for every worker.

Every worker reports what a page and a slot cost with its own layers and what it may spend; the
tightest worker decides, since a number stands for memory on all of them. Both numbers count the
reserved page 0 and slot 0. Reads no memory itself.
"""

from collections.abc import Sequence

import msgspec

from stagecoach.cache.page_pool import NUM_RESERVED_PAGES
from stagecoach.cache.state_slots import NUM_RESERVED_SLOTS
from stagecoach.errors import CapacityError, ConfigError


class MemoryNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker reports. A stage without MLA or KDA layers has a size of 0 there."""

    bytes_per_page: int
    bytes_per_slot: int
    available_bytes: int


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How much every worker allocates: ids 0..num_pages-1 and 0..num_slots-1."""

    num_pages: int
    num_slots: int


def plan_memory(
    needs: Sequence[MemoryNeeds],
    *,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    num_gpu_blocks_override: int | None = None,
) -> MemoryPlan:
    """Divide the memory: a state slot for each running request, the rest for pages.

    There are never more pages than `max_num_seqs` requests of `max_model_len` can use.
    `num_gpu_blocks_override` sets the number of pages whatever the memory says; then requests
    that are too long for the pool are refused one by one.

    Args:
        needs: one entry a worker, in the order of the workers.

    Raises:
        CapacityError: the slots and the pages of one longest request do not fit a worker.
        ConfigError: an override that leaves no page beside the null page.
    """
    assert needs, "no worker reported its memory"
    num_slots = NUM_RESERVED_SLOTS + max_num_seqs
    if num_gpu_blocks_override is not None:
        if num_gpu_blocks_override <= NUM_RESERVED_PAGES:
            raise ConfigError(
                f"--num-gpu-blocks-override={num_gpu_blocks_override}: must be at least "
                f"{NUM_RESERVED_PAGES + 1}, since page 0 is never handed out"
            )
        return MemoryPlan(num_pages=num_gpu_blocks_override, num_slots=num_slots)
    pages_per_request = -(-max_model_len // block_size)
    num_pages = NUM_RESERVED_PAGES + max_num_seqs * pages_per_request
    for need in needs:
        left = need.available_bytes - num_slots * need.bytes_per_slot
        if need.bytes_per_page:
            num_pages = min(num_pages, left // need.bytes_per_page)
        elif left < 0:
            num_pages = 0
    if num_pages < NUM_RESERVED_PAGES + pages_per_request:
        raise CapacityError(
            _explain(needs, max_num_seqs, max_model_len, block_size, max(0, num_pages))
        )
    return MemoryPlan(num_pages=num_pages, num_slots=num_slots)


def _explain(
    needs: Sequence[MemoryNeeds],
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    num_pages: int,
) -> str:
    """Why it does not fit, and which change of one option alone would help."""
    num_slots = NUM_RESERVED_SLOTS + max_num_seqs
    least_pages = NUM_RESERVED_PAGES + -(-max_model_len // block_size)

    def needed_bytes(need: MemoryNeeds) -> int:
        return num_slots * need.bytes_per_slot + least_pages * need.bytes_per_page

    worker, tightest = max(
        enumerate(needs), key=lambda item: needed_bytes(item[1]) - item[1].available_bytes
    )
    fitting_seqs = max_num_seqs
    for need in needs:
        left = need.available_bytes - least_pages * need.bytes_per_page
        if need.bytes_per_slot:
            fitting_seqs = min(fitting_seqs, left // need.bytes_per_slot - NUM_RESERVED_SLOTS)
        elif left < 0:
            fitting_seqs = 0
    fitting_length = (num_pages - NUM_RESERVED_PAGES) * block_size
    remedies = [f"--kv-cache-memory-bytes={max(map(needed_bytes, needs))}"]
    if fitting_seqs >= 1:
        remedies.append(f"--max-num-seqs={fitting_seqs}")
    if fitting_length >= 1:
        remedies.append(f"--max-model-len={fitting_length}")
    return (
        f"too little memory for pages and state slots: the worker of rank {worker} may use "
        f"{tightest.available_bytes} bytes (--kv-cache-memory-bytes) and needs "
        f"{needed_bytes(tightest)}: {num_slots} state slots of {tightest.bytes_per_slot} bytes "
        f"for --max-num-seqs={max_num_seqs}, and {least_pages} pages of "
        f"{tightest.bytes_per_page} bytes for one request of --max-model-len={max_model_len}. "
        f"It fits with {' or '.join(remedies)}"
    )
