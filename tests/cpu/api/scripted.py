"""A server over an engine that says what a test wants, when it wants."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from stagecoach.api.app import make_app
from stagecoach.api.engine_service import EngineService
from stagecoach.api.settings import ServerSettings
from stagecoach.config import EngineConfig
from stagecoach.engine.client import EngineClient, Sink
from stagecoach.engine.messages import EngineReady, EngineStats
from stagecoach.errors import EngineDeadError, RequestError, StagecoachError
from stagecoach.llm import open_model
from stagecoach.request import FinishReason, SamplingParams
from stagecoach.schedule.commit import Progress
from stagecoach.text.tokenizer import Tokenizer
from tests.cpu.api.conftest import MODEL, Server


class ScriptedEngine:
    """In the place of an EngineClient: no model, no process.

    Attributes:
        open: sinks of requests that have not ended, by id.
        submitted: what was asked for, in order.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.open: dict[int, Sink] = {}
        self.submitted: list[tuple[Sequence[int], SamplingParams]] = []
        self.aborted: list[int] = []
        self.failure: StagecoachError | None = None
        self.is_closed_in_order: bool | None = None
        self.stats_error: EngineDeadError | None = None
        self.num_steps = 0
        self.may_be_ready = threading.Event()
        self.may_be_ready.set()
        self._num_ids = 0
        self._pieces: list[tuple[int, ...]] = []
        self._reason = FinishReason.STOP
        self._is_talking = False

    @property
    def num_aborted(self) -> int:
        return len(self.aborted)

    def say(self, token_ids: Sequence[int], *, size: int = 3, reason: str = "stop") -> None:
        """Answer each request at once with these tokens, `size` at a time."""
        self._pieces = [
            tuple(token_ids[start : start + size]) for start in range(0, len(token_ids), size)
        ]
        self._reason = FinishReason(reason)
        self._is_talking = True

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
    ) -> int:
        if self.failure is not None:
            raise self.failure
        self.submitted.append((prompt_token_ids, params))
        self.open[request_id] = sink
        if self._is_talking:
            for number, piece in enumerate(self._pieces, start=1):
                ending = {"finish_reason": self._reason} if number == len(self._pieces) else {}
                self.tell(request_id, token_ids=piece, **ending)
        return request_id

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
        return EngineStats(
            query_id=0,
            num_steps=self.num_steps,
            num_waiting=0,
            num_running=len(self.open),
            num_preemptions=0,
            num_prompt_tokens=0,
            num_generated_tokens=0,
            num_pages=1,
            num_free_pages=1,
            num_slots=1,
            num_free_slots=1,
            loop_seconds=0.0,
            forward_seconds=0.0,
            step_seconds=0.0,
            stage_busy_seconds=(0.0,),
            speculation=None,
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
        start_engine=start_engine,
    )
    app = make_app(service, ServerSettings(served_model_names=(MODEL,), **settings), "1.2.3")
    server = Server(app, service)
    if is_loaded:
        server.run(service.load())
    yield server, engine
    assert service.num_open_requests == service.num_open_completions == 0
    assert not engine.open
    server.runner.close()
