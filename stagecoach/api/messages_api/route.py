"""/v1/messages: a conversation, answered as a message of blocks; and the count of its tokens.

Owns the message and the order of its events. What its blocks are is `content`; what the request
means, `translation`.
"""

import time
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from stagecoach.api import sse
from stagecoach.api.answers import ServedModels, json_response, new_id
from stagecoach.api.chat_api.request import ChatCompletionRequest
from stagecoach.api.chat_api.run import ChatRun
from stagecoach.api.engine_service import EngineService
from stagecoach.api.error_forms import anthropic_body
from stagecoach.api.generation import Generation
from stagecoach.api.messages_api.content import ContentWriter, whole_content
from stagecoach.api.messages_api.objects import (
    Message,
    MessageDeltaEvent,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StopReason,
    ThinkingTokens,
    TokensCount,
)
from stagecoach.api.messages_api.request import CountTokensRequest, MessagesRequest
from stagecoach.api.messages_api.translation import (
    as_written,
    chat_request,
    errors_as_written,
)
from stagecoach.errors import RequestError
from stagecoach.outputs import CompletionOutput

# A stream that has nothing to say for so long says that it lives: proxies end silent ones.
PING_SECONDS = 10.0


class Messages:
    """The routes and what they answer from."""

    def __init__(self, service: EngineService, models: ServedModels) -> None:
        self._service = service
        self._models = models

    async def create(self, request: Request) -> Response:
        """Answer a conversation, as a message of blocks."""
        body = MessagesRequest.parse(await request.body())
        model = self._models.check(body.model)
        chat = chat_request(body, max_model_len=self._service.config.max_model_len)
        with errors_as_written(chat):
            chat.check()
            run = ChatRun(self._service, chat)
            await run.prepare()
            answer = _Answer(run, chat, body, model, request)
            if body.stream:
                return await sse.stream(request, answer.events())
            return json_response(await sse.until_disconnected(request, answer.whole()))

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens the prompt of a conversation has; nothing is computed."""
        body = CountTokensRequest.parse(await request.body())
        self._models.check(body.model)
        chat = chat_request(body, max_model_len=self._service.config.max_model_len)
        with errors_as_written(chat):
            chat.check()
            run = ChatRun(self._service, chat)
            await run.prepare()
        return json_response(TokensCount(input_tokens=run.num_prompt_tokens))


class _Answer:
    """One message, whole or as events."""

    def __init__(
        self,
        run: ChatRun,
        chat: ChatCompletionRequest,
        body: MessagesRequest,
        model: str,
        request: Request,
    ) -> None:
        self._run = run
        self._chat = chat
        self._max_tokens = body.max_tokens
        self._model = model
        self._request = request
        self._id = new_id("msg_")

    async def whole(self) -> Message:
        with self._run.generate() as generation:
            await generation.wait()
            [answer] = self._run.answers
            return Message(
                id=self._id,
                model=self._model,
                content=whole_content(ContentWriter(answer).next(is_last=True)),
                stop_reason=self._stop_reason(generation.only_completion),
                stop_sequence=_stop_sequence(generation.only_completion),
                usage=self._usage(generation),
            )

    async def events(self) -> AsyncGenerator[bytes, None]:
        with self._run.generate() as generation:
            [answer] = self._run.answers
            completion, writer = generation.only_completion, ContentWriter(answer)
            has_begun = False
            told = time.monotonic()
            try:
                async for _ in generation.changes(PING_SECONDS):
                    news: list[MessageEvent] = []
                    news += writer.next(is_last=completion.finish_reason is not None)
                    is_silent = not news and time.monotonic() - told >= PING_SECONDS
                    if has_begun:
                        news += [Ping()] * is_silent
                    elif is_silent or completion.token_ids or generation.is_finished:
                        # Not before: what is refused until now is still a status.
                        news.insert(0, MessageStart(message=self._opening(generation)))
                        has_begun = True
                    if news:
                        told = time.monotonic()
                        yield sse.named_frames(news)
                yield sse.named_frames(self._ending(generation))
            except Exception as error:
                if not has_begun:
                    raise
                if isinstance(error, RequestError):
                    error = as_written(self._chat, error)
                yield sse.frame(anthropic_body(self._request.scope, error), "error")

    def _opening(self, generation: Generation) -> Message:
        return Message(
            id=self._id,
            model=self._model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self._usage(generation),
        )

    def _ending(self, generation: Generation) -> list[MessageEvent]:
        completion = generation.only_completion
        end = MessageEnd(
            stop_reason=self._stop_reason(completion), stop_sequence=_stop_sequence(completion)
        )
        return [MessageDeltaEvent(delta=end, usage=self._usage(generation)), MessageStop()]

    def _stop_reason(self, completion: CompletionOutput) -> StopReason:
        [answer] = self._run.answers
        if completion.finish_reason == "length":
            # Where the model's length is what ended it, asking for more tokens would not help.
            is_full = len(completion.token_ids) < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        assert completion.finish_reason == "stop", "what else ends an answer is an error"
        if _stop_sequence(completion) is not None:
            return "stop_sequence"
        return "tool_use" if answer.has_tool_calls else "end_turn"

    def _usage(self, generation: Generation) -> MessageUsage:
        usage = self._run.usage(generation)
        num_cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - num_cached,
            cache_read_input_tokens=num_cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=ThinkingTokens(
                thinking_tokens=usage.completion_tokens_details.reasoning_tokens
            ),
        )


def _stop_sequence(completion: CompletionOutput) -> str | None:
    # A number is an end token; an empty text, a second call that was not wanted.
    reason = completion.stop_reason
    return reason if isinstance(reason, str) and reason else None
