"""What /v1/messages answers with: the message, its blocks, and the events of a stream.

Names and fields are Anthropic's. A struct's tag is its `type`. Knows nothing of how they are
filled.
"""

from typing import Any, Literal

import msgspec

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class _Tagged(msgspec.Struct, frozen=True, tag_field="type"):
    pass


class AnsweredText(_Tagged, frozen=True, kw_only=True, tag="text"):
    text: str


class AnsweredThinking(_Tagged, frozen=True, kw_only=True, tag="thinking"):
    """What the model thought. The signature says that nobody signed it."""

    thinking: str
    signature: str


class AnsweredToolUse(_Tagged, frozen=True, kw_only=True, tag="tool_use"):
    """A call of a tool, for the client to make."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = AnsweredText | AnsweredThinking | AnsweredToolUse


class ThinkingTokens(msgspec.Struct, frozen=True, kw_only=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request. The prompt's are the sum of the three counts of input tokens.

    Whatever is computed is cached, so that nothing is said of what was kept.
    """

    input_tokens: int  # of the prompt, computed for this answer
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int  # of the prompt, found in the prefix cache
    output_tokens: int
    output_tokens_details: ThinkingTokens


class Message(_Tagged, frozen=True, kw_only=True, tag="message"):
    """The answer of /v1/messages; as the first event has it, without content and end."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokensCount(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class TextDelta(_Tagged, frozen=True, kw_only=True, tag="text_delta"):
    text: str


class ThinkingDelta(_Tagged, frozen=True, kw_only=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(_Tagged, frozen=True, kw_only=True, tag="signature_delta"):
    signature: str


class InputJsonDelta(_Tagged, frozen=True, kw_only=True, tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(_Tagged, frozen=True, kw_only=True, tag="message_start"):
    message: Message


class BlockStart(_Tagged, frozen=True, kw_only=True, tag="content_block_start"):
    index: int
    content_block: ContentBlock


class BlockDeltaEvent(_Tagged, frozen=True, kw_only=True, tag="content_block_delta"):
    index: int
    delta: BlockDelta


class BlockStop(_Tagged, frozen=True, kw_only=True, tag="content_block_stop"):
    index: int


class MessageEnd(msgspec.Struct, frozen=True, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDeltaEvent(_Tagged, frozen=True, kw_only=True, tag="message_delta"):
    """How the message ended, and its usage."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(_Tagged, frozen=True, kw_only=True, tag="message_stop"):
    """The last event."""


class Ping(_Tagged, frozen=True, kw_only=True, tag="ping"):
    """Nothing new, and the connection lives."""


ContentEvent = BlockStart | BlockDeltaEvent | BlockStop
MessageEvent = MessageStart | ContentEvent | MessageDeltaEvent | MessageStop | Ping
