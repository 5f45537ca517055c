"""What all kinds of answers share: their names, their usage, and how JSON is sent.

Owns the list of served models. Knows nothing of chat or text.
"""

import time
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

import msgspec
from starlette.responses import Response

from stagecoach.api.error_body import HttpError
from stagecoach.outputs import RequestOutput

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request. Those that end an answer count; all n completions count."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One that is served, in the terms of OpenAI, vLLM and Anthropic at once."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    created: int
    created_at: str  # the same moment by RFC 3339
    owned_by: str = "stagecoach"
    root: str  # what the server was started with
    parent: None = None
    display_name: str
    lifecycle: Literal["active"] = "active"
    max_model_len: int
    max_input_tokens: int  # of a prompt that leaves room for one token


_ENCODER = msgspec.json.Encoder()
encode = _ENCODER.encode


def json_response(content: msgspec.Struct, status: int = 200) -> Response:
    """`content` as a body."""
    return Response(encode(content), status, media_type="application/json")


def new_id(prefix: str) -> str:
    """Of an answer or a part of one; unique, whatever ids clients give to their requests."""
    return prefix + uuid.uuid4().hex


def now() -> int:
    """Seconds since 1970, as answers carry them."""
    return int(time.time())


class ServedModels:
    """The one model, under all its names."""

    def __init__(self, names: tuple[str, ...], *, root: str, max_model_len: int) -> None:
        self.names = names
        self._root = root
        self._max_model_len = max_model_len
        self._created = now()

    def check(self, name: str | None) -> str:
        """The name that the answer carries.

        Raises:
            HttpError: 404, there is no such model.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise HttpError(
                404,
                f"model: {name[:200]!r} is not served here; there is {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def model(self, name: str) -> Model:
        """
        Raises:
            HttpError: 404, there is no such model.
        """
        return Model(
            id=self.check(name),
            created=self._created,
            created_at=datetime.fromtimestamp(self._created, UTC).isoformat(),
            root=self._root,
            display_name=name,
            max_model_len=self._max_model_len,
            max_input_tokens=self._max_model_len - 1,
        )


def usage_of(outputs: Iterable[RequestOutput], num_reasoning_tokens: int = 0) -> Usage:
    """Of all prompts and completions, up to now. A prompt counts once for its n completions."""
    num_prompt = num_cached = num_completion = 0
    for output in outputs:
        num_prompt += len(output.prompt_token_ids)
        num_cached += output.num_cached_tokens
        num_completion += sum(len(completion.token_ids) for completion in output.outputs)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens),
    )
