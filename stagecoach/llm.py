"""Offline inference: `LLM.generate` and its kin, over an engine client.

Owns the started engine, the tokenizer, and the fan-out of a request into its n completions.
"""

import asyncio
import contextlib
import dataclasses
import operator
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as ProgressBar

from stagecoach.config import EngineConfig, ResolvedConfig, SpeculativeConfig
from stagecoach.engine.client import EngineClient, Sink
from stagecoach.engine.messages import EngineStats, LoadProgress
from stagecoach.errors import CheckpointError, RequestError, StagecoachError
from stagecoach.outputs import RequestAssembler, RequestOutput
from stagecoach.request import SamplingParams
from stagecoach.resolve import resolve
from stagecoach.schedule.commit import Progress
from stagecoach.text import chat_format
from stagecoach.text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int]


class _Event(NamedTuple):
    """News of one completion of one request."""

    request: "_LiveRequest"
    completion: int
    news: Progress | StagecoachError


class ChatOutput(NamedTuple):
    """The answers to a conversation, one a completion, and what they were parsed from."""

    messages: list[chat_format.ParsedMessage]
    request: RequestOutput


class LLM:
    """An engine for use from Python.

    Example:
        >>> with LLM("demo", pipeline_parallel_size=2) as llm:
        ...     [output] = llm.generate("Hello")
    """

    def __init__(self, model: str, *, show_progress: bool = True, **options: Any) -> None:
        """Start an engine.

        Args:
            model: checkpoint folder, or `demo` or `tiny`.
            show_progress: draw a bar on stderr while weights load.
            options: fields of EngineConfig; `speculative_config` may be a dict of its keys.

        Raises:
            ConfigError, CheckpointError, EngineDeadError: why it cannot serve.
        """
        if options.get("speculative_config") is not None:
            options["speculative_config"] = SpeculativeConfig.parse(options["speculative_config"])
        config = resolve(EngineConfig(model=model, **options))
        try:
            self.tokenizer = load_tokenizer(
                config.checkpoint, model_vocab_size=config.model.vocab_size
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"no usable tokenizer: {error}") from None
        self.config = _with_end_tokens(config, self.tokenizer)
        with _LoadBar(is_shown=show_progress) as bar:
            self._client = EngineClient(self.config, bar.update)

    @property
    def client(self) -> EngineClient:
        return self._client

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
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
        requests = self._prepare_all(listed, params)
        try:
            for request in requests:
                request.start(events.put)
            self._drain(events, requests, show_progress=use_tqdm)
        finally:
            for request in requests:
                request.abort()
        return [request.output for request in requests]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **format_options: Any,
    ) -> ChatOutput:
        """Answer a conversation; options as of `chat_format.render` (tools, thinking, ...).

        Without `sampling_params` the answer is greedy and as long as the model makes it.
        """
        params = sampling_params or SamplingParams(temperature=0.0, max_tokens=None)
        prompt = self.render_chat(messages, **format_options)
        [output] = self.generate(prompt, params, use_tqdm=False)
        return ChatOutput(
            [chat_format.parse(item.token_ids, self.tokenizer) for item in output.outputs], output
        )

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **format_options: Any
    ) -> list[int]:
        """Prompt token ids of a conversation.

        Raises:
            RequestError: the conversation cannot be written in the model's chat format, or the
                model is no Kimi-K3, whose format is the only one.
        """
        model_type = self.config.model.model_type
        if model_type != "kimi_k3":
            raise RequestError(
                "messages",
                f"the chat format of model_type {model_type} is not implemented, only that of "
                "kimi_k3; give the prompt as text or token ids",
            )
        try:
            return chat_format.render(self.tokenizer, messages, **format_options)
        except ValueError as error:
            raise RequestError("messages", str(error).removeprefix("messages: ")) from None

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the output, complete up to now, whenever there is news of it.

        It is one object, which grows. Closing the iterator early aborts the request. Errors as
        of `generate`.
        """
        events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        request = self._prepare(prompt, sampling_params or SamplingParams())
        try:
            request.start(events.put)
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
            # Refused when the event loop ended before the iteration: nobody listens any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, event)

        request = self._prepare(prompt, sampling_params or SamplingParams())
        try:
            request.start(put)
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

    def _prepare_all(
        self, prompts: list[Prompt], params: list[SamplingParams]
    ) -> list["_LiveRequest"]:
        """All requests of a call, none of them started: a bad one is refused before any runs."""
        requests = []
        for number, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self._prepare(prompt, prompt_params))
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                place = f"(prompt {number} of 0..{len(prompts) - 1})"
                raise RequestError(error.field, f"{error.reason} {place}") from None
        return requests

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> "_LiveRequest":
        if isinstance(prompt, str):
            text, token_ids = prompt, self.tokenizer.encode(prompt)
        else:
            text, token_ids = None, _as_token_ids(prompt)
        self._client.check(token_ids, params)
        assembler = RequestAssembler(self.tokenizer, text, token_ids, params)
        return _LiveRequest(self._client, assembler, token_ids, params)

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
        with _progress_bar(*columns, is_shown=show_progress) as bar:
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


def _with_end_tokens(config: ResolvedConfig, tokenizer: Tokenizer) -> ResolvedConfig:
    """Published files disagree on what ends a text, so what any of them says ends one."""
    token_ids = dict.fromkeys((*config.model.eos_token_ids, *tokenizer.eos_token_ids))
    model = dataclasses.replace(config.model, eos_token_ids=tuple(token_ids))
    return dataclasses.replace(config, model=model)


class _LiveRequest:
    """A request whose n completions run in the engine."""

    def __init__(
        self,
        client: EngineClient,
        assembler: RequestAssembler,
        token_ids: list[int],
        params: SamplingParams,
    ) -> None:
        self._client = client
        self._assembler = assembler
        self._token_ids = token_ids
        self._params = params
        self._ids: list[int | None] = []

    @property
    def output(self) -> RequestOutput:
        return self._assembler.output

    def start(self, put: Callable[[_Event], None]) -> None:
        """Submit the n completions; their news goes to `put`, in another thread."""
        params = self._params
        self._assembler.start_clock()
        for index in range(params.n):
            seed = None if params.seed is None else params.seed + index
            one = msgspec.structs.replace(params, n=1, seed=seed)
            self._ids.append(self._client.submit(self._token_ids, one, self._sink(index, put)))

    def _sink(self, index: int, put: Callable[[_Event], None]) -> Sink:
        return lambda news: put(_Event(self, index, news))

    def absorb(self, event: _Event) -> None:
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
        self._bar = _progress_bar(
            TextColumn("Loading weights"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            is_shown=is_shown,
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


def _progress_bar(*columns: ProgressColumn, is_shown: bool) -> ProgressBar:
    """A bar on stderr that vanishes when done; none where stderr is no terminal."""
    console = Console(stderr=True)
    is_shown = is_shown and console.is_terminal
    return ProgressBar(*columns, console=console, disable=not is_shown, transient=True)


def _as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt, which is text or token ids, or many."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise _not_a_prompt(prompts)
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(item, Integral) for item in listed):
        return [listed]
    return listed


def _as_token_ids(prompt: Sequence[int]) -> list[int]:
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise _not_a_prompt(prompt)
    try:
        return [operator.index(token_id) for token_id in prompt]
    except TypeError:
        raise _not_a_prompt(prompt) from None


def _not_a_prompt(value: object) -> RequestError:
    return RequestError("prompt", f"must be text or a list of token ids, not {value!r:.60}")


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
