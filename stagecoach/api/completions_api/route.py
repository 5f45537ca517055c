"""/v1/completions: prompts as they are, continued.

Owns the way from a body to the engine and from outputs to text completions, whole and streamed.
Choice i * n + j is completion j of prompt i.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from stagecoach.api import sse
from stagecoach.api.answers import (
    FinishReason,
    ServedModels,
    Usage,
    encode,
    json_response,
    new_id,
    now,
    usage_of,
)
from stagecoach.api.completions_api.objects import Completion, CompletionChoice
from stagecoach.api.completions_api.request import CompletionRequest
from stagecoach.api.engine_service import EngineService, Prompt
from stagecoach.api.generation import Generation
from stagecoach.api.logprobs import CompletionLogprobs, CompletionLogprobsWriter, prompt_logprobs
from stagecoach.errors import RequestError
from stagecoach.outputs import CompletionOutput, RequestOutput
from stagecoach.request import SamplingParams
from stagecoach.text.detokenizer import StopMatch
from stagecoach.text.tokenizer import Tokenizer


class Completions:
    """The route and what it answers from."""

    def __init__(self, service: EngineService, models: ServedModels) -> None:
        self._service = service
        self._models = models

    async def create(self, request: Request) -> Response:
        """Continue one or many prompts."""
        body = CompletionRequest.parse(await request.body())
        model = self._models.check(body.model)
        answer = _Answer(self._service, body, body.params(), model)
        prompts = await asyncio.to_thread(self._tokenize, body)
        try:
            if body.stream:
                return await sse.stream(request, answer.events(prompts))
            whole = await sse.until_disconnected(request, answer.whole(prompts))
        except RequestError as error:
            raise body.as_written(error) from None
        return json_response(whole)

    def _tokenize(self, body: CompletionRequest) -> list[Prompt]:
        """Prompts with their text where it is shown."""
        tokenizer = self._service.tokenizer
        reader = _NoText if body.is_prompt_only else None
        prompts = []
        for prompt in body.prompts:
            text: str | None
            if isinstance(prompt, str):
                text, token_ids = prompt, tokenizer.encode(prompt)
            else:
                text, token_ids = _decode(tokenizer, prompt) if body.echo else None, prompt
            prompts.append(Prompt(token_ids, text, make_detokenizer=reader))
        return prompts


class _Answer:
    """One answer: its parts that are the same in all its events."""

    def __init__(
        self, service: EngineService, body: CompletionRequest, params: SamplingParams, model: str
    ) -> None:
        self._service = service
        self._body = body
        self._params = params
        self._model = model
        self._id = new_id("cmpl-")
        self._created = now()

    async def whole(self, prompts: list[Prompt]) -> Completion:
        with self._service.generate(prompts, self._params, self._body.cache_salt) as generation:
            await generation.wait()
            choices = [choice.next() for choice in self._choices(generation)]
            return self._object(
                [choice for choice in choices if choice is not None],
                usage_of(generation.outputs),
            )

    async def events(self, prompts: list[Prompt]) -> AsyncGenerator[bytes, None]:
        body = self._body
        with self._service.generate(prompts, self._params, body.cache_salt) as generation:
            readers = list(self._choices(generation))
            async for _ in generation.changes():
                news = [item for reader in readers if (item := reader.next()) is not None]
                if news:
                    yield b"".join(self._event(choice, generation) for choice in news)
            if body.includes_usage:
                yield sse.frame(encode(self._object([], usage_of(generation.outputs))))
            yield sse.DONE

    def _event(self, choice: CompletionChoice, generation: Generation) -> bytes:
        usage = self._body.running_usage(lambda: usage_of(generation.outputs))
        return sse.frame(encode(self._object([choice], usage)))

    def _object(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )

    def _choices(self, generation: Generation) -> Iterator["_ChoiceReader"]:
        index = 0
        for output in generation.outputs:
            for completion in output.outputs:
                yield _ChoiceReader(index, output, completion, self._body, self._service.tokenizer)
                index += 1


class _ChoiceReader:
    """One choice, and how much of it was told."""

    def __init__(
        self,
        index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        body: CompletionRequest,
        tokenizer: Tokenizer,
    ) -> None:
        self._index = index
        self._output = output
        self._completion = completion
        self._body = body
        self._tokenizer = tokenizer
        self._num_chars = 0
        self._num_tokens = 0
        self._is_begun = False
        self._is_ended = False
        self._logprobs = (
            None
            if body.logprobs is None
            else CompletionLogprobsWriter(
                tokenizer,
                body.logprobs,
                skip_special_tokens=body.skip_special_tokens is not False,
            )
        )

    def next(self) -> CompletionChoice | None:
        """What is new since the last time; None: nothing that anybody sees."""
        completion = self._completion
        if self._is_ended or not (completion.token_ids or completion.finish_reason):
            return None
        text = completion.text[self._num_chars :]
        token_ids = completion.token_ids[self._num_tokens :]
        is_first = not self._is_begun
        has_ended = completion.finish_reason is not None
        shows_tokens = bool(token_ids) and bool(self._logprobs or self._body.return_token_ids)
        if not (text or has_ended or shows_tokens or (is_first and self._body.echo)):
            return None
        logprobs = self._new_logprobs(token_ids, is_first=is_first)
        self._is_begun = True
        self._is_ended = has_ended
        self._num_chars += len(text)
        self._num_tokens += len(token_ids)
        prompt_entries = self._output.prompt_logprobs
        wants_prompt = is_first and self._body.prompt_logprobs is not None
        return CompletionChoice(
            index=self._index,
            text=(self._output.prompt or "") + text if is_first and self._body.echo else text,
            logprobs=logprobs,
            finish_reason=self._finish_reason(),
            stop_reason=None if self._body.is_prompt_only else completion.stop_reason,
            prompt_logprobs=prompt_logprobs(self._tokenizer, prompt_entries or ())
            if wants_prompt
            else UNSET,
            token_ids=token_ids if self._body.return_token_ids else UNSET,
        )

    def _finish_reason(self) -> FinishReason | None:
        reason = self._completion.finish_reason
        if self._body.is_prompt_only and reason == "stop":
            return "length"
        return reason  # type: ignore[return-value]

    def _new_logprobs(self, token_ids: list[int], *, is_first: bool) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        entries = [*(self._completion.logprobs or ())[self._num_tokens :]]
        if is_first and self._body.echo:
            return self._logprobs.write(
                [*self._output.prompt_token_ids, *token_ids],
                [*(self._output.prompt_logprobs or ()), *entries],
                num_prompt_tokens=len(self._output.prompt_token_ids),
            )
        return self._logprobs.write(token_ids, entries)


class _NoText:
    """Reads a completion of which nothing counts: it ends before its first token."""

    stop_match: StopMatch | None = None

    def push(self, token_ids: Iterable[int]) -> str:
        if any(True for _ in token_ids):
            self.stop_match = StopMatch("", 0)
        return ""

    def finish(self) -> str:
        return ""


def _decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Their text; ids that stand for nothing are refused later, with all that is checked."""
    known = (token_id for token_id in token_ids if 0 <= token_id < tokenizer.vocab_size)
    return tokenizer.decode_bytes(known).decode(errors="replace")
