"""Which requests wait, and how far those that run have come: the scheduler's queues.

Owns their order and who is senior to whom. A request is in `waiting` or in `running`; a running
one is in `prefilling` (chunks left to plan), in `ready` (its next window can be planned), or has
a sample in flight. Knows neither memory nor plans.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice

from stagecoach.cache.prefix_cache import Hit
from stagecoach.request import Request


class Queues:
    """The requests that are alive."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()  # by seniority
        self.running: dict[int, Request] = {}  # in order of admission
        self.prefilling: dict[int, Request] = {}
        self.ready: dict[int, Request] = {}  # in order of readiness

    def start(self, request: Request) -> None:
        """The head of the queue gets its place."""
        assert request is self.waiting[0], f"overtakes: {request}"
        self.waiting.popleft()
        self.running[request.request_id] = request
        self.prefilling[request.request_id] = request

    def start_shadow(self, request: Request) -> None:
        """A request of the engine's own gets a place; it never waits here."""
        assert request.is_shadow, f"jumps the queue: {request}"
        self.running[request.request_id] = self.prefilling[request.request_id] = request

    def state_of(self, request: Request) -> str:
        """Which one it is of waiting, prefilling, sampling and ready."""
        for name, queue in (("prefilling", self.prefilling), ("ready", self.ready)):
            if request.request_id in queue:
                return name
        return "sampling" if request.request_id in self.running else "waiting"

    def oldest(self, count: int) -> list[tuple[Request, str]]:
        """Up to `count` of clients with their states: those that run, then those that wait."""
        alive = (item for item in chain(self.running.values(), self.waiting) if not item.is_shadow)
        return [(request, self.state_of(request)) for request in islice(alive, count)]

    def chunk_order(self) -> list[Request]:
        """Requests between two chunks, those that nobody waits for last."""
        return sorted(self.prefilling.values(), key=lambda request: request.is_shadow)

    def prompt_spans(self, num_seats: int) -> Iterator[tuple[int, int]]:
        """Tokens [start, end) that are still to be planned: of those that run, then of those that
        wait, as many as there are seats for."""
        for request in self.prefilling.values():
            yield request.num_computed, request.num_tokens
        for request in islice(self.waiting, max(0, num_seats - len(self.running))):
            yield 0, request.num_tokens

    def num_open_tokens(self, start: Hit | None) -> int:
        """Tokens of prompts that are still to be planned.

        Args:
            start: where the head of the queue may start now; None: not yet.
        """
        prefilling = self.prefilling.values()
        num_tokens = sum(request.num_tokens - request.num_computed for request in prefilling)
        if start is not None:
            num_tokens += self.waiting[0].num_tokens - start.position
        return num_tokens

    def stop(self, request: Request) -> None:
        """It loses its place, wherever it is."""
        if request.request_id not in self.running:
            self.waiting.remove(request)
            return
        for queue in (self.running, self.prefilling, self.ready):
            queue.pop(request.request_id, None)

    def wait_again(self, request: Request) -> None:
        """Back to its place by seniority among those that wait."""
        place = 0
        while (
            place < len(self.waiting) and self.waiting[place].arrival_index < request.arrival_index
        ):
            place += 1
        self.waiting.insert(place, request)

    def idle_juniors(self, request: Request) -> Iterator[Request]:
        """Running requests younger than this one with nothing in flight, the youngest first.

        The plan being made has taken its windows out of `ready`.
        """
        for other in sorted(self.running.values(), key=lambda other: -other.arrival_index):
            if other.arrival_index <= request.arrival_index:
                return
            is_idle = other.request_id in self.ready or other.request_id in self.prefilling
            if is_idle and not other.num_plans_in_flight:
                yield other

    def prefilling_seniors(self, request: Request) -> Iterator[Request]:
        """Requests between two chunks that are older than this one."""
        for other in self.prefilling.values():
            if other.arrival_index < request.arrival_index:
                yield other
