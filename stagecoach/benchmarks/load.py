"""The load: sends the requests of a run when they are due, and times what comes back.

Owns the one place where an HTTP response meets a clock. The clock is read when bytes arrive, before
they are looked at. Knows neither how requests were made nor what is computed from the records.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import httpx

from stagecoach.benchmarks.answer import Answer, AnswerReader
from stagecoach.benchmarks.data_sets import BenchRequest, Conversation
from stagecoach.benchmarks.event_stream import EventDecoder, response_error
from stagecoach.benchmarks.metrics import RequestRecord
from stagecoach.benchmarks.transport import ConnectionStack
from stagecoach.errors import ServerError

Backend = Literal["openai", "openai-chat"]
ENDPOINTS: dict[Backend, str] = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go and what all of them say.

    `fields` are of the request's body, over those that this module writes. `endpoint` is joined
    to `base_url`. A request without an answer after `timeout_seconds` has failed.
    """

    base_url: str
    endpoint: str
    backend: Backend
    model: str
    headers: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    request_id_prefix: str = "bench-"
    timeout_seconds: float = 6 * 3600.0
    continuous_usage: bool = True


class LoadResult(NamedTuple):
    """Records in the order of the conversations and their turns, and the run's length."""

    records: list[RequestRecord]
    duration_seconds: float


class LoadGenerator:
    """Runs against one server, one after the other; used with `async with`."""

    def __init__(
        self,
        target: Target,
        *,
        max_concurrency: int | None = None,
        turn_delay_seconds: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Prepare the client; nothing is sent.

        Args:
            max_concurrency: most requests being answered at a time; None: any number.
            turn_delay_seconds: between an answer and the next message of its conversation.
            clock: seconds; only differences matter.
            transport: what carries the requests in place of the network.
        """
        self._target = target
        self._max_concurrency = max_concurrency
        self._turn_delay_seconds = turn_delay_seconds
        self._clock = clock
        self._num_requests = 0
        # Proxies of the environment would carry, and slow, even what goes to this machine.
        self._client = httpx.AsyncClient(
            headers=target.headers,
            timeout=None,
            transport=transport or ConnectionStack(),
            trust_env=False,
        )

    async def __aenter__(self) -> "LoadGenerator":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def run(
        self,
        conversations: Sequence[Conversation],
        arrival_seconds: Sequence[float],
        *,
        on_finish: Callable[[RequestRecord], None] = lambda record: None,
    ) -> LoadResult:
        """Start each conversation when it is due, and wait for all of them.

        A conversation ends with its first failed request; the turns that are then never sent
        count as failed. X-Request-Id of a request is the target's prefix and the request's number,
        counted over all runs of this generator.

        Args:
            arrival_seconds: one for each conversation, ascending, from now on.
            on_finish: called with each record as it is made.
        """
        slots = None if self._max_concurrency is None else asyncio.Semaphore(self._max_concurrency)
        start = self._clock()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for conversation, due in zip(conversations, arrival_seconds, strict=True):
                delay = start + due - self._clock()
                if delay > 0:
                    await asyncio.sleep(delay)
                talk = self._talk(conversation, self._num_requests, slots, on_finish)
                tasks.append(group.create_task(talk))
                self._num_requests += len(conversation)
        records = [record for task in tasks for record in task.result()]
        return LoadResult(records, self._clock() - start)

    async def _talk(
        self,
        conversation: Conversation,
        first_number: int,
        slots: asyncio.Semaphore | None,
        on_finish: Callable[[RequestRecord], None],
    ) -> list[RequestRecord]:
        messages: list[dict[str, str]] = []
        records: list[RequestRecord] = []
        for turn, request in enumerate(conversation):
            if turn > 0 and self._turn_delay_seconds > 0:
                await asyncio.sleep(self._turn_delay_seconds)
            body = self._body(request, messages)
            record = await self._send_in_turn(request, body, first_number + turn, slots)
            records.append(record)
            on_finish(record)
            if record.answer is None:
                break
            messages.append({"role": "assistant", "content": record.answer.content})
        for request in conversation[len(records) :]:
            records.append(self._never_sent(request))
            on_finish(records[-1])
        return records

    def _never_sent(self, request: BenchRequest) -> RequestRecord:
        return RequestRecord(
            start_seconds=self._clock(),
            queued_seconds=0.0,
            num_prompt_tokens=request.num_prompt_tokens,
            error="not sent: an earlier request of its conversation failed",
        )

    def _body(self, request: BenchRequest, messages: list[dict[str, str]]) -> dict[str, Any]:
        target = self._target
        usage = {"include_usage": True}
        if target.continuous_usage:
            usage["continuous_usage_stats"] = True
        body: dict[str, Any] = {"model": target.model, "stream": True, "stream_options": usage}
        if target.backend == "openai-chat":
            assert isinstance(request.prompt, str), "a message is text"
            messages.append({"role": "user", "content": request.prompt})
            body |= {"messages": messages, "max_completion_tokens": request.num_output_tokens}
        else:
            body |= {"prompt": request.prompt, "max_tokens": request.num_output_tokens}
        return body | target.fields

    async def _send_in_turn(
        self,
        request: BenchRequest,
        body: dict[str, Any],
        number: int,
        slots: asyncio.Semaphore | None,
    ) -> RequestRecord:
        due = self._clock()
        answer, error = None, ""
        async with slots or contextlib.nullcontext():
            start = self._clock()
            try:
                async with asyncio.timeout(self._target.timeout_seconds):
                    answer = await self._stream(body, number)
            except TimeoutError:
                error = f"no answer within {self._target.timeout_seconds:g} s"
            except (httpx.HTTPError, ServerError) as failure:
                error = str(failure) or type(failure).__name__
        told = None if answer is None else answer.num_prompt_tokens
        return RequestRecord(
            start_seconds=start,
            queued_seconds=start - due,
            num_prompt_tokens=request.num_prompt_tokens if told is None else told,
            answer=answer,
            error=error,
        )

    async def _stream(self, body: dict[str, Any], number: int) -> Answer:
        decoder = EventDecoder()
        reader = AnswerReader()
        async with self._client.stream(
            "POST",
            self._target.base_url + self._target.endpoint,
            json=body,
            headers={"X-Request-Id": f"{self._target.request_id_prefix}{number}"},
        ) as response:
            if response.status_code != 200:
                raise response_error(response.status_code, await response.aread())
            async for chunk in response.aiter_bytes():
                now = self._clock()
                for event in decoder.push(chunk):
                    reader.push(event, now)
        return reader.finish(is_done=decoder.is_done)
