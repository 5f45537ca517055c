"""/v1/chat/completions: a conversation, answered.

Owns how parsed messages become chat completions, whole and streamed.
"""

from collections.abc import AsyncGenerator

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from stagecoach.api import sse
from stagecoach.api.answers import (
    ServedModels,
    Usage,
    encode,
    json_response,
    new_id,
    now,
)
from stagecoach.api.chat_api.choices import ChatChoiceReader
from stagecoach.api.chat_api.objects import ChatChunkChoice, ChatCompletion, ChatCompletionChunk
from stagecoach.api.chat_api.request import ChatCompletionRequest
from stagecoach.api.chat_api.run import ChatRun
from stagecoach.api.engine_service import EngineService
from stagecoach.api.generation import Generation
from stagecoach.api.logprobs import prompt_logprobs
from stagecoach.errors import RequestError
from stagecoach.text.tokenizer import Tokenizer


class ChatCompletions:
    """The route and what it answers from."""

    def __init__(self, service: EngineService, models: ServedModels) -> None:
        self._service = service
        self._models = models

    async def create(self, request: Request) -> Response:
        """Answer a conversation."""
        body = ChatCompletionRequest.parse(await request.body())
        model = self._models.check(body.model)
        run = ChatRun(self._service, body)
        answer = _Answer(run, body, model, self._service.tokenizer)
        try:
            await run.prepare()
            if body.stream:
                return await sse.stream(request, answer.events())
            whole = await sse.until_disconnected(request, answer.whole())
        except RequestError as error:
            raise body.as_written(error) from None
        return json_response(whole)


class _Answer:
    """One answer: its parts that are the same in all its events."""

    def __init__(
        self, run: ChatRun, body: ChatCompletionRequest, model: str, tokenizer: Tokenizer
    ) -> None:
        self._run = run
        self._body = body
        self._model = model
        self._tokenizer = tokenizer
        self._id = new_id("chatcmpl-")
        self._created = now()

    async def whole(self) -> ChatCompletion:
        with self._run.generate() as generation:
            await generation.wait()
            [output] = generation.outputs
            wants_prompt = self._body.prompt_logprobs is not None
            return ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[reader.whole() for reader in self._readers(generation)],
                usage=self._run.usage(generation),
                prompt_logprobs=prompt_logprobs(self._tokenizer, output.prompt_logprobs or ())
                if wants_prompt
                else UNSET,
            )

    async def events(self) -> AsyncGenerator[bytes, None]:
        with self._run.generate() as generation:
            readers = self._readers(generation)
            async for _ in generation.changes():
                news = [choice for reader in readers for choice in reader.next()]
                if news:
                    yield b"".join(self._event([choice], generation) for choice in news)
            if self._body.includes_usage:
                yield self._frame([], self._run.usage(generation))
            yield sse.DONE

    def _readers(self, generation: Generation) -> list[ChatChoiceReader]:
        [output] = generation.outputs
        return [
            ChatChoiceReader(completion, answer, self._tokenizer, self._body)
            for completion, answer in zip(output.outputs, self._run.answers, strict=True)
        ]

    def _event(self, choices: list[ChatChunkChoice], generation: Generation) -> bytes:
        return self._frame(choices, self._body.running_usage(lambda: self._run.usage(generation)))

    def _frame(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> bytes:
        chunk = ChatCompletionChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )
        return sse.frame(encode(chunk))
