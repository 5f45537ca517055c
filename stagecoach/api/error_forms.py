"""Which form an error has: Anthropic's on the paths of its protocol, OpenAI's on all others.

Owns the form of Anthropic and its names for our failures. What each exception is, the one table
in `error_body` says; who asked, the path.

    {"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Scope

from stagecoach.api.error_body import ErrorResponse, Failure, failure_of

_ANTHROPIC_PATH = "/v1/messages"

# What this protocol calls each status; those that are not here are a bad request below 500.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# To this protocol a full queue is the server's trouble; 429 is what one client did too often.
_STATUSES = {"queue_full": 529}
_DEAD = "engine_dead"

# The code of an error by which a client learns to send a conversation as a whole.
THREAD_CODE = "thread_unsupported_request"


class AnthropicErrorDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may act on."""

    error_code: str


class AnthropicError(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong; the message opens with the name of the field, where it is one."""

    type: str
    message: str
    details: AnthropicErrorDetails | UnsetType = UNSET


class AnthropicErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is no success, and an event of a stream that breaks."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str | None


def error_form(path: str) -> type[msgspec.Struct]:
    """What the errors of a route are."""
    is_anthropic = path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
    return AnthropicErrorResponse if is_anthropic else ErrorResponse


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request, by its path, is one of Anthropic's protocol."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return error_form(path) is AnthropicErrorResponse


def error_response(scope: Scope, error: BaseException) -> Response:
    """The whole answer to a request that ends with `error`."""
    failure = failure_of(error)
    if not speaks_anthropic(scope):
        return failure.response()
    status = _STATUSES.get(failure.error.code or "", failure.status)
    return Response(
        _body(scope, failure, status), status, failure.headers, media_type="application/json"
    )


def anthropic_body(scope: Scope, error: BaseException) -> bytes:
    """The body of that form, as JSON, for an event."""
    failure = failure_of(error)
    return _body(scope, failure, _STATUSES.get(failure.error.code or "", failure.status))


def _body(scope: Scope, failure: Failure, status: int) -> bytes:
    name = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    code = failure.error.code
    if code == _DEAD:
        name = "api_error"
    error = AnthropicError(
        type=name,
        message=failure.error.message,
        details=AnthropicErrorDetails(error_code=code) if code == THREAD_CODE else UNSET,
    )
    request_id = scope.get("state", {}).get("request_id")
    return msgspec.json.encode(AnthropicErrorResponse(error=error, request_id=request_id))
