"""What must hold of a scheduler beside what it proves of itself."""

from stagecoach.schedule.scheduler import Scheduler
from stagecoach.schedule.seniority import Seniority


def check_nothing_is_kept(scheduler: Scheduler) -> None:
    """Of requests that are gone: what is kept of each would grow for ever."""
    shadows, slots = scheduler.shadows, scheduler._cache._memory.slots
    assert not scheduler._memory._prefixes
    assert not shadows._open and not shadows._compared and not shadows.waiting
    assert not slots._pinned and not slots._bad_slots and not slots._uncommitted


def check_head(scheduler: Scheduler, block_size: int) -> None:
    """The head of the queue that is not looked up again would find no room if it were."""
    waiting, cache = scheduler._queues.waiting, scheduler._cache
    vain_attempt = scheduler._seniority._vain_attempt
    if waiting and vain_attempt == (waiting[0].request_id, cache.num_gains):
        afresh = Seniority(scheduler._queues, scheduler._memory, cache, block_size=block_size)
        assert afresh.find_start() is None, f"waits in vain: {waiting[0]}"
