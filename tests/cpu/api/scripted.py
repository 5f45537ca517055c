"""A server over an engine that says what a test wants, when it wants."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from stagecoach.api.app import make_app
from stagecoach.api.engine_service import EngineService
from stagecoach.api.settings import ServerSettings
from stagecoach.config.engine import EngineConfig
from stagecoach.engine.client import EngineClient, Sink
from stagecoach.engine.messages import EngineReady, EngineStats, PlanTrace, Timeline
from stagecoach.errors import EngineDeadError, RequestError, StagecoachError
from stagecoach.llm import open_model
from stagecoach.request import FinishReason, SamplingParams, TokenLogprobs
from stagecoach.schedule.commit import Progress
from stagecoach.text.tokenizer import Tokenizer
from tests.cpu.api.conftest import MODEL, Server
from tests.engine_stats import engine_stats


class ScriptedEngine:
    """In the place of an EngineClient: no model, no process.

    Attributes:
        open: sinks of requests that have not ended, by id.
        submitted: what was asked for, in order.
        refusal: what the engine loop says to the next request, once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.open: dict[int, Sink] = {}
        self.submitted: list[tuple[Sequence[int], SamplingParams]] = []
        self.aborted: list[int] = []
        self.failure: StagecoachError | None = None
        self.recovering_from: str | None = None
        self.is_closed_in_order: bool | None = None
        self.stats_error: EngineDeadError | None = None
        self.refusal: RequestError | None = None
        self.num_steps = 0
        self.recovery_seconds = 0.0
        self.plans: tuple[PlanTrace, ...] = ()
        self.asked_steps: list[int] = []  # of the timeline
        self.may_be_ready = threading.Event()
        self.may_be_ready.set()
        self._num_ids = 0
        self._pieces: list[tuple[int, ...]] = []
        self._reason = FinishReason.STOP
        self._is_talking = self._is_gradual = False

    @property
    def num_aborted(self) -> int:
        return len(self.aborted)

    def say(
        self,
        token_ids: Sequence[int],
        *,
        size: int = 3,
        reason: str = "stop",
        is_gradual: bool = False,
    ) -> None:
        """Answer each request at once with these tokens, `size` at a time.

        Args:
            is_gradual: one after the other, so that a stream is read while it comes.
        """
        self._pieces = [
            tuple(token_ids[start : start + size]) for start in range(0, len(token_ids), size)
        ]
        self._reason = FinishReason(reason)
        self._is_talking = True
        self._is_gradual = is_gradual

    def listen(self) -> None:
        """Answer nothing by itself any more."""
        self._is_talking = False

    def tell(self, request_id: int, **fields: Any) -> None:
        """News of a request."""
        sink = self.open[request_id]
        if "finish_reason" in fields:
            del self.open[request_id]
        sink(Progress(request_id=request_id, **fields))

    def die(self, error: StagecoachError) -> None:
        self.failure = error
        sinks = list(self.open.values())
        self.open.clear()
        for sink in sinks:
            sink(error)

    # What EngineClient has.

    def wait_until_ready(self) -> None:
        self.may_be_ready.wait()
        if self.failure is not None:
            raise self.failure

    ready = EngineReady(num_pages=1, num_slots=1, load_seconds=0.0)

    def check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, cache_salt: str | None
    ) -> None:
        if not prompt_token_ids:
            raise RequestError("prompt", "must hold at least one token")
        params.check(vocab_size=self.tokenizer.vocab_size, max_model_len=512)

    def new_request_id(self) -> int:
        self._num_ids += 1
        return self._num_ids

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        request_id: int,
        cache_salt: str | None,
        checkpoint_position: int | None,
        is_checked: bool,
    ) -> int:
        if self.failure is not None:
            raise self.failure
        self.submitted.append((prompt_token_ids, params))
        self.open[request_id] = sink
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            self.open.pop(request_id)(refusal)
        elif self._is_talking:
            news = self._news(params)
            if self._is_gradual:
                self._tell_next(request_id, news)
            else:
                for fields in news:
                    self.tell(request_id, **fields)
        return request_id

    def _news(self, params: SamplingParams) -> Iterator[dict[str, Any]]:
        """What a request is told, piece by piece."""
        for number, piece in enumerate(self._pieces, start=1):
            fields: dict[str, Any] = {"token_ids": piece}
            if params.logprobs is not None:
                fields["logprobs"] = tuple(TokenLogprobs(id_, -0.5, 1) for id_ in piece)
            if number == len(self._pieces):
                fields["finish_reason"] = self._reason
            yield fields

    def _tell_next(self, request_id: int, news: Iterator[dict[str, Any]]) -> None:
        """One piece in each turn of the event loop, as long as somebody listens."""
        fields = next(news, None)
        if fields is not None and request_id in self.open:
            self.tell(request_id, **fields)
            asyncio.get_running_loop().call_soon(self._tell_next, request_id, news)

    def abort(self, request_ids: Sequence[int]) -> None:
        self.aborted.extend(request_ids)
        for request_id in request_ids:
            self.open.pop(request_id, None)

    def reset_prefix_cache(self) -> None:
        return

    def stats(self, timeout_seconds: float) -> EngineStats:
        if self.failure is not None:
            raise self.failure
        if self.stats_error is not None:
            raise self.stats_error
        return engine_stats(
            num_steps=self.num_steps,
            num_running=len(self.open),
            recovery_seconds=self.recovery_seconds,
        )

    def timeline(self, first_step: int, timeout_seconds: float) -> Timeline:
        self.asked_steps.append(first_step)
        if self.failure is not None:
            raise self.failure
        if self.stats_error is not None:
            raise self.stats_error
        return Timeline(
            query_id=0,
            now=float(self.num_steps),
            plans=tuple(plan for plan in self.plans if plan.step >= first_step),
            requests=(),
            slot_states=bytes((0, 1, 2)),
        )

    def close(self, *, in_order: bool = True) -> None:
        self.is_closed_in_order = in_order
        self.may_be_ready.set()
        if self.failure is None:
            self.die(EngineDeadError("the engine was closed"))


@contextmanager
def scripted_server(
    folder: Path,
    *,
    is_loaded: bool = True,
    start: Callable[[ScriptedEngine], None] | None = None,
    stall_timeout_seconds: float = 60.0,
    **settings: Any,
) -> Iterator[tuple[Server, ScriptedEngine]]:
    """A server whose engine is scripted.

    Args:
        is_loaded: else loading is the caller's to begin.
        start: called when the engine is to start.
    """
    config, tokenizer = open_model(
        EngineConfig(model=str(folder), max_num_seqs=2, max_model_len=512, num_threads=1)
    )
    engine = ScriptedEngine(tokenizer)

    def start_engine(*_: Any) -> EngineClient:
        if start is not None:
            start(engine)
        return cast(EngineClient, engine)

    service = EngineService(
        config,
        tokenizer,
        max_queue_requests=settings.pop("max_queue_requests", 20),
        stall_timeout_seconds=stall_timeout_seconds,
        request_timeout_seconds=settings.get("request_timeout_seconds"),
        start_engine=start_engine,
    )
    app = make_app(service, ServerSettings(served_model_names=(MODEL,), **settings), "1.2.3")
    server = Server(app, service)
    if is_loaded:
        server.run(service.load())
    yield server, engine
    assert service.num_open_requests == service.counts.num_completions == 0
    assert not engine.open
    server.runner.close()
