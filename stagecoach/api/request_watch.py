"""The times and counts of the completions of one HTTP request, told to whoever observes them.

Owns what is noted about a completion and when. Observers are metrics and traces; what one of
them raises is logged once and stops nothing: a count that fails must not end a stream.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stagecoach.live_request import Event
from stagecoach.observe.log import get_logger
from stagecoach.outputs import CompletionOutput, RequestOutput
from stagecoach.request import SamplingParams

_log = get_logger(__name__)


@dataclass(slots=True)
class CompletionRecord:
    """One completion; times are seconds of the machine's monotonic clock, None: not yet."""

    submitted: float  # the whole request was
    first_planned: float | None = None  # the engine began to compute it
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0  # as usage counts them
    finish_reason: str | None = None  # stop, length, abort or error
    ended: float | None = None

    @property
    def first_token_seconds(self) -> float | None:
        return _between(self.submitted, self.first_token)

    @property
    def queue_seconds(self) -> float | None:
        return _between(self.submitted, self.first_planned)

    @property
    def prefill_seconds(self) -> float | None:
        return _between(self.first_planned, self.first_token)

    @property
    def decode_seconds(self) -> float | None:
        return _between(self.first_token, self.last_token)

    @property
    def inference_seconds(self) -> float | None:
        return _between(self.first_planned, self.last_token)

    @property
    def total_seconds(self) -> float | None:
        return _between(self.submitted, self.ended)


@dataclass(slots=True)
class PromptRecord:
    """One prompt and its completions."""

    num_tokens: int
    completions: list[CompletionRecord]
    num_cached_tokens: int = 0  # of the prompt, spared by a prefix hit
    is_computed: bool = False


@dataclass(slots=True)
class RequestRecord:
    """All prompts of one HTTP request."""

    params: SamplingParams
    prompts: list[PromptRecord] = field(default_factory=list)

    @property
    def completions(self) -> list[CompletionRecord]:
        return [completion for prompt in self.prompts for completion in prompt.completions]


class Observer:
    """Hears of requests, in the thread of the event loop; must return at once."""

    def answered(self, route: str, method: str, status: int) -> None:
        """An answer began, whatever the route; the route is its path with names for what varies."""

    def request_started(self, request: RequestRecord) -> None: ...

    def prompt_computed(self, prompt: PromptRecord) -> None:
        """Its first token came."""

    def tokens_came(
        self, completion: CompletionRecord, num_tokens: int, gap_seconds: float | None
    ) -> None:
        """New tokens of a completion, so long after those before; None: the first."""

    def completion_ended(self, completion: CompletionRecord) -> None: ...

    def request_ended(self, request: RequestRecord) -> None:
        """After all its completions."""

    def close(self) -> None:
        """The server ends, maybe for the second time; may block for some seconds."""


class Observers:
    """All who observe the requests of a server."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._failed: set[Observer] = set()

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def tell(self, event: Callable[[Observer], None]) -> None:
        """Call `event` for each; never raises."""
        for observer in self._observers:
            try:
                event(observer)
            except Exception:  # noqa: BLE001 - what is told of a request must not end it
                if observer not in self._failed:
                    self._failed.add(observer)
                    _log.exception("%s failed; more of its failures are not told", observer)


class RequestWatch:
    """Notes what happens to one HTTP request; belongs to the thread of the event loop."""

    def __init__(
        self, observers: Observers, outputs: Sequence[RequestOutput], params: SamplingParams
    ) -> None:
        self._observers = observers
        now = time.monotonic()
        self._request = RequestRecord(params)
        self._records: dict[int, tuple[PromptRecord, list[CompletionRecord]]] = {}
        for output in outputs:
            completions = [CompletionRecord(now) for _ in output.outputs]
            prompt = PromptRecord(len(output.prompt_token_ids), completions)
            self._request.prompts.append(prompt)
            self._records[id(output)] = (prompt, completions)
        self._is_over = False
        observers.tell(lambda observer: observer.request_started(self._request))

    def note(self, event: Event) -> None:
        """An event was absorbed."""
        output = event.request.output
        prompt, completions = self._records[id(output)]
        record = completions[event.completion]
        completion = output.outputs[event.completion]
        if record.finish_reason is not None:
            return
        now = time.monotonic()
        if record.first_planned is None and not isinstance(event.news, Exception):
            record.first_planned = event.news.first_planned
        self._note_tokens(record, completion, now)
        if record.num_tokens and not prompt.is_computed:
            prompt.is_computed = True
            prompt.num_cached_tokens = output.num_cached_tokens
            self._observers.tell(lambda observer: observer.prompt_computed(prompt))
        if completion.finish_reason is not None:
            self._end(record, completion.finish_reason, now)

    def end(self, *, has_failed: bool) -> None:
        """Nothing more comes; what has not finished was aborted, or failed."""
        if self._is_over:
            return
        self._is_over = True
        now = time.monotonic()
        for record in self._request.completions:
            if record.finish_reason is None:
                self._end(record, "error" if has_failed else "abort", now)
        self._observers.tell(lambda observer: observer.request_ended(self._request))

    def _note_tokens(
        self, record: CompletionRecord, completion: CompletionOutput, now: float
    ) -> None:
        num_new = len(completion.token_ids) - record.num_tokens
        # A stop string may take back tokens that were counted; no count goes backwards.
        if num_new <= 0:
            return
        gap_seconds = _between(record.last_token, now)
        record.num_tokens += num_new
        if record.first_token is None:
            record.first_token = now
        record.last_token = now
        self._observers.tell(lambda observer: observer.tokens_came(record, num_new, gap_seconds))

    def _end(self, record: CompletionRecord, finish_reason: str, now: float) -> None:
        record.finish_reason = finish_reason
        record.ended = now
        self._observers.tell(lambda observer: observer.completion_ended(record))


def _between(start: float | None, end: float | None) -> float | None:
    if start is None or end is None:
        return None
    # The clocks of two processes may be read in the other order.
    return max(0.0, end - start)
