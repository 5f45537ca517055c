"""A request in the engine: the fan-out into its n completions, and their news put together.

Owns which completions are submitted when, and what is aborted. Knows neither prompts nor the
caller's waiting: news goes through whatever queue the caller has.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from stagecoach.engine.client import EngineClient, Sink
from stagecoach.errors import StagecoachError
from stagecoach.outputs import RequestAssembler, RequestOutput
from stagecoach.request import SamplingParams
from stagecoach.schedule.commit import Progress


class Event(NamedTuple):
    """News of one completion of one request."""

    request: "LiveRequest"
    completion: int
    news: Progress | StagecoachError


class LiveRequest:
    """A request whose n completions run in the engine.

    With a prefix cache the first of them leads: the others are submitted once the prompt is
    computed, so that they find it there.
    """

    def __init__(
        self,
        client: EngineClient,
        assembler: RequestAssembler,
        params: SamplingParams,
        submit: Callable[..., int],
        *,
        has_leader: bool,
    ) -> None:
        """`submit` takes parameters, a sink and an id; the prompt is known to it."""
        self._client = client
        self._assembler = assembler
        self._params = params
        self._submit = submit
        self._has_leader = has_leader and not params.skip_reading_prefix_cache
        # By completion; None: it has ended.
        self._ids: list[int | None] = []
        self._followers: list[Callable[[], None]] = []

    @property
    def output(self) -> RequestOutput:
        return self._assembler.output

    def start(self, put: Callable[[Event], None]) -> None:
        """Submit the completions; their news goes to `put`, in another thread."""
        self._assembler.start_clock()
        # Ids first: seeds follow from them, whenever a completion is submitted.
        self._ids.extend(self._client.new_request_id() for _ in range(self._params.n))
        starts = [functools.partial(self._start_one, index, put) for index in range(self._params.n)]
        num_at_once = 1 if self._has_leader else self._params.n
        self._followers.extend(starts[num_at_once:])
        for start in starts[:num_at_once]:
            start()

    def _start_one(self, index: int, put: Callable[[Event], None]) -> None:
        params = self._params
        one = msgspec.structs.replace(
            params,
            n=1,
            seed=None if params.seed is None else params.seed + index,
            # They are the same for all; the first says them.
            prompt_logprobs=None if index else params.prompt_logprobs,
        )
        self._submit(one, self._sink(index, put), request_id=self._ids[index])

    def _sink(self, index: int, put: Callable[[Event], None]) -> Sink:
        return lambda news: put(Event(self, index, news))

    def absorb(self, event: Event) -> None:
        """Apply one event.

        Raises:
            StagecoachError: the event is an error.
        """
        if isinstance(event.news, StagecoachError):
            self._ids[event.completion] = None
            raise event.news
        self._assembler.absorb(event.completion, event.news)
        if event.news.finish_reason is not None:
            self._ids[event.completion] = None
        elif self.output.outputs[event.completion].finish_reason is not None:
            # A stop string was found; the engine does not know of text.
            self._abort(event.completion)
        if event.news.token_ids or event.news.finish_reason is not None:
            followers, self._followers = self._followers, []
            for start in followers:
                start()

    def abort(self) -> None:
        """End whatever still runs; nothing if all is finished."""
        self._followers.clear()
        for index in range(len(self._ids)):
            self._abort(index)

    def _abort(self, index: int) -> None:
        request_id = self._ids[index]
        if request_id is not None:
            self._client.abort([request_id])
            self._ids[index] = None
