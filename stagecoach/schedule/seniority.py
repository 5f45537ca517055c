"""Who has a right to memory, and who gives way: the order of seniority in pages.

Owns what is promised to whom, whether the head of the queue may start, and whose place is taken
for a page. Answers only: the scheduler admits and preempts.
"""

from collections.abc import Iterable

from stagecoach.cache.prefix_cache import Hit, PrefixCache
from stagecoach.request import Request
from stagecoach.schedule.admission import may_start, pages_to_start
from stagecoach.schedule.chunking import pages_for
from stagecoach.schedule.queues import Queues
from stagecoach.schedule.request_memory import RequestMemory, from_scratch


class Seniority:
    """Asked while a plan is made, of the queues and the memory as they are at that moment.

    A request takes pages from younger ones only, from those with nothing in flight, and never
    those promised to an older one; so the oldest running request gets what it needs, at the
    latest when the others' results are in, and pages do not go back and forth.
    """

    def __init__(
        self, queues: Queues, memory: RequestMemory, cache: PrefixCache, *, block_size: int
    ) -> None:
        self._queues = queues
        self._memory = memory
        self._cache = cache
        self._block_size = block_size
        # The last one to find no room to start, and what had become free by then.
        self._vain_attempt: tuple[int, int] | None = None

    def find_start(self) -> Hit | None:
        """Behind what the head of the queue may start now; None if memory is short.

        It starts from scratch where only a page of its hit would make room for it.
        """
        request = self._queues.waiting[0]
        attempt = (request.request_id, self._cache.num_gains)
        if attempt == self._vain_attempt:
            return None
        num_pages = self.pages_to_start(request)
        found = self._memory.find(request)
        for hit in (found, from_scratch(found)) if found.position else (found,):
            num_own_pages = num_pages - pages_for(hit.position, self._block_size)
            if may_start(
                has_slot=self._cache.can_take_slot(),
                num_free_pages=self._cache.num_free_pages,
                num_needed_pages=num_own_pages + hit.num_taken_pages,
            ):
                return hit
        self._vain_attempt = attempt
        return None

    def may_shadow_start(self, shadow: Request) -> bool:
        """Whether there is a slot, and all pages of a shadow beside what its seniors may want."""
        num_free_pages = self._cache.num_free_pages - self.promised_pages(shadow)
        num_pages = pages_for(shadow.num_tokens, self._block_size)
        return self._cache.can_take_slot() and num_free_pages >= num_pages

    def find_victims(self, request: Request, num_pages: int) -> list[Request] | None:
        """Who has to go so that so many pages are free for this request, the youngest first.

        None if it must wait for results; then nobody has to go.
        """
        available = num_available = self._cache.num_free_pages - self.promised_pages(request)
        juniors = self._queues.idle_juniors(request)
        victims: list[Request] = []
        while available < num_pages:
            victim = next(juniors, None)
            if victim is None:
                return None
            victims.append(victim)
            # Pages that they share with each other become free with the last of them.
            pages = [page for victim in victims for page in victim.page_ids]
            available = num_available + self._cache.num_exclusive_pages(pages)
        return victims

    def pages_to_start(self, request: Request) -> int:
        """What its admission promises, as `pages_to_start` has it."""
        return pages_to_start(
            num_tokens=request.num_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            block_size=self._block_size,
        )

    def promised_pages(self, request: Request) -> int:
        """Pages promised to senior requests between two chunks, and not yet taken."""
        return self._promised(self._queues.prefilling_seniors(request))

    def all_promised_pages(self) -> int:
        """Pages promised to any request between two chunks, and not yet taken."""
        return self._promised(self._queues.prefilling.values())

    def _promised(self, requests: Iterable[Request]) -> int:
        return sum(max(0, self.pages_to_start(item) - len(item.page_ids)) for item in requests)
