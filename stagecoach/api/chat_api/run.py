"""A conversation on its way through the engine, whichever protocol asked.

Owns what all conversation routes share: the prompt, the parser of each completion, and the
usage. Knows neither events nor the objects that a route answers with.
"""

import asyncio
import contextlib
from collections.abc import Iterator

import msgspec

from stagecoach.api.answers import Usage, usage_of
from stagecoach.api.chat_api.answer import ChatAnswer
from stagecoach.api.chat_api.conversation import RenderedChat, answer_params, render_chat
from stagecoach.api.chat_api.request import ChatCompletionRequest
from stagecoach.api.engine_service import EngineService, Prompt
from stagecoach.api.generation import Generation
from stagecoach.text.chat import make_parser
from stagecoach.text.message_stream import MessageParser


class ChatRun:
    """One request for an answer to a conversation; `prepare` comes first, then `generate` once.

    Attributes:
        answers: one a completion, from `generate` on: what its message is up to now.
    """

    def __init__(self, service: EngineService, body: ChatCompletionRequest) -> None:
        """
        Raises:
            RequestError: a sampling field is refused.
        """
        self._service = service
        self._body = body
        self._params = body.params()
        self._rendered: RenderedChat | None = None
        self.answers: list[ChatAnswer] = []

    async def prepare(self) -> None:
        """Render the conversation and write the grammar of its answer, off the event loop.

        Raises:
            RequestError: names the field that cannot be written, or honoured.
        """
        await asyncio.to_thread(self._prepare)

    def _prepare(self) -> None:
        rendered = render_chat(self._service, self._body)
        self._params = msgspec.structs.replace(
            self._params,
            structured_outputs=answer_params(self._service, self._body, rendered.token_ids),
        )
        self._rendered = rendered

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt_token_ids)

    @contextlib.contextmanager
    def generate(self) -> Iterator[Generation]:
        """Start the completions; leaving aborts those that still run.

        Raises:
            RequestError, NotServingError, QueueFullError, EngineDeadError: as of
                `EngineService.generate`.
        """
        assert self._rendered is not None, "prepare() comes first"
        prompt = Prompt(
            self._rendered.token_ids,
            checkpoint_position=self._rendered.checkpoint_position,
            make_detokenizer=self._new_answer,
        )
        with self._service.generate([prompt], self._params, self._body.cache_salt) as generation:
            yield generation

    def usage(self, generation: Generation) -> Usage:
        """Of the prompt and all completions, up to now."""
        num_reasoning = sum(answer.num_reasoning_tokens for answer in self.answers)
        return usage_of(generation.outputs, num_reasoning)

    @property
    def _prompt_token_ids(self) -> list[int]:
        assert self._rendered is not None, "prepare() comes first"
        return self._rendered.token_ids

    def _new_answer(self) -> ChatAnswer:
        has_one_call = self._body.parallel_tool_calls is False
        answer = ChatAnswer(self._parser(), has_one_call=has_one_call)
        self.answers.append(answer)
        return answer

    def _parser(self) -> MessageParser:
        params = self._params
        return make_parser(
            self._service.config.model.model_type,
            self._service.tokenizer,
            prompt_token_ids=self._prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
