"""What all kinds of answers share: their names, their usage, and how JSON is sent.

Owns the list of served models. Knows nothing of chat or text.
"""

import time
import uuid
from collections.abc import Iterable

import msgspec
from starlette.responses import Response

from stagecoach.api.error_body import HttpError
from stagecoach.api.responses import (
    CompletionTokensDetails,
    Model,
    PromptTokensDetails,
    Usage,
)
from stagecoach.outputs import RequestOutput

_ENCODER = msgspec.json.Encoder()
encode = _ENCODER.encode


def json_response(content: msgspec.Struct, status: int = 200) -> Response:
    """`content` as a body."""
    return Response(encode(content), status, media_type="application/json")


def new_answer_id(prefix: str) -> str:
    """Unique, whatever ids clients give to their requests."""
    return f"{prefix}-{uuid.uuid4().hex}"


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
            root=self._root,
            max_model_len=self._max_model_len,
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
