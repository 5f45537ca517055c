"""Compiles grammars beside the loop: a few threads, and the requests that wait for them.

Owns the threads and who waits; the loop's thread alone calls it. Knows neither what a grammar
is made of nor what becomes of the request. A compile may take seconds, and none ends early:
of a request that was aborted, the result is dropped.
"""

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import msgspec

from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.messages import Submit
from stagecoach.errors import CheckpointError, RequestError
from stagecoach.observe.log import get_logger
from stagecoach.request import Constraint, StructuredOutputsParams

_MAX_THREADS = 4
_SHORTEST = StructuredOutputsParams(regex="a")
_LOG = get_logger(__name__)


class Compiler(Protocol):
    """Makes constraints, from any thread."""

    def compile(self, params: StructuredOutputsParams) -> Constraint:
        """A constraint at the start of its text.

        Raises:
            RequestError: field "structured_outputs".
        """


def load_compiler(config: ResolvedConfig) -> Compiler:
    """The compiler of a model, with the vocabulary of its checkpoint.

    Raises:
        RequestError: the checkpoint has no vocabulary to write a grammar in, or no end token.
    """
    from stagecoach.grammar.compiler import GrammarCompiler
    from stagecoach.text.tokenizer import load_tokenizer

    model = config.model
    try:
        tokenizer = load_tokenizer(config.checkpoint, model_vocab_size=model.vocab_size)
    except (CheckpointError, ValueError, OSError) as error:
        raise RequestError(
            "structured_outputs", f"the model's vocabulary cannot be read: {error}"
        ) from None
    # An end token that the head gives no logit ends no text.
    ends = [token_id for token_id in model.eos_token_ids if token_id < model.vocab_size]
    if not ends:
        raise RequestError("structured_outputs", "the model has no token that could end the text")
    return GrammarCompiler(tokenizer, vocab_size=model.vocab_size, eos_token_ids=ends)


class Compiling(NamedTuple):
    """A request that waits for its grammar."""

    client: int
    message: Submit


class Compiled(NamedTuple):
    """A request whose wait is over."""

    client: int
    message: Submit
    outcome: Constraint | RequestError


Job = Callable[[], None]


class CompilePool:
    """The requests that wait for their grammars.

    Args:
        load: makes the compiler, at the first use.
        wake: called in another thread when a result is there.
        start: runs jobs, one after the other or at once; None: threads of its own.
    """

    def __init__(
        self,
        load: Callable[[], Compiler],
        wake: Callable[[], None],
        start: Callable[[Job], object] | None = None,
    ) -> None:
        self._load = load
        self._wake = wake
        # Python ends it before it takes itself down, which a thread in a compile would not survive.
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="grammar compiler")
        self._start = start or self._threads.submit
        self._compiler: Compiler | None = None
        self._compiler_lock = threading.Lock()
        self._waiting: dict[int, Compiling] = {}  # by request id
        # The smallest grammars first, so that a flood of large ones holds up only their like.
        self._queue: queue.PriorityQueue[tuple[int, int, Compiling]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._done: queue.SimpleQueue[Compiled] = queue.SimpleQueue()

    @property
    def waiting(self) -> list[Compiling]:
        """In the order of their arrival."""
        return list(self._waiting.values())

    def prepare(self) -> None:
        """Have the vocabulary read, which takes long, before a request waits for it."""
        self._start(self._prepare)

    def submit(self, client: int, message: Submit) -> None:
        """Have the request's grammar compiled."""
        waiting = Compiling(client, message)
        self._waiting[message.request_id] = waiting
        size = len(msgspec.msgpack.encode(message.params.structured_outputs))
        self._queue.put((size, next(self._numbers), waiting))
        self._start(self._run_next)

    def abort(self, request_id: int) -> None:
        """Nobody waits for this request any more; unknown ids are ignored."""
        self._waiting.pop(request_id, None)

    def take_compiled(self) -> list[Compiled]:
        """Those that have come since the last call, without aborted ones."""
        taken: list[Compiled] = []
        while self._waiting and not self._done.empty():
            compiled = self._done.get()
            if self._waiting.pop(compiled.message.request_id, None) is not None:
                taken.append(compiled)
        return taken

    def close(self) -> None:
        """Start no more; a thread ends when its compile does, which only the process waits for."""
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run_next(self) -> None:
        _, _, waiting = self._queue.get()
        client, message = waiting
        if message.request_id not in self._waiting:
            return
        params = message.params.structured_outputs
        assert params is not None, f"nothing to compile: {message}"
        outcome: Constraint | RequestError
        try:
            outcome = self._the_compiler().compile(params)
        except RequestError as error:
            outcome = error
        except BaseException as error:  # noqa: BLE001 - the request ends here and says why
            _LOG.error("a grammar cannot be compiled", exc_info=error)
            outcome = RequestError("structured_outputs", f"cannot be compiled: {error!r}")
        self._done.put(Compiled(client, message, outcome))
        self._wake()

    def _prepare(self) -> None:
        try:
            self._the_compiler().compile(_SHORTEST)
        except RequestError as error:
            # Each request that needs one is told.
            _LOG.debug("no grammar can be compiled: %s", error)

    def _the_compiler(self) -> Compiler:
        with self._compiler_lock:
            if self._compiler is None:
                self._compiler = self._load()
            return self._compiler
