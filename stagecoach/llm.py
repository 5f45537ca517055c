"""Offline inference: `LLM.generate` and its kin, over an engine client.

Owns the started engine, the tokenizer, and what callers may pass.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import operator
import queue
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as ProgressBar

from stagecoach.config.engine import EngineConfig, ResolvedConfig, SpeculativeConfig
from stagecoach.engine.client import EngineClient
from stagecoach.engine.messages import CaptureProgress, EngineStats, LoadProgress, Timeline
from stagecoach.engine.step_trace import trace_events
from stagecoach.errors import CheckpointError, RequestError
from stagecoach.live_request import Event, LiveRequest
from stagecoach.observe.transfer_rate import TransferRate
from stagecoach.outputs import RequestAssembler, RequestOutput
from stagecoach.request import SamplingParams
from stagecoach.resolve import resolve
from stagecoach.schedule.commit import Progress
from stagecoach.text.chat import parse_answer, render_messages
from stagecoach.text.message_stream import ParsedMessage
from stagecoach.text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int]


class ChatOutput(NamedTuple):
    """The answers to a conversation, one a completion, and what they were parsed from."""

    messages: list[ParsedMessage]
    request: RequestOutput


class LLM:
    """An engine for use from Python.

    Example:
        >>> with LLM("demo", pipeline_parallel_size=2) as llm:
        ...     [output] = llm.generate("Hello")
    """

    def __init__(
        self, model: "str | OpenedModel", *, show_progress: bool = True, **options: Any
    ) -> None:
        """Start an engine.

        Args:
            model: checkpoint folder, or `demo` or `tiny`; or what `open_model` made of its options,
                then without any here.
            show_progress: draw a bar on stderr while weights load.
            options: fields of EngineConfig; `speculative_config` may be a dict of its keys.

        Raises:
            ConfigError, CheckpointError, EngineDeadError: why it cannot serve.
        """
        if options.get("speculative_config") is not None:
            options["speculative_config"] = SpeculativeConfig.parse(options["speculative_config"])
        if isinstance(model, str):
            model = open_model(EngineConfig(model=model, **options))
        else:
            assert not options, f"options of a model that is open: {options}"
        self.config, self.tokenizer = model
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
        cache_salt: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts; results come in the prompts' order.

        A request whose values are not finite ends by itself, with finish reason "error" and the
        `error` of its completion; the others go on.

        Args:
            prompts: text or token ids, one or many.
            sampling_params: one for all, or one a prompt.
            use_tqdm: draw a progress bar on stderr.
            cache_salt: only prompts with the same salt share cached prefixes; one for all, or
                one a prompt.

        Raises:
            RequestError: a request is refused; nothing of the call keeps running.
            EngineDeadError: the engine ended.
        """
        listed = _as_prompts(prompts)
        params = _as_params(sampling_params, len(listed))
        salts = _as_salts(cache_salt, len(listed))
        requests = self._prepare_all(listed, params, salts)
        return self._complete(requests, show_progress=use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **format_options: Any,
    ) -> ChatOutput:
        """Answer a conversation; options as of `chat.render_messages` (tools, thinking, ...).

        Without `sampling_params` the answer is greedy and as long as the model makes it. The
        next turn, which repeats these messages, finds their state in the prefix cache.
        """
        params = sampling_params or SamplingParams(temperature=0.0, max_tokens=None)
        prompt = self.render_chat(messages, **format_options)
        # What follows the messages, as the opening of an answer, the next turn may not repeat.
        last_turn = {"add_generation_prompt": False, "tool_choice": None, "response_format": None}
        shared = self.render_chat(messages, **(format_options | last_turn))
        is_shared = 0 < len(shared) < len(prompt) and prompt[: len(shared)] == shared
        position = len(shared) if is_shared else None
        request = self._prepare(prompt, params, cache_salt, checkpoint_position=position)
        [output] = self._complete([request], show_progress=False)
        answers = [
            parse_answer(
                self.config.model.model_type,
                self.tokenizer,
                item.token_ids,
                prompt_token_ids=prompt,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
            for item in output.outputs
        ]
        return ChatOutput(answers, output)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **format_options: Any
    ) -> list[int]:
        """Prompt token ids of a conversation.

        Raises:
            RequestError: the conversation cannot be written in the model's chat format, or the
                checkpoint has none.
        """
        return render_messages(
            self.config.model.model_type, self.tokenizer, messages, **format_options
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the output, complete up to now, whenever there is news of it.

        It is one object, which grows. Closing the iterator early aborts the request. Errors as
        of `generate`.
        """
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request = self._prepare(prompt, sampling_params or SamplingParams(), cache_salt)
        try:
            request.start(events.put)
            while not request.output.is_finished:
                request.absorb(events.get())
                yield request.output
        finally:
            request.abort()

    async def generate_async(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The same for an event loop; leaving the iteration aborts the request."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def put(event: Event) -> None:
            # Refused when the event loop ended before the iteration: nobody listens any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, event)

        request = self._prepare(prompt, sampling_params or SamplingParams(), cache_salt)
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

    def timeline(self) -> Timeline:
        """The latest plans, what each stage did with them when, and the requests alive now."""
        return self._client.timeline()

    def write_trace(self, path: str | Path) -> Timeline:
        """Write the latest plans as trace events, which Perfetto opens; returns what it is of."""
        timeline = self.timeline()
        Path(path).write_text(json.dumps(trace_events(timeline.plans)), encoding="utf-8")
        return timeline

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as after a change of what prompts mean.

        Running requests go on; those that are submitted from now on find nothing older.
        """
        self._client.reset_prefix_cache()

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
        self, prompts: list[Prompt], params: list[SamplingParams], salts: list[str | None]
    ) -> list[LiveRequest]:
        """All requests of a call, none of them started: a bad one is refused before any runs."""
        requests = []
        for number, fields in enumerate(zip(prompts, params, salts, strict=True)):
            try:
                requests.append(self._prepare(*fields))
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                place = f"(prompt {number} of 0..{len(prompts) - 1})"
                raise error.about(error.field, place) from None
        return requests

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        cache_salt: str | None,
        *,
        checkpoint_position: int | None = None,
    ) -> LiveRequest:
        if isinstance(prompt, str):
            text, token_ids = prompt, self.tokenizer.encode(prompt)
        else:
            text, token_ids = None, _as_token_ids(prompt)
        self._client.check(token_ids, params, cache_salt)
        assembler = RequestAssembler(self.tokenizer, text, token_ids, params)
        submit = functools.partial(
            self._client.submit,
            token_ids,
            cache_salt=cache_salt,
            checkpoint_position=checkpoint_position,
            is_checked=True,
        )
        is_cached = self.config.engine.enable_prefix_caching
        return LiveRequest(self._client, assembler, params, submit, has_leader=is_cached)

    def _complete(self, requests: list[LiveRequest], *, show_progress: bool) -> list[RequestOutput]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        try:
            for request in requests:
                request.start(events.put)
            self._drain(events, requests, show_progress=show_progress)
        finally:
            for request in requests:
                request.abort()
        return [request.output for request in requests]

    def _drain(
        self,
        events: "queue.SimpleQueue[Event]",
        requests: list[LiveRequest],
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


class OpenedModel(NamedTuple):
    """What is known of a model before an engine starts."""

    config: ResolvedConfig
    tokenizer: Tokenizer

    def check_params(self, params: SamplingParams) -> None:
        """Refuse before weights are loaded what no request may ask for.

        Raises:
            RequestError: names the field.
        """
        params.check(
            vocab_size=self.config.model.vocab_size, max_model_len=self.config.max_model_len
        )


def open_model(engine: EngineConfig) -> OpenedModel:
    """Settle the options, and load the tokenizer.

    Raises:
        ConfigError, CheckpointError: why the model cannot be served.
    """
    config = resolve(engine)
    try:
        tokenizer = load_tokenizer(config.checkpoint, model_vocab_size=config.model.vocab_size)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no usable tokenizer: {error}") from None
    return OpenedModel(_with_end_tokens(config, tokenizer), tokenizer)


def _with_end_tokens(config: ResolvedConfig, tokenizer: Tokenizer) -> ResolvedConfig:
    """Published files disagree on what ends a text, so what any of them says ends one."""
    token_ids = dict.fromkeys((*config.model.eos_token_ids, *tokenizer.eos_token_ids))
    model = dataclasses.replace(config.model, eos_token_ids=tuple(token_ids))
    return dataclasses.replace(config, model=model)


class _LoadBar:
    """A bar over the bytes that all workers load, then one over the graphs they capture."""

    def __init__(self, *, is_shown: bool) -> None:
        self._bar = _progress_bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            is_shown=is_shown,
        )
        self._task = self._bar.add_task("Loading weights", total=None, rate="")
        self._rate = TransferRate()
        self._bytes: dict[str, tuple[int, int]] = {}
        self._graphs: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, progress: LoadProgress | CaptureProgress) -> None:
        if isinstance(progress, LoadProgress):
            counts, text = self._bytes, "Loading weights"
            counts[progress.worker] = (progress.done_bytes, progress.total_bytes)
        else:
            counts, text = self._graphs, "Capturing graphs"
            counts[progress.worker] = (progress.num_captured, progress.num_graphs)
        done, total = map(sum, zip(*counts.values(), strict=True))
        rate = self._rate.describe(done, total) if counts is self._bytes else ""
        self._bar.update(self._task, description=text, completed=done, total=total, rate=rate)


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


def _as_salts(salts: str | Sequence[str | None] | None, num_prompts: int) -> list[str | None]:
    if isinstance(salts, str) or not isinstance(salts, Sequence):
        return [salts] * num_prompts
    if len(salts) != num_prompts:
        raise RequestError(
            "cache_salt", f"{len(salts)} given for {num_prompts} prompts; give one or all"
        )
    return list(salts)
