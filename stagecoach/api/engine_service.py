"""The engine as the server has it: loading, serving, recovering, draining or dead.

Owns the engine client, what is open, and the judgement whether the server is well. Knows
requests only as generations.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from stagecoach.api.condition import Condition, LoadShare, StepWatch
from stagecoach.api.error_body import HttpError, NotServingError
from stagecoach.api.generation import Generation, Inbox
from stagecoach.api.open_counts import OpenCounts
from stagecoach.api.request_watch import Observers, RequestWatch
from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.client import EngineClient
from stagecoach.engine.messages import CaptureProgress, EngineStats, LoadProgress, Timeline
from stagecoach.errors import EngineDeadError, RequestError, StagecoachError
from stagecoach.live_request import LiveRequest
from stagecoach.observe.log import get_logger
from stagecoach.outputs import Detokenizer, RequestAssembler
from stagecoach.request import SamplingParams
from stagecoach.text.tokenizer import Tokenizer

_log = get_logger(__name__)

# How long the engine loop may take to answer a question.
_STATS_SECONDS = 5.0

# Starts an engine and returns at once; `wait_until_ready` of what it returns may block.
StartEngine = Callable[
    [ResolvedConfig, Callable[[LoadProgress | CaptureProgress], None]], EngineClient
]


class Prompt(NamedTuple):
    """One prompt, and how its completions are read."""

    token_ids: Sequence[int]
    text: str | None = None
    checkpoint_position: int | None = None  # tokens that later prompts are likely to share
    make_detokenizer: Callable[[], Detokenizer] | None = None  # None: plain text


class EngineService:
    """Starts an engine beside a running event loop, and serves the routes from it."""

    def __init__(
        self,
        config: ResolvedConfig,
        tokenizer: Tokenizer,
        *,
        max_queue_requests: int,
        stall_timeout_seconds: float,
        start_engine: StartEngine | None = None,
        request_timeout_seconds: float | None = None,
        counts: OpenCounts | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.observers = Observers()
        self.counts = counts or OpenCounts()
        self._request_timeout = request_timeout_seconds
        self._max_open = config.engine.max_num_seqs + max_queue_requests
        self._start_engine = start_engine or functools.partial(EngineClient, is_awaited=False)
        self._client: EngineClient | None = None
        self._is_ready = False
        self._is_draining = False
        self._is_closed = False
        self._failure: StagecoachError | None = None
        self._loaded = LoadShare()
        self._inbox: Inbox | None = None
        self._open: set[Generation] = set()
        self._progress = StepWatch(stall_timeout_seconds)
        self._question: asyncio.Task[EngineStats] | None = None

    @property
    def failure(self) -> StagecoachError | None:
        """Why nothing is served any more, or None."""
        if self._failure is None and self._client is not None:
            return self._client.failure
        return self._failure

    @property
    def is_loaded(self) -> bool:
        """Whether the engine has served, be it dead by now."""
        return self._is_ready

    @property
    def client(self) -> EngineClient | None:
        """None until the engine was started."""
        return self._client

    @property
    def num_open_requests(self) -> int:
        """Of all API processes."""
        return self.counts.num_requests

    async def load(self) -> None:
        """Start the engine; returns once it serves.

        Raises:
            ConfigError, CheckpointError, EngineDeadError: why it does not.
        """
        self._inbox = Inbox(asyncio.get_running_loop())
        try:
            self._client = await asyncio.to_thread(
                self._start_engine, self.config, self._loaded.note
            )
            if self._is_closed:
                await asyncio.to_thread(self._client.close)
            await asyncio.to_thread(self._client.wait_until_ready)
        except StagecoachError as error:
            self._failure = error
            raise
        self._is_ready = True

    def close(self, *, in_order: bool = True) -> None:
        """End the engine, also one that still loads; blocks while its processes end."""
        self._is_closed = True
        if self._client is not None:
            self._client.close(in_order=in_order)
        self.observers.tell(lambda observer: observer.close())

    def drain(self, timeout_seconds: float) -> None:
        """Take nothing new; what is open ends by itself, or with an error after that time."""
        self._is_draining = True
        if self._open:
            _log.info("ending: %d requests have %g s to finish", len(self._open), timeout_seconds)
        asyncio.get_running_loop().call_later(timeout_seconds, self.end_open)

    def end_open(self) -> None:
        """End what is open with an error."""
        error = NotServingError("the server ended before the answer did", code="shutting_down")
        for generation in list(self._open):
            generation.fail(error)

    @contextlib.contextmanager
    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, cache_salt: str | None
    ) -> Iterator[Generation]:
        """Start `params.n` completions of each prompt; leaving aborts those that still run.

        Raises:
            RequestError: a prompt or a parameter is refused; nothing was started.
            NotServingError, QueueFullError: not now.
            EngineDeadError: the engine is gone.
        """
        client = self._serving_client()
        for number, prompt in enumerate(prompts):
            _check(client, prompt, params, cache_salt, number if len(prompts) > 1 else None)
        num_completions = len(prompts) * params.n
        self.counts.check_room(num_completions, self._max_open)
        assert self._inbox is not None, "set before the engine serves"
        live = [self._live_request(client, prompt, params, cache_salt) for prompt in prompts]
        watch = RequestWatch(self.observers, [request.output for request in live], params)
        generation = Generation(live, self._inbox, watch)
        self.counts.add(1, num_completions)
        self._open.add(generation)
        try:
            generation.start(self._request_timeout)
            yield generation
        finally:
            generation.abort()
            self._open.discard(generation)
            self.counts.add(-1, -num_completions)

    def _live_request(
        self,
        client: EngineClient,
        prompt: Prompt,
        params: SamplingParams,
        cache_salt: str | None,
    ) -> LiveRequest:
        assembler = RequestAssembler(
            self.tokenizer, prompt.text, prompt.token_ids, params, prompt.make_detokenizer
        )
        submit = functools.partial(
            client.submit,
            prompt.token_ids,
            cache_salt=cache_salt,
            checkpoint_position=prompt.checkpoint_position,
            is_checked=True,
        )
        is_cached = self.config.engine.enable_prefix_caching
        return LiveRequest(client, assembler, params, submit, has_leader=is_cached)

    def _serving_client(self) -> EngineClient:
        if self._is_draining and self.failure is None:
            raise NotServingError("the server is ending", code="shutting_down")
        return self.answering_client()

    def answering_client(self) -> EngineClient:
        """The engine, also while the server drains.

        Raises:
            NotServingError: it does not serve yet.
            EngineDeadError: it is gone.
        """
        failure = self.failure
        if failure is not None:
            raise _as_dead(failure)
        if self._client is None or not self._is_ready:
            raise NotServingError(f"the model is loading{self._loaded}", code="loading")
        return self._client

    async def stats(self) -> EngineStats:
        """Counts of the engine, also while the server drains.

        Raises:
            NotServingError: the engine does not serve yet.
            EngineDeadError: it is gone, or did not answer in time.
        """
        return await self._ask(self.answering_client())

    async def known_stats(self) -> EngineStats | None:
        """The same; None where the engine does not answer."""
        with contextlib.suppress(NotServingError, EngineDeadError):
            return await self.stats()
        return None

    async def timeline(self, first_step: int) -> Timeline:
        """The latest plans from that step on, also while the server drains.

        Raises:
            NotServingError, EngineDeadError: as of `stats`.
        """
        client = self.answering_client()
        return await asyncio.to_thread(client.timeline, first_step, _STATS_SECONDS)

    async def _ask(self, client: EngineClient) -> EngineStats:
        """Those who ask at the same time share one question: an engine that does not answer
        would keep a thread waiting for each."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(asyncio.to_thread(client.stats, _STATS_SECONDS))
        return await asyncio.shield(self._question)

    def reset_prefix_cache(self) -> None:
        """Requests from now on find nothing that is cached now.

        Raises:
            NotServingError, EngineDeadError: as of `generate`.
        """
        self._serving_client().reset_prefix_cache()

    def condition(self) -> Condition:
        """Whether the server takes requests, as far as is known without asking the engine."""
        failure = self.failure
        if failure is not None:
            return Condition("dead", f"{type(failure).__name__}: {failure}")
        if self._is_draining:
            return Condition("draining", f"{len(self._open)} requests are open")
        if not self._is_ready:
            return Condition("loading", f"the model is loading{self._loaded}")
        reason = self._client.recovering_from if self._client is not None else None
        return Condition("ok") if reason is None else Condition("recovering", reason)

    async def health(self) -> Condition:
        """The same, and whether the engine loop answers and gets on with its work."""
        condition = self.condition()
        if condition.status not in ("ok", "draining") or self._client is None:
            return condition
        if self._client.recovering_from is not None:
            # It drains, and no step can come yet.
            return condition
        try:
            stats = await self._ask(self._client)
        except EngineDeadError as error:
            return self.condition() if self.failure else Condition("stalled", str(error))
        stalled_seconds = self._progress.note(stats)
        if stalled_seconds is None:
            return condition
        num_requests = stats.num_waiting + stats.num_running
        return Condition(
            "stalled", f"no step for {stalled_seconds:.0f} s with {num_requests} requests"
        )


def _as_dead(failure: StagecoachError) -> StagecoachError:
    """For one who asks later: a new error, since raising one writes into it."""
    if isinstance(failure, EngineDeadError):
        return type(failure)(str(failure))
    # It never came up, for a reason that is nobody's who asks now.
    return HttpError(503, f"{type(failure).__name__}: {failure}", code="engine_dead")


def _check(
    client: EngineClient,
    prompt: Prompt,
    params: SamplingParams,
    cache_salt: str | None,
    number: int | None,
) -> None:
    try:
        client.check(prompt.token_ids, params, cache_salt)
    except RequestError as error:
        if number is None:
            raise
        raise error.about(error.field, f"(prompt {number})") from None
