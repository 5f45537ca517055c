"""/v1/responses: a conversation, answered as a list of items.

Owns the response and the order of its events. What the items are is `output_items`; what the
request means, `request`.
"""

import itertools
from collections.abc import AsyncGenerator, Iterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stagecoach.api import sse
from stagecoach.api.answers import ServedModels, json_response, new_id, now
from stagecoach.api.chat_api.run import ChatRun
from stagecoach.api.engine_service import EngineService
from stagecoach.api.error_body import HttpError, failure_of
from stagecoach.api.generation import Generation
from stagecoach.api.responses_api.objects import (
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseError,
    ResponseErrorEvent,
    ResponseFailedEvent,
    ResponseIncompleteDetails,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseInputTokensDetails,
    ResponseObject,
    ResponseOutputTokensDetails,
    ResponseUsage,
    StreamEvent,
)
from stagecoach.api.responses_api.output_items import ContentLogprobs, OutputItems
from stagecoach.api.responses_api.request import ResponsesRequest
from stagecoach.errors import RequestError
from stagecoach.text.tokenizer import Tokenizer

# Routes of OpenAI's that speak of a response that was stored.
STORED_PATHS = (
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/responses/{response_id}/input_items"),
)


class Responses:
    """The routes and what they answer from."""

    def __init__(self, service: EngineService, models: ServedModels) -> None:
        self._service = service
        self._models = models

    async def create(self, request: Request) -> Response:
        """Answer a conversation, as items."""
        body = ResponsesRequest.parse(await request.body())
        model = self._models.check(body.model)
        chat = body.chat_request()
        try:
            run = ChatRun(self._service, chat)
            await run.prepare()
            answer = _Answer(run, body, model, self._service.tokenizer)
            if body.stream:
                return await sse.stream(request, answer.events())
            whole = await sse.until_disconnected(request, answer.whole())
        except RequestError as error:
            raise body.as_written(chat.as_written(error)) from None
        return json_response(whole)

    async def stored(self, request: Request) -> Response:
        """There is none: responses are not kept."""
        name = request.path_params["response_id"]
        raise HttpError(
            404,
            f"response {name[:100]!r} is not here: responses are not kept, whatever `store` says",
            code="not_found",
            param="response_id",
        )


class _Answer:
    """One response, whole or as events."""

    def __init__(
        self, run: ChatRun, body: ResponsesRequest, model: str, tokenizer: Tokenizer
    ) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self._numbers = itertools.count().__next__
        self._response = _begun(body, model)

    async def whole(self) -> ResponseObject:
        with self._run.generate() as generation:
            await generation.wait()
            items = self._items(generation)
            ending = items.end(is_cut=_is_cut(generation))
            for _ in itertools.chain(self._news(items), ending):
                continue
            return self._ended(generation, items)

    async def events(self) -> AsyncGenerator[bytes, None]:
        with self._run.generate() as generation:
            items = self._items(generation)
            has_begun = False
            try:
                async for _ in generation.changes():
                    # Not before: what is refused until now is still a status.
                    opening = () if has_begun else self._opening()
                    frames = sse.named_frames(itertools.chain(opening, self._news(items)))
                    has_begun = True
                    if frames:
                        yield frames
                yield sse.named_frames(self._ending(generation, items))
            except Exception as error:
                if not has_begun:
                    raise
                yield sse.named_frames(self._failure(error, generation, items))

    def _items(self, generation: Generation) -> OutputItems:
        [answer] = self._run.answers
        logprobs = ContentLogprobs(generation.only_completion, answer, self._tokenizer)
        return OutputItems(logprobs, self._numbers)

    def _news(self, items: OutputItems) -> Iterator[StreamEvent]:
        [answer] = self._run.answers
        return items.write(answer.take_pieces())

    def _opening(self) -> Iterator[StreamEvent]:
        yield ResponseCreatedEvent(sequence_number=self._numbers(), response=self._response)
        yield ResponseInProgressEvent(sequence_number=self._numbers(), response=self._response)

    def _ending(self, generation: Generation, items: OutputItems) -> Iterator[StreamEvent]:
        is_cut = _is_cut(generation)
        yield from items.end(is_cut=is_cut)
        response = self._ended(generation, items)
        if is_cut:
            yield ResponseIncompleteEvent(sequence_number=self._numbers(), response=response)
        else:
            yield ResponseCompletedEvent(sequence_number=self._numbers(), response=response)

    def _failure(
        self, error: Exception, generation: Generation, items: OutputItems
    ) -> Iterator[StreamEvent]:
        told = failure_of(error).error
        yield ResponseErrorEvent(
            sequence_number=self._numbers(),
            code=told.code,
            message=told.message,
            param=told.param,
        )
        items.break_off()
        yield ResponseFailedEvent(
            sequence_number=self._numbers(),
            response=msgspec.structs.replace(
                self._response,
                status="failed",
                error=ResponseError(message=told.message),
                output=items.items,
                usage=self._usage(generation),
            ),
        )

    def _ended(self, generation: Generation, items: OutputItems) -> ResponseObject:
        is_cut = _is_cut(generation)
        return msgspec.structs.replace(
            self._response,
            status="incomplete" if is_cut else "completed",
            incomplete_details=ResponseIncompleteDetails() if is_cut else None,
            completed_at=None if is_cut else now(),
            output=items.items,
            usage=self._usage(generation),
        )

    def _usage(self, generation: Generation) -> ResponseUsage:
        usage = self._run.usage(generation)
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=ResponseInputTokensDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=ResponseOutputTokensDetails(
                reasoning_tokens=usage.completion_tokens_details.reasoning_tokens
            ),
            total_tokens=usage.total_tokens,
        )


def _begun(body: ResponsesRequest, model: str) -> ResponseObject:
    """The response before its first item."""
    return ResponseObject(
        id=new_id("resp_"),
        created_at=now(),
        model=model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={
            "effort": None if body.reasoning is None else body.reasoning.effort,
            "summary": None,
        },
        safety_identifier=body.safety_identifier,
        temperature=1.0 if body.temperature is None else body.temperature,
        text={"format": body.text_format},
        tool_choice=body.tool_choice or "auto",
        tools=[tool.model_dump() for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        user=body.user,
    )


def _is_cut(generation: Generation) -> bool:
    """Whether the answer is not whole: it got as long as it may."""
    return generation.only_completion.finish_reason != "stop"
