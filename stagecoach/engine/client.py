"""The engine as its users see it: submit, abort, stream, close.

Owns the started engine and one receiving thread, which hands each request's progress to the
sink that came with it. Knows no text.
"""

import atexit
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.child_processes import Ending
from stagecoach.engine.launch import ProcessEngine, RunningEngine, launch
from stagecoach.engine.messages import (
    Abort,
    CaptureProgress,
    EngineFailed,
    EngineReady,
    EngineStats,
    ForgetClient,
    GetStats,
    GetTimeline,
    LoadProgress,
    Outputs,
    ProfileAnswer,
    RecoveryBegan,
    RecoveryEnded,
    RequestRefused,
    ResetPrefixCache,
    RespawnWorkers,
    StartProfile,
    StopProfile,
    Submit,
    Timeline,
    ToClient,
    ToEngine,
    WorkersEnded,
)
from stagecoach.engine.ports import CLIENT_SHIFT
from stagecoach.errors import (
    EngineDeadError,
    HostLostError,
    RequestError,
    StagecoachError,
    WorkerDiedError,
    error_class,
)
from stagecoach.request import MAX_SEED, SamplingParams, check_prompt
from stagecoach.schedule.commit import Progress

# Called in the receiving thread, in order, until the progress that has a finish reason or
# an error: must return at once.
Sink = Callable[[Progress | StagecoachError], None]

_Answer = TypeVar("_Answer", EngineStats, Timeline, ProfileAnswer)

_POLL_SECONDS = 0.1
# After a failure was reported, how long to wait for the watcher's word on who was killed.
_CAUSE_SECONDS = 1.0

_PARAMETER_DECODERS = {
    field.name: msgspec.msgpack.Decoder(field.type)
    for field in msgspec.structs.fields(SamplingParams)
}


class EngineClient:
    """Starts an engine and serves requests through it; closing ends all its processes.

    Or serves them through one that another process owns; closing then leaves it running.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        on_load_progress: Callable[[LoadProgress | CaptureProgress], None] | None = None,
        *,
        is_awaited: bool = True,
        attached_to: RunningEngine | None = None,
    ) -> None:
        """Start the engine and wait until it serves, or leave that to `wait_until_ready`.

        Args:
            attached_to: use this one instead of starting one.

        Raises:
            ConfigError, CheckpointError, EngineDeadError: why it does not.
        """
        self.config = config
        self._on_load_progress = on_load_progress
        # The garbage collector may end a stream, which aborts, while its thread holds the lock.
        self._lock = threading.RLock()
        self._sinks: dict[int, Sink] = {}
        self._questions: dict[int, _Question] = {}
        # Requests have numbers of their own: seeds are derived from them.
        self._request_numbers = itertools.count(1)
        self._query_ids = itertools.count(1)
        self._failure: StagecoachError | None = None
        self._is_closed = False
        self._last_heard = time.monotonic()
        self._has_pinged = False
        self._ready = threading.Event()
        self.ready: EngineReady | None = None
        self._recovering_from: str | None = None
        self._engine = attached_to or launch(config)
        if config.engine.recover and isinstance(self._engine, ProcessEngine):
            self._engine.endings_handler = self._report_endings
        self._receiver = threading.Thread(target=self._receive, name="engine client", daemon=True)
        self._receiver.start()
        # A script that ends without close() must not leave by force what can end in order.
        atexit.register(self.close)
        if is_awaited:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Return once the engine serves; closed if it does not.

        Raises:
            ConfigError, CheckpointError, EngineDeadError: why it does not.
        """
        try:
            self._ready.wait()
        except BaseException:
            self.close()
            raise
        failure = self.failure
        if failure is not None:
            self.close()
            raise failure

    @property
    def engine(self) -> RunningEngine:
        return self._engine

    @property
    def recovering_from(self) -> str | None:
        """Why nothing is computed at present, while lost workers are brought back; or None."""
        return self._recovering_from

    @property
    def failure(self) -> StagecoachError | None:
        """Why the engine no longer serves, or None."""
        return self._failure

    def check(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        cache_salt: str | None = None,
    ) -> None:
        """Refuse what could never be served; touches nothing.

        Raises:
            RequestError: names the field.
        """
        _check_types(prompt_token_ids, params)
        _check_salt(cache_salt)
        vocab_size = self.config.model.vocab_size
        check_prompt(
            tuple(prompt_token_ids), vocab_size=vocab_size, limit=self.config.max_model_len - 1
        )
        params.check(vocab_size=vocab_size, max_model_len=self.config.max_model_len)
        if params.seed is not None and params.seed + params.n - 1 > MAX_SEED:
            raise RequestError("seed", f"seed + n - 1 must be at most {MAX_SEED}")

    def new_request_id(self) -> int:
        """An id for a request that is submitted later; its derived seed follows from it."""
        return self._engine.client << CLIENT_SHIFT | next(self._request_numbers)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        request_id: int | None = None,
        cache_salt: str | None = None,
        checkpoint_position: int | None = None,
        is_checked: bool = False,
    ) -> int:
        """Queue one completion (`params.n` is the caller's business); returns its id.

        Args:
            request_id: of `new_request_id`; None: a new one.
            cache_salt: only requests with the same one share cached prefixes.
            checkpoint_position: prompt tokens that later prompts are likely to share.
            is_checked: `check` has taken the prompt and these parameters, for any of its n.

        Raises:
            RequestError: the request is refused.
            EngineDeadError: the engine is gone.
        """
        if not is_checked:
            self.check(prompt_token_ids, params, cache_salt)
        request_id = self.new_request_id() if request_id is None else request_id
        seed = params.seed if params.seed is not None else self._derived_seed(request_id)
        with self._lock:
            self._raise_failure()
            self._sinks[request_id] = sink
        self._engine.port.send(
            Submit(
                request_id=request_id,
                prompt_token_ids=tuple(prompt_token_ids),
                params=params,
                seed=seed,
                cache_salt=cache_salt,
                checkpoint_position=checkpoint_position,
            )
        )
        return request_id

    def abort(self, request_ids: Sequence[int]) -> None:
        """Forget requests; their sinks hear nothing more."""
        with self._lock:
            for request_id in request_ids:
                self._sinks.pop(request_id, None)
        if self._failure is None:
            self._engine.port.send(Abort(request_ids=tuple(request_ids)))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: requests submitted from now on find none of them.

        Raises:
            EngineDeadError: the engine is gone.
        """
        with self._lock:
            self._raise_failure()
        self._engine.port.send(ResetPrefixCache())

    def stats(self, timeout_seconds: float = 5.0) -> EngineStats:
        """Counts of the engine.

        Raises:
            EngineDeadError: the engine is gone, or did not answer in time.
        """
        return self._ask(EngineStats, GetStats, timeout_seconds)

    def timeline(self, first_step: int = 0, timeout_seconds: float = 5.0) -> Timeline:
        """The latest plans from step `first_step` on, and what is alive now.

        Raises:
            EngineDeadError: the engine is gone, or did not answer in time.
        """
        return self._ask(Timeline, GetTimeline, timeout_seconds, first_step=first_step)

    def start_profile(self, folder: str, timeout_seconds: float) -> ProfileAnswer:
        """Record what the workers execute, each of them into a file of its own in `folder`.

        Raises:
            EngineDeadError: the engine is gone, or did not answer in time.
        """
        return self._ask(ProfileAnswer, StartProfile, timeout_seconds, folder=folder)

    def stop_profile(self, timeout_seconds: float) -> ProfileAnswer:
        """End the recording; the answer comes when all files are written.

        Raises:
            EngineDeadError: the engine is gone, or did not answer in time.
        """
        return self._ask(ProfileAnswer, StopProfile, timeout_seconds)

    def _ask(
        self,
        answer_type: type[_Answer],
        question_type: Callable[..., ToEngine],
        timeout_seconds: float,
        **fields: Any,
    ) -> _Answer:
        query_id = next(self._query_ids)
        question = _Question()
        with self._lock:
            self._raise_failure()
            self._questions[query_id] = question
        self._engine.port.send(question_type(query_id=query_id, **fields))
        question.is_over.wait(timeout_seconds)
        with self._lock:
            self._questions.pop(query_id, None)
            if question.answer is None:
                self._raise_failure()
                raise EngineDeadError(f"the engine loop did not answer in {timeout_seconds:g} s")
        answer = question.answer
        assert isinstance(answer, answer_type), f"not what was asked for: {answer}"
        return answer

    def close(self, *, in_order: bool = True) -> None:
        """End the engine; requests still waiting end with an EngineDeadError.

        Args:
            in_order: let its processes end by themselves, for some seconds.
        """
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._receiver.join()
        # While workers load there is nothing to lose, and they may be deaf.
        is_serving = self.ready is not None and self._recovering_from is None
        self._engine.stop(in_order=in_order and is_serving)
        self._fail(EngineDeadError("the engine was closed"))

    def forget_client(self, client: int) -> None:
        """End all requests of a client whose process has ended; nothing of it is taken any more.

        Args:
            client: its number, which no other client may have from now on.
        """
        if self._failure is None:
            self._engine.port.send(ForgetClient(client=client))

    def _derived_seed(self, request_id: int) -> int:
        # Any injective map will do, over all clients: noise is keyed by all 64 bits.
        return ((self.config.engine.seed << 32) + request_id) & MAX_SEED

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
        if self._is_closed:
            raise EngineDeadError("the engine was closed")

    def _receive(self) -> None:
        try:
            self._receive_until_closed()
        except BaseException as error:
            # Without this thread every caller would wait for ever.
            self._fail(EngineDeadError(f"the receiving thread failed: {error!r}"))
            raise

    def _receive_until_closed(self) -> None:
        while not self._is_closed:
            message = self._engine.port.receive(_POLL_SECONDS)
            if message is not None:
                self._last_heard = time.monotonic()
                self._has_pinged = False
                self._handle(message)
            elif (failure := self._engine.failure() or self._silence()) is not None:
                self._fail(failure)
            if self._failure is not None:
                return

    def _silence(self) -> EngineDeadError | None:
        """The error of a loop that says nothing for too long, also when it is asked."""
        if not (self._sinks or self._questions) or self.ready is None:
            self._last_heard = time.monotonic()
            return None
        timeout = self.config.engine.execute_model_timeout_seconds
        seconds = time.monotonic() - self._last_heard
        if seconds > timeout:
            return EngineDeadError(
                f"the engine loop has not answered for {timeout} s "
                "(--execute-model-timeout-seconds): it hangs"
            )
        if seconds > timeout / 2 and not self._has_pinged:
            self._has_pinged = True
            self._engine.port.send(GetStats(query_id=next(self._query_ids)))
        return None

    def _handle(self, message: ToClient) -> None:
        match message:
            case Outputs(items=items):
                for progress in items:
                    self._deliver(progress)
            case RequestRefused():
                self._refuse(message)
            case (
                EngineStats(query_id=query_id)
                | Timeline(query_id=query_id)
                | ProfileAnswer(query_id=query_id)
            ):
                self._answer(query_id, message)
            case LoadProgress() | CaptureProgress():
                if self._on_load_progress is not None:
                    self._on_load_progress(message)
            case EngineReady():
                self.ready = message
                self._ready.set()
            case RespawnWorkers() | RecoveryBegan() | RecoveryEnded():
                self._follow_recovery(message)
            case EngineFailed(kind=kind, reason=reason):
                self._fail(self._first_cause(error_class(kind)(reason)))

    def _follow_recovery(self, message: RespawnWorkers | RecoveryBegan | RecoveryEnded) -> None:
        match message:
            case RespawnWorkers(ranks=ranks, generation=generation):
                assert isinstance(self._engine, ProcessEngine), "asked of one that owns processes"
                try:
                    self._engine.respawn(ranks, generation)
                except WorkerDiedError as error:
                    self._fail(error)
            case RecoveryBegan(reason=reason):
                self._recovering_from = reason
            case RecoveryEnded():
                self._recovering_from = None

    def _report_endings(self, endings: tuple[Ending, ...]) -> bool:
        """Tell the loop of workers that ended; False where it cannot do without them."""
        if self.ready is None or self._failure is not None:
            return False
        message = WorkersEnded(
            ranks=tuple(ending.rank for ending in endings if ending.rank is not None),
            generations=tuple(ending.generation for ending in endings),
            reason="; ".join(f"{ending.name} {ending.words}" for ending in endings),
        )
        self._engine.port.send(message)
        return True

    def _answer(self, query_id: int, message: ToClient) -> None:
        question = self._questions.get(query_id)
        if question is not None:
            question.answer = message
            question.is_over.set()

    def _deliver(self, progress: Progress) -> None:
        with self._lock:
            sink = self._sinks.get(progress.request_id)
            if progress.finish_reason is not None:
                self._sinks.pop(progress.request_id, None)
        if sink is not None:
            sink(progress)

    def _refuse(self, message: RequestRefused) -> None:
        with self._lock:
            sink = self._sinks.pop(message.request_id, None)
        if sink is not None:
            sink(RequestError(message.field, message.reason))

    def _first_cause(self, reported: StagecoachError) -> StagecoachError:
        """A killed worker breaks its neighbours' connections: prefer the one that was killed."""
        if not isinstance(reported, EngineDeadError):
            return reported
        failure = self._engine.failure(_CAUSE_SECONDS)
        if isinstance(failure, HostLostError):
            return failure
        if failure is None or "killed" not in str(failure):
            return reported
        if self.config.engine.recover:
            # Why it was not overcome is the loop's to say.
            return type(reported)(f"{failure}; {reported}")
        return failure

    def _fail(self, failure: StagecoachError) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = failure
            sinks = list(self._sinks.values())
            self._sinks.clear()
            questions = list(self._questions.values())
        for sink in sinks:
            sink(failure)
        for question in questions:
            question.is_over.set()
        self._ready.set()


def _check_types(prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
    """Refuse values that the engine loop could not decode: they would end it for everybody.

    Raises:
        RequestError: names the field.
    """
    for token_id in prompt_token_ids:
        if type(token_id) is not int:
            raise RequestError("prompt", f"a token id is an integer, not {token_id!r}")
    for name, decoder in _PARAMETER_DECODERS.items():
        try:
            decoder.decode(msgspec.msgpack.encode(getattr(params, name)))
        except OverflowError:
            raise RequestError(name, "an integer is beyond 64 bits") from None
        except (msgspec.ValidationError, TypeError, UnicodeError) as error:
            raise RequestError(name, str(error).partition(" - at ")[0]) from None


def _check_salt(cache_salt: str | None) -> None:
    """
    Raises:
        RequestError: no text, or none that can be sent.
    """
    if cache_salt is None:
        return
    # An empty salt is most likely a tenant whose name is missing.
    if not isinstance(cache_salt, str) or not cache_salt:
        raise RequestError("cache_salt", f"must be a text that is not empty, not {cache_salt!r}")
    try:
        cache_salt.encode()
    except UnicodeEncodeError as error:
        raise RequestError("cache_salt", str(error)) from None


class _Question:
    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.answer: ToClient | None = None
