"""One example of a task: what is asked, and the answer that counts as right."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stagecoach.text.message_stream import ParsedMessage, ToolCall

Split = Literal["train", "held_out"]

# One example in this many is held out.
HELD_OUT_SHARE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt in the form of OpenAI's messages and the answer expected for it."""

    family: str
    messages: tuple[Mapping[str, Any], ...]
    expected: ParsedMessage
    tools: tuple[Mapping[str, Any], ...] = ()
    response_format: Mapping[str, Any] | None = None
    thinking: bool = True

    @property
    def split(self) -> Split:
        """Which split the example belongs to. Its prompt alone decides, so no prompt is in both."""
        prompt = json.dumps([self.messages, self.tools, self.response_format])
        digest = hashlib.blake2b(prompt.encode(), digest_size=2).digest()
        is_held_out = int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0
        return "held_out" if is_held_out else "train"

    @property
    def answer_message(self) -> dict[str, Any]:
        """The expected answer as an assistant message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.expected.content}
        if self.expected.reasoning:
            message["reasoning_content"] = self.expected.reasoning
        if self.expected.tool_calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": call.arguments}}
                for call in self.expected.tool_calls
            ]
        return message


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    """An assistant's message without reasoning."""
    return {"role": "assistant", "content": text}


def answer(content: str, reasoning: str = "") -> ParsedMessage:
    """An expected answer in words."""
    return ParsedMessage(reasoning, content)


def calls(*named_arguments: tuple[str, Mapping[str, Any]]) -> ParsedMessage:
    """An expected answer that calls tools."""
    return ParsedMessage(
        tool_calls=tuple(
            ToolCall(name, json.dumps(arguments, ensure_ascii=False))
            for name, arguments in named_arguments
        )
    )
