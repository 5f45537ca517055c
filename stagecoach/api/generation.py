"""From the engine's thread to the event loop: the news of one HTTP request.

Owns the way of news between the two and what has been absorbed of it. A reader is told that
there is something new, not what: it looks at the outputs, which are complete up to now. So a
slow reader finds more at once, and nothing ever queues for it.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence

from stagecoach.api.error_body import HttpError
from stagecoach.api.request_watch import RequestWatch
from stagecoach.errors import (
    GrammarError,
    LethalRequestError,
    NonFiniteError,
    StagecoachError,
    error_class,
)
from stagecoach.live_request import Event, LiveRequest
from stagecoach.outputs import CompletionOutput, RequestOutput


class Generation:
    """All completions of one HTTP request; belongs to the thread of the event loop."""

    def __init__(
        self, requests: Sequence[LiveRequest], inbox: "Inbox", watch: RequestWatch
    ) -> None:
        self._requests = tuple(requests)
        self._watch = watch
        self._inbox = inbox
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def outputs(self) -> list[RequestOutput]:
        """One a prompt, each complete up to now."""
        return [request.output for request in self._requests]

    @property
    def only_completion(self) -> CompletionOutput:
        """Of a request for one."""
        [output] = self.outputs
        [completion] = output.outputs
        return completion

    @property
    def is_finished(self) -> bool:
        return all(request.output.is_finished for request in self._requests)

    def start(self, timeout_seconds: float | None = None) -> None:
        """Submit all completions; `abort` must follow.

        Args:
            timeout_seconds: after which it fails with 504, if it has not ended.

        Raises:
            StagecoachError: the engine is gone.
        """
        if timeout_seconds is not None:
            error = HttpError(
                504,
                f"the answer took longer than {timeout_seconds:g} s (--request-timeout)",
                code="timeout",
            )
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout_seconds, self.fail, error)
        try:
            for request in self._requests:
                request.start(lambda event: self._inbox.put(self, event))
        except StagecoachError as error:
            self.fail(error)
            raise

    def absorb(self, event: Event) -> None:
        """Apply one event and wake the reader."""
        if self._error is not None:
            return
        try:
            event.request.absorb(event)
        except StagecoachError as error:
            self.fail(error)
            return
        self._watch.note(event)
        completion = event.request.output.outputs[event.completion]
        if completion.error is not None:
            self.fail(_error_of(completion.error))
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End all completions; the reader gets this error."""
        self._error = self._error or error
        self.abort()
        self._news.set()

    def abort(self) -> None:
        """End whatever still runs; nothing if all is finished."""
        if self._timer is not None:
            self._timer.cancel()
        for request in self._requests:
            request.abort()
        self._watch.end(has_failed=self._error is not None)

    async def wait(self) -> None:
        """Return once all is finished.

        Raises:
            Exception: as of `changes`.
        """
        async for _ in self.changes():
            continue

    async def changes(self, silence_seconds: float | None = None) -> AsyncIterator[None]:
        """Once for all that is new since the last time, until everything has been seen.

        Args:
            silence_seconds: after so long without anything new, once for that.

        Raises:
            Exception: the request ends with it; a StagecoachError unless the mistake is ours.
        """
        while True:
            if silence_seconds is None:
                await self._news.wait()
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(silence_seconds):
                        await self._news.wait()
            self._news.clear()
            if self._error is not None:
                raise self._error
            yield
            if self.is_finished and not self._news.is_set():
                return


class Inbox:
    """Takes events from the engine's thread and hands them out in the event loop's.

    All that arrive before the loop gets to them cost it one wake-up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[tuple[Generation, Event]] = deque()
        self._lock = threading.Lock()
        self._is_scheduled = False

    def put(self, generation: Generation, event: Event) -> None:
        """From any thread."""
        with self._lock:
            self._events.append((generation, event))
            if self._is_scheduled:
                return
            self._is_scheduled = True
        # Refused once the loop has ended: nobody listens any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        with self._lock:
            events, self._events = self._events, deque()
            self._is_scheduled = False
        for generation, event in events:
            try:
                generation.absorb(event)
            except Exception as error:  # noqa: BLE001 - a mistake about one is not the others'
                generation.fail(error)


def _error_of(text: str) -> StagecoachError:
    """The error that ended a completion, which opens with the name of its class."""
    name, _, reason = text.partition(": ")
    kind = error_class(name)
    is_its_own = issubclass(kind, NonFiniteError | GrammarError | LethalRequestError)
    return kind(reason) if is_its_own else StagecoachError(text)
