"""Exceptions to HTTP: the one table, and the form of OpenAI's error body.

Every error that a client sees, as a whole response or as an event of a stream, is made here:

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from stagecoach.errors import (
    EngineDeadError,
    GrammarError,
    LethalRequestError,
    NonFiniteError,
    PromptTooLongError,
    RequestError,
    StagecoachError,
)
from stagecoach.observe.log import get_logger

_log = get_logger(__name__)

# Messages quote what they refuse, which may be of any length.
_MAX_MESSAGE = 1000

RETRY_SECONDS = 1
LOADING_RETRY_SECONDS = 5


class HttpError(StagecoachError):
    """A request is answered with this status; the text is its message."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


class NotServingError(HttpError):
    """The engine loads or the server ends; another try may find it serving."""

    def __init__(self, message: str, *, code: str) -> None:
        headers = {"retry-after": str(LOADING_RETRY_SECONDS)}
        super().__init__(503, message, code=code, headers=headers)


class QueueFullError(HttpError):
    """More requests wait than the server keeps."""

    def __init__(self, message: str) -> None:
        headers = {"retry-after": str(RETRY_SECONDS)}
        super().__init__(429, message, code="queue_full", headers=headers)


class ErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong; `param` names the field of the request, where it is one."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is no success, and an event of a stream that breaks."""

    error: ErrorObject


class Failure(NamedTuple):
    """An exception as HTTP sees it."""

    status: int
    error: ErrorObject
    headers: dict[str, str]

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(ErrorResponse(error=self.error))

    def response(self) -> Response:
        return Response(self.body, self.status, self.headers, media_type="application/json")


# What each status is called: OpenAI's `type`.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_REQUEST_CODES = {NonFiniteError: "non_finite", LethalRequestError: "lethal_request"}
_STATUS_CODES = {404: "not_found", 405: "method_not_allowed"}


def failure_of(error: BaseException) -> Failure:
    """The table: an exception to its status and body. What is not ours is logged, not told."""
    match error:
        case HttpError():
            return _failure(
                error.status, str(error), param=error.param, code=error.code, headers=error.headers
            )
        case ClientDisconnect():
            return _failure(499, "the client closed the connection", code="client_closed")
        case PromptTooLongError():
            return _failure(400, str(error), param=error.field, code="context_length_exceeded")
        case RequestError():
            return _failure(400, str(error), param=error.field, code="invalid_value")
        case ValidationError():
            param, message = _first_violation(error)
            return _failure(400, message, param=param, code="invalid_value")
        case GrammarError():
            # Of the client's making: the same request would end the same way again.
            return _failure(400, _named(error), code="grammar_limit")
        case NonFiniteError() | LethalRequestError():
            return _failure(500, _named(error), code=_REQUEST_CODES[type(error)])
        case EngineDeadError():
            return _failure(503, _named(error), code="engine_dead")
        case HTTPException(status_code=status):
            return _failure(
                status,
                str(error.detail),
                code=_STATUS_CODES.get(status, "invalid_request"),
                headers=error.headers,
            )
    _log.error("a request failed", exc_info=error)
    return _failure(500, "the server failed; its log says why", code="internal_error")


def _failure(
    status: int,
    message: str,
    *,
    code: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Failure:
    kind = _TYPES.get(status, "invalid_request_error")
    if len(message) > _MAX_MESSAGE:
        message = f"{message[: _MAX_MESSAGE // 2]} ... {message[-_MAX_MESSAGE // 2 :]}"
    error = ErrorObject(message=message, type=kind, param=param, code=code)
    return Failure(status, error, dict(headers or {}))


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


Location = tuple[int | str, ...]

# Pydantic names the branch of a union that it tried, as if it were a field.
_BRANCHES = {"str", "int", "float", "bool", "none"}


def _first_violation(error: ValidationError) -> tuple[str | None, str]:
    """The field and one line about it, of the first thing that pydantic found."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    if details[0]["type"] == "json_invalid":
        reason = details[0]["msg"]
        return None, f"the body is no JSON: {reason.partition(': ')[2] or reason}"
    violation = _furthest(details)
    param = _field(violation["loc"])
    # All that is said of it: one line for each branch of a union.
    said = [_lower(item["msg"]) for item in details if _field(item["loc"]) == param]
    return param or None, f"{param or 'the body'}: {'; '.join(dict.fromkeys(said))}"


def _furthest(details: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first violation; of a union, that of the branch that got furthest in a list."""
    location = details[0]["loc"]
    start = next((place for place, part in enumerate(location) if _is_branch(part)), None)
    if start is None:
        return details[0]
    branches: dict[int | str, ErrorDetails] = {}
    for item in details:
        if len(item["loc"]) > start and item["loc"][:start] == location[:start]:
            branches.setdefault(item["loc"][start], item)
    return max(branches.values(), key=lambda item: _depth(item["loc"]))


def _depth(location: Location) -> tuple[list[int], int]:
    indices = [part for part in location if isinstance(part, int)]
    return indices, sum(not _is_branch(part) for part in location)


def _is_branch(part: int | str) -> bool:
    if isinstance(part, int):
        return False
    return not part.isidentifier() or part in _BRANCHES or part[0].isupper()


def _field(location: Location) -> str:
    """As a client would write it: `messages[0].content`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _is_branch(part):
            path += f".{part}"
    return path.removeprefix(".")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
