"""Offline inference: `LLM.generate`, over the same client as the server.

Owns the started engine, the tokenizer, and the fan-out of a request into its n completions.
"""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as ProgressBar
from rich.progress import TextColumn, TimeElapsedColumn

from stagecoach.config import EngineConfig
from stagecoach.engine.client import EngineClient
from stagecoach.engine.messages import EngineStats, LoadProgress
from stagecoach.errors import RequestError, StagecoachError
from stagecoach.outputs import RequestAssembler, RequestOutput
from stagecoach.request import SamplingParams
from stagecoach.resolve import resolve
from stagecoach.schedule.commit import Progress
from stagecoach.text import chat_format
from stagecoach.text.tokenizer import load_tokenizer

Prompt = str | Sequence[int]


class _Event(NamedTuple):
    """News of one completion of one request."""

    request: "_LiveRequest"
    index: int
    news: Progress | StagecoachError


class LLM:
    """An engine for use from Python.

    Example:
        >>> with LLM("demo", pipeline_parallel_size=2) as llm:
        ...     [output] = llm.generate("Hello")

    Starting processes needs the usual `if __name__ == "__main__":` guard in a script.
    """

    def __init__(self, model: str, *, show_progress: bool = True, **options: Any) -> None:
        """Start an engine.

        Args:
            model: checkpoint folder, or `demo` or `tiny`.
            show_progress: draw a bar on stderr while weights load.
            options: fields of EngineConfig.

        Raises:
            ConfigError, CheckpointError, EngineDeadError: why it cannot serve.
        """
        self.config = resolve(EngineConfig(model=model, **options))
        self.tokenizer = load_tokenizer(self.config.checkpoint)
        with _LoadBar(is_shown=show_progress) as bar:
            self._client = EngineClient(self.config, bar.update)

    @property
    def client(self) -> EngineClient:
        return self._client

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts; results come in the prompts' order.

        Args:
            prompts: text or token ids, one or many.
            sampling_params: one for all, or one a prompt.
            use_tqdm: draw a progress bar on stderr.

        Raises:
            RequestError: a request is refused; nothing of the call keeps running.
            EngineDeadError: the engine ended.
        """
        listed = _as_prompts(prompts)
        params = _as_params(sampling_params, len(listed))
        events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        requests: list[_LiveRequest] = []
        try:
            for prompt, prompt_params in zip(listed, params, strict=True):
                requests.append(self._start(prompt, prompt_params, events.put))
            self._drain(events, requests, show_progress=use_tqdm)
        finally:
            for request in requests:
                request.abort()
        return [request.output for request in requests]

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        **format_options: Any,
    ) -> RequestOutput:
        """Answer a conversation; options as of `chat_format.render` (tools, thinking, ...)."""
        prompt = self.render_chat(messages, **format_options)
        return self.generate(prompt, sampling_params, use_tqdm=False)[0]

    def render_chat(
        self, messages: Sequence[dict[str, Any]], **format_options: Any
    ) -> list[int]:
        """Prompt token ids of a conversation."""
        return chat_format.render(self.tokenizer, messages, **format_options)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the output, complete up to now, whenever it has grown.

        Closing the iterator early aborts the request. Errors as of `generate`.
        """
        events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        request = self._start(prompt, sampling_params or SamplingParams(), events.put)
        try:
            while not request.output.is_finished:
                request.absorb(events.get())
                yield request.output
        finally:
            request.abort()

    async def generate_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """The same for an event loop; leaving the iteration aborts the request."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[_Event] = asyncio.Queue()

        def put(event: _Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        request = self._start(prompt, sampling_params or SamplingParams(), put)
        try:
            while not request.output.is_finished:
                request.absorb(await events.get())
                yield request.output
        finally:
            request.abort()

    def stats(self) -> EngineStats:
        """Counts of the engine since start, and the state of its queues and pools."""
        return self._client.stats()

    def close(self) -> None:
        """End the engine's processes."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(
        self, prompt: Prompt, params: SamplingParams, put: Callable[[_Event], None]
    ) -> "_LiveRequest":
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._client.check(token_ids, params)
        assembler = RequestAssembler(self.tokenizer, text, token_ids, params)
        request = _LiveRequest(self._client, assembler)
        request.start(token_ids, params, put)
        return request

    def _drain(
        self,
        events: "queue.SimpleQueue[_Event]",
        requests: list["_LiveRequest"],
        *,
        show_progress: bool,
    ) -> None:
        columns = (
            TextColumn("Prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
        )
        unfinished = len(requests)
        num_tokens = 0
        with ProgressBar(
            *columns, console=Console(stderr=True), disable=not show_progress, transient=True
        ) as bar:
            task = bar.add_task("", total=unfinished, tokens=0)
            while unfinished:
                event = events.get()
                if event.request.output.is_finished:
                    continue
                event.request.absorb(event)
                if isinstance(event.news, Progress):
                    num_tokens += len(event.news.token_ids)
                is_finished = event.request.output.is_finished
                unfinished -= is_finished
                bar.update(task, advance=int(is_finished), tokens=num_tokens)


class _LiveRequest:
    """A request whose n completions run in the engine."""

    def __init__(self, client: EngineClient, assembler: RequestAssembler) -> None:
        self._client = client
        self._assembler = assembler
        self._ids: list[int | None] = []

    @property
    def output(self) -> RequestOutput:
        return self._assembler.output

    def start(
        self, token_ids: list[int], params: SamplingParams, put: Callable[[_Event], None]
    ) -> None:
        for index in range(params.n):
            seed = None if params.seed is None else params.seed + index
            one = msgspec.structs.replace(params, n=1, seed=seed)
            self._ids.append(
                self._client.submit(
                    token_ids, one, lambda news, index=index: put(_Event(self, index, news))
                )
            )

    def absorb(self, event: _Event) -> None:
        """Apply one event.

        Raises:
            StagecoachError: the event is an error.
        """
        if isinstance(event.news, StagecoachError):
            self._ids[event.index] = None
            raise event.news
        self._assembler.absorb(event.index, event.news)
        if event.news.finish_reason is not None:
            self._ids[event.index] = None
        elif self.output.outputs[event.index].finish_reason is not None:
            # A stop string was found; the engine does not know of text.
            self._abort(event.index)

    def abort(self) -> None:
        """End whatever still runs; nothing if all is finished."""
        for index in range(len(self._ids)):
            self._abort(index)

    def _abort(self, index: int) -> None:
        request_id = self._ids[index]
        if request_id is not None:
            self._client.abort([request_id])
            self._ids[index] = None


class _LoadBar:
    """A bar over the bytes that all workers load."""

    def __init__(self, *, is_shown: bool) -> None:
        self._bar = ProgressBar(
            TextColumn("Loading weights"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not is_shown,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)
        self._bytes: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, progress: LoadProgress) -> None:
        self._bytes[progress.worker] = (progress.done_bytes, progress.total_bytes)
        done, total = map(sum, zip(*self._bytes.values(), strict=True))
        self._bar.update(self._task, completed=done, total=total)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(
            "sampling_params", f"{len(params)} given for {num_prompts} prompts; give one or all"
        )
    return list(params)
