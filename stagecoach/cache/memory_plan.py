"""Bytes -> numbers of pages and state slots, the same for every worker, on both tiers.

Every worker reports what a page and a slot cost with its own layers and what it may spend; the
tightest worker decides, since a number stands for memory on all of them. Both numbers count the
reserved page 0 and slot 0. Reads no memory itself.
"""

import math
from collections.abc import Callable, Sequence

import msgspec

from stagecoach.cache.page_pool import NUM_RESERVED_PAGES
from stagecoach.cache.state_slots import NUM_RESERVED_SLOTS
from stagecoach.errors import CapacityError, ConfigError

_MORE_WORKERS = "more workers (--pipeline-parallel-size, --tensor-parallel-size)"
_CHECKPOINTS_PER_REQUEST = 2  # the end of its prompt and that of its answer


class MemoryNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker reports. A stage without MLA or KDA layers has a size of 0 there."""

    bytes_per_page: int
    bytes_per_slot: int
    available_bytes: int  # below 0 where what is there before takes more than it may
    # On a GPU whose share was measured: the worker's part of all its bytes, and that share.
    gpu_bytes: int = 0
    gpu_share: float = 0.0

    @property
    def option(self) -> str:
        """What decides how much is available."""
        return "--gpu-memory-utilization" if self.gpu_bytes else "--kv-cache-memory-bytes"


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How much every worker allocates: ids 0..num_pages-1 and 0..num_slots-1.

    Slots are those of running requests and of checkpoints together. The host tier's ids count
    from 0 and reserve none.
    """

    num_pages: int
    num_slots: int
    num_host_pages: int = 0
    num_host_slots: int = 0


def plan_memory(
    needs: Sequence[MemoryNeeds],
    *,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    num_gpu_blocks_override: int | None = None,
    max_state_checkpoints: int | None = 0,
    kv_offloading_size: float | None = None,
) -> MemoryPlan:
    """Divide the memory: what running requests cannot do without first, then what is cached.

    First come a state slot for each running request and the pages of one longest request. What
    is left goes to slots for checkpoints, at most two a request, and to further pages, at most
    what `max_num_seqs` requests of `max_model_len` can use: half of the bytes to each, and what
    one of the two does not need to the other. So neither is starved, and whether an engine can
    start does not depend on checkpoints.

    `num_gpu_blocks_override` sets the number of pages whatever the memory says; then requests
    that are too long for the pool are refused one by one.

    Args:
        needs: one entry a worker, in the order of the workers.
        max_state_checkpoints: slots for checkpoints beside those of requests, exactly; 0 where
            no prefix is cached. None: as many as fit, up to two a request.
        kv_offloading_size: GiB of the host tier, over all workers; None: there is none.

    Raises:
        CapacityError: the slots and the pages of one longest request do not fit a worker, or
            not with so many checkpoints.
        ConfigError: an override that leaves no page beside the null page; a host tier that does
            not hold one page and one slot.
    """
    assert needs, "no worker reported its memory"
    num_live_slots = NUM_RESERVED_SLOTS + max_num_seqs
    pages_per_request = -(-max_model_len // block_size)
    least_pages = NUM_RESERVED_PAGES + pages_per_request
    most_pages = NUM_RESERVED_PAGES + max_num_seqs * pages_per_request
    if num_gpu_blocks_override is not None:
        _check_override(num_gpu_blocks_override)
        least_pages = most_pages = num_gpu_blocks_override
    elif (fitting := _most_pages(needs, num_live_slots, most_pages)) < least_pages:
        raise _shortage(needs, max_num_seqs, max_model_len, block_size, fitting)
    num_checkpoints = max_state_checkpoints
    if num_checkpoints is None:
        num_checkpoints = _share_of_checkpoints(
            needs, num_live_slots, least_pages, most_pages, _CHECKPOINTS_PER_REQUEST * max_num_seqs
        )
    num_slots = num_live_slots + num_checkpoints
    num_pages = least_pages
    if num_gpu_blocks_override is None:
        num_pages = _most_pages(needs, num_slots, most_pages)
        if num_pages < least_pages:
            raise _shortage_of_checkpoints(needs, num_live_slots, least_pages, num_checkpoints)
    plan = MemoryPlan(num_pages=num_pages, num_slots=num_slots)
    return plan if kv_offloading_size is None else _with_host(plan, needs, kv_offloading_size)


def describe(plan: MemoryPlan, max_num_seqs: int, block_size: int) -> str:
    """What there is for requests and what is cached, without what is reserved."""
    num_slots = plan.num_slots - NUM_RESERVED_SLOTS
    text = (
        f"{plan.num_pages - NUM_RESERVED_PAGES} pages of {block_size} tokens, slots for "
        f"{max_num_seqs} requests and {num_slots - max_num_seqs} checkpoints"
    )
    if plan.num_host_pages or plan.num_host_slots:
        text += f"; on the host {plan.num_host_pages} pages and {plan.num_host_slots} checkpoints"
    return text


def _check_override(num_pages: int) -> None:
    if num_pages <= NUM_RESERVED_PAGES:
        raise ConfigError(
            f"--num-gpu-blocks-override={num_pages}: must be at least "
            f"{NUM_RESERVED_PAGES + 1}, since page 0 is never handed out"
        )


def _most_pages(needs: Sequence[MemoryNeeds], num_slots: int, most_pages: int) -> int:
    """How many pages fit every worker beside that many slots; 0 if the slots do not fit."""
    num_pages = most_pages
    for need in needs:
        left = need.available_bytes - num_slots * need.bytes_per_slot
        if left < 0:
            return 0
        if need.bytes_per_page:
            num_pages = min(num_pages, left // need.bytes_per_page)
    return num_pages


def _most_checkpoints(needs: Sequence[MemoryNeeds], num_slots: int, num_pages: int) -> int | None:
    """How many further slots fit every worker; None if they cost nothing anywhere."""
    counts = [
        (need.available_bytes - num_slots * need.bytes_per_slot - num_pages * need.bytes_per_page)
        // need.bytes_per_slot
        for need in needs
        if need.bytes_per_slot
    ]
    return max(0, min(counts)) if counts else None


def _share_of_checkpoints(
    needs: Sequence[MemoryNeeds],
    num_live_slots: int,
    least_pages: int,
    most_pages: int,
    most_checkpoints: int,
) -> int:
    """Slots for checkpoints when each side has half of what is left, or what the other leaves."""
    fair = most_checkpoints
    for need in needs:
        floor = num_live_slots * need.bytes_per_slot + least_pages * need.bytes_per_page
        left = max(0, need.available_bytes - floor)
        page_bytes = (most_pages - least_pages) * need.bytes_per_page
        if need.bytes_per_slot:
            fair = min(fair, max(left // 2, left - page_bytes) // need.bytes_per_slot)
    # Where another worker limits the pages, there may be room for more.
    num_pages = max(least_pages, _most_pages(needs, num_live_slots + fair, most_pages))
    fitting = _most_checkpoints(needs, num_live_slots, num_pages)
    return most_checkpoints if fitting is None else min(most_checkpoints, max(fair, fitting))


def _with_host(plan: MemoryPlan, needs: Sequence[MemoryNeeds], gib: float) -> MemoryPlan:
    """The plan with a host tier whose pages and slots are in the proportion of the device's."""
    budget = int(gib * 2**30)
    page_bytes = sum(need.bytes_per_page for need in needs)
    slot_bytes = sum(need.bytes_per_slot for need in needs)
    if page_bytes + slot_bytes > budget:
        raise ConfigError(
            f"--kv-offloading-size={gib:g}: {budget} bytes do not hold one page of {page_bytes} "
            f"bytes and one state slot of {slot_bytes} bytes over all workers; it takes "
            f"{(page_bytes + slot_bytes) / 2**30:.3g} at least"
        )
    num_pages = plan.num_pages - NUM_RESERVED_PAGES
    num_slots = plan.num_slots - NUM_RESERVED_SLOTS
    device_bytes = num_pages * page_bytes + num_slots * slot_bytes
    if slot_bytes:
        share = num_slots * budget // device_bytes
        num_slots = min(max(1, share), (budget - page_bytes) // slot_bytes)
    if page_bytes:
        num_pages = (budget - num_slots * slot_bytes) // page_bytes
    return msgspec.structs.replace(plan, num_host_pages=num_pages, num_host_slots=num_slots)


def _shortage_of_checkpoints(
    needs: Sequence[MemoryNeeds], num_live_slots: int, least_pages: int, num_checkpoints: int
) -> CapacityError:
    """Why so many checkpoints were refused, and which change of one option alone would help."""

    def needed_bytes(need: MemoryNeeds) -> int:
        num_slots = num_live_slots + num_checkpoints
        return num_slots * need.bytes_per_slot + least_pages * need.bytes_per_page

    worker, tightest = max(
        enumerate(needs), key=lambda item: needed_bytes(item[1]) - item[1].available_bytes
    )
    return CapacityError(
        f"too little memory for --max-state-checkpoints={num_checkpoints}: the worker of rank "
        f"{worker} may use {max(0, tightest.available_bytes)} bytes ({tightest.option}) and needs "
        f"{needed_bytes(tightest)}: {num_live_slots} state slots of {tightest.bytes_per_slot} "
        f"bytes, {least_pages} pages of {tightest.bytes_per_page} bytes for one longest request, "
        f"and {num_checkpoints} checkpoints of {tightest.bytes_per_slot} bytes",
        (
            *_more_memory(needs, needed_bytes),
            f"--max-state-checkpoints={_most_checkpoints(needs, num_live_slots, least_pages)}",
        ),
    )


def _more_memory(
    needs: Sequence[MemoryNeeds], needed_bytes: Callable[[MemoryNeeds], int]
) -> list[str]:
    """The option that would give every worker what it needs, with its value; none if none does."""
    if not any(need.gpu_bytes for need in needs):
        return [f"--kv-cache-memory-bytes={max(map(needed_bytes, needs))}"]
    share = max(
        need.gpu_share + (needed_bytes(need) - need.available_bytes) / need.gpu_bytes
        for need in needs
        if need.gpu_bytes
    )
    percent = math.ceil(round(100 * share, 6))
    return [f"--gpu-memory-utilization={percent / 100:g}"] if percent <= 100 else []


def _shortage(
    needs: Sequence[MemoryNeeds],
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    num_pages: int,
) -> CapacityError:
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
    remedies = _more_memory(needs, needed_bytes)
    if fitting_seqs >= 1:
        remedies.append(f"--max-num-seqs={fitting_seqs}")
    if fitting_length >= 1:
        remedies.append(f"--max-model-len={fitting_length}")
    return CapacityError(
        f"too little memory for pages and state slots: the worker of rank {worker} may use "
        f"{max(0, tightest.available_bytes)} bytes ({tightest.option}) and needs "
        f"{needed_bytes(tightest)}: {num_slots} state slots of {tightest.bytes_per_slot} bytes "
        f"for --max-num-seqs={max_num_seqs}, and {least_pages} pages of "
        f"{tightest.bytes_per_page} bytes for one request of --max-model-len={max_model_len}",
        tuple(remedies or [_MORE_WORKERS]),
    )
