"""/v1/chat/completions: a conversation, answered.

Owns the way from a body to the engine and from parsed messages to chat completions, whole and
streamed.
"""

import asyncio
from collections.abc import AsyncGenerator

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from stagecoach.api import sse
from stagecoach.api.answers import (
    ServedModels,
    encode,
    json_response,
    new_answer_id,
    now,
    usage_of,
)
from stagecoach.api.chat_answer import ChatAnswer
from stagecoach.api.chat_choices import ChatChoiceReader
from stagecoach.api.chat_protocol import ChatCompletionRequest
from stagecoach.api.conversation import render_chat
from stagecoach.api.engine_service import EngineService, Prompt
from stagecoach.api.generation import Generation
from stagecoach.api.logprobs import prompt_logprobs
from stagecoach.api.responses import ChatChunkChoice, ChatCompletion, ChatCompletionChunk, Usage
from stagecoach.errors import RequestError
from stagecoach.request import SamplingParams
from stagecoach.text.chat import make_parser
from stagecoach.text.message_stream import MessageParser


class ChatCompletions:
    """The route and what it answers from."""

    def __init__(self, service: EngineService, models: ServedModels) -> None:
        self._service = service
        self._models = models

    async def create(self, request: Request) -> Response:
        """Answer a conversation."""
        body = ChatCompletionRequest.parse(await request.body())
        model = self._models.check(body.model)
        answer = _Answer(self._service, body, body.params(), model)
        rendered = await asyncio.to_thread(render_chat, self._service, body)
        try:
            if body.stream:
                return await sse.stream(request, answer.events(*rendered))
            whole = await sse.until_disconnected(request, answer.whole(*rendered))
        except RequestError as error:
            raise body.as_written(error) from None
        return json_response(whole)


class _Answer:
    """One answer: its parts that are the same in all its events."""

    def __init__(
        self,
        service: EngineService,
        body: ChatCompletionRequest,
        params: SamplingParams,
        model: str,
    ) -> None:
        self._service = service
        self._body = body
        self._params = params
        self._model = model
        self._id = new_answer_id("chatcmpl")
        self._created = now()
        self._answers: list[ChatAnswer] = []

    async def whole(
        self, prompt_token_ids: list[int], checkpoint_position: int | None
    ) -> ChatCompletion:
        prompt = self._prompt(prompt_token_ids, checkpoint_position)
        with self._service.generate([prompt], self._params, self._body.cache_salt) as generation:
            async for _ in generation.changes():
                continue
            [output] = generation.outputs
            wants_prompt = self._body.prompt_logprobs is not None
            return ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[reader.whole() for reader in self._readers(generation)],
                usage=self._usage(generation),
                prompt_logprobs=prompt_logprobs(
                    self._service.tokenizer, output.prompt_logprobs or ()
                )
                if wants_prompt
                else UNSET,
            )

    async def events(
        self, prompt_token_ids: list[int], checkpoint_position: int | None
    ) -> AsyncGenerator[bytes, None]:
        prompt = self._prompt(prompt_token_ids, checkpoint_position)
        with self._service.generate([prompt], self._params, self._body.cache_salt) as generation:
            readers = self._readers(generation)
            async for _ in generation.changes():
                news = [choice for reader in readers for choice in reader.next()]
                if news:
                    yield b"".join(self._event([choice], generation) for choice in news)
            if self._body.includes_usage:
                yield self._frame([], self._usage(generation))
            yield sse.DONE

    def _prompt(self, token_ids: list[int], checkpoint_position: int | None) -> Prompt:
        def make_detokenizer() -> ChatAnswer:
            has_one_call = self._body.parallel_tool_calls is False
            answer = ChatAnswer(self._parser(token_ids), has_one_call=has_one_call)
            self._answers.append(answer)
            return answer

        return Prompt(
            token_ids,
            checkpoint_position=checkpoint_position,
            make_detokenizer=make_detokenizer,
        )

    def _parser(self, prompt_token_ids: list[int]) -> MessageParser:
        params = self._params
        return make_parser(
            self._service.config.model.model_type,
            self._service.tokenizer,
            prompt_token_ids=prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _readers(self, generation: Generation) -> list[ChatChoiceReader]:
        [output] = generation.outputs
        return [
            ChatChoiceReader(completion, answer, self._service.tokenizer, self._body)
            for completion, answer in zip(output.outputs, self._answers, strict=True)
        ]

    def _event(self, choices: list[ChatChunkChoice], generation: Generation) -> bytes:
        if self._body.includes_running_usage:
            return self._frame(choices, self._usage(generation))
        return self._frame(choices, None if self._body.includes_usage else UNSET)

    def _frame(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> bytes:
        chunk = ChatCompletionChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )
        return sse.frame(encode(chunk))

    def _usage(self, generation: Generation) -> Usage:
        num_reasoning = sum(answer.num_reasoning_tokens for answer in self._answers)
        return usage_of(generation.outputs, num_reasoning)
