"""One choice of a chat completion, as a whole or as the next piece of a stream.

Owns how much of a completion was told, and its finish reason. Knows neither events nor the
engine.
"""

from collections.abc import Iterator

from msgspec import UNSET

from stagecoach.api.answers import FinishReason
from stagecoach.api.chat_api.answer import ChatAnswer
from stagecoach.api.chat_api.objects import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    FunctionCall,
    FunctionDelta,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
)
from stagecoach.api.chat_api.request import ChatCompletionRequest, NamedToolChoice
from stagecoach.api.logprobs import ChatLogprobs, chat_logprobs
from stagecoach.outputs import CompletionOutput
from stagecoach.text import message_stream
from stagecoach.text.tokenizer import Tokenizer


class ChatChoiceReader:
    """A completion, its message, and what of both was told."""

    def __init__(
        self,
        completion: CompletionOutput,
        answer: ChatAnswer,
        tokenizer: Tokenizer,
        body: ChatCompletionRequest,
    ) -> None:
        self._completion = completion
        self._answer = answer
        self._tokenizer = tokenizer
        self._body = body
        self._num_tokens = 0
        self._is_begun = False
        self._is_ended = False

    def whole(self) -> ChatChoice:
        """The finished choice."""
        token_ids, logprobs = self._new_tokens()
        message = self._answer.take()
        calls = [
            ToolCall(
                id=call.id or "",
                function=FunctionCall(name=call.name or "", arguments=call.arguments),
            )
            for call in message.tool_calls
        ]
        reason = self._finish_reason()
        assert reason is not None, "the generation has finished"
        return ChatChoice(
            index=self._completion.index,
            message=AssistantMessage(
                # A message of nothing but calls has no content; an empty answer has an empty one.
                content=message.content or (None if calls else ""),
                reasoning_content=message.reasoning or None,
                reasoning=message.reasoning or None,
                tool_calls=calls or UNSET,
            ),
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=self._stop_reason(),
            token_ids=token_ids if self._body.return_token_ids else UNSET,
        )

    def next(self) -> Iterator[ChatChunkChoice]:
        """What is new since the last time, as no, one or several pieces.

        The first opens the message; reasoning, content and calls never share one; the last has
        the finish reason and no text.
        """
        completion = self._completion
        if self._is_ended or not (completion.token_ids or completion.finish_reason):
            return
        if not self._is_begun:
            self._is_begun = True
            yield self._piece(MessageDelta(role="assistant", content=""))
        token_ids, logprobs = self._new_tokens()
        deltas = list(_deltas(self._answer.take()))
        shows_tokens = bool(token_ids) and bool(logprobs or self._body.return_token_ids)
        if shows_tokens and not deltas and completion.finish_reason is None:
            deltas = [MessageDelta()]
        reason = self._finish_reason()
        if reason is not None:
            self._is_ended = True
            deltas.append(MessageDelta())
        for number, delta in enumerate(deltas):
            is_last = number == len(deltas) - 1
            is_first = number == 0
            yield ChatChunkChoice(
                index=completion.index,
                delta=delta,
                logprobs=logprobs if is_first else None,
                finish_reason=reason if is_last else None,
                stop_reason=self._stop_reason() if is_last and reason is not None else UNSET,
                token_ids=token_ids if is_first and self._body.return_token_ids else UNSET,
            )

    def _piece(self, delta: MessageDelta) -> ChatChunkChoice:
        return ChatChunkChoice(index=self._completion.index, delta=delta)

    def _new_tokens(self) -> tuple[list[int], ChatLogprobs | None]:
        start = self._num_tokens
        token_ids = self._completion.token_ids[start:]
        self._num_tokens += len(token_ids)
        entries = self._completion.logprobs
        if entries is None or not token_ids:
            return token_ids, None
        return token_ids, chat_logprobs(self._tokenizer, entries[start:])

    def _finish_reason(self) -> FinishReason | None:
        reason = self._completion.finish_reason
        # Who names the function knows what comes: to OpenAI that answer has just stopped.
        is_named = isinstance(self._body.tool_choice, NamedToolChoice)
        if reason == "stop" and self._answer.has_tool_calls and not is_named:
            return "tool_calls"
        return reason  # type: ignore[return-value]

    def _stop_reason(self) -> int | str | None:
        # Empty: a second call was about to begin.
        reason = self._completion.stop_reason
        return None if reason == "" else reason


def _deltas(news: message_stream.MessageDelta) -> Iterator[MessageDelta]:
    if news.reasoning:
        yield MessageDelta(reasoning_content=news.reasoning, reasoning=news.reasoning)
    if news.content:
        yield MessageDelta(content=news.content)
    if news.tool_calls:
        yield MessageDelta(tool_calls=[_call_delta(call) for call in news.tool_calls])


def _call_delta(call: message_stream.ToolCallDelta) -> ToolCallDelta:
    if call.id is None:
        return ToolCallDelta(index=call.index, function=FunctionDelta(arguments=call.arguments))
    return ToolCallDelta(
        index=call.index,
        id=call.id,
        type="function",
        function=FunctionDelta(name=call.name or "", arguments=call.arguments),
    )
