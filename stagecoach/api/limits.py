"""What every request passes before a route sees it: size, type, key, and its id.

Owns the checks that need no body to be understood. One ASGI layer, because the body must be
counted as it comes.
"""

import asyncio
import hmac
import re
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stagecoach.api.error_body import HttpError
from stagecoach.api.error_forms import error_response, speaks_anthropic

# Those who watch the server have no key; the dashboard's page asks for one before it shows data.
_OPEN_PATHS = ("/health", "/ready", "/metrics", "/dashboard")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Limits:
    """Answers 401, 408, 413, 415 and what no route has caught; gives every answer its X-Request-Id.

    The id is the client's if it is one, else new. It only names the answer: two requests may
    have the same.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        body_timeout_seconds: float,
        api_keys: Iterable[str],
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_timeout_seconds = body_timeout_seconds
        self._api_keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        id_headers = ["x-request-id"] + ["request-id"] * speaks_anthropic(scope)
        has_started = False

        async def named_send(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message).update(dict.fromkeys(id_headers, request_id))
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, self._counted(receive), named_send)
        except Exception as error:
            if has_started:
                raise
            await error_response(scope, error)(scope, receive, named_send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if scope["path"] not in _OPEN_PATHS and self._api_keys:
            self._check_key(headers)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            raise self._too_large()
        if scope["method"] == "POST" and (length or "transfer-encoding" in headers):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if length != "0" and kind != "application/json" and not kind.endswith("+json"):
                raise HttpError(
                    415,
                    f"content-type must be application/json, not {kind[:80]!r}",
                    code="unsupported_media_type",
                )

    def _check_key(self, headers: Headers) -> None:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""]
        # Every key is compared, so that the time says nothing of which is near.
        found = [
            hmac.compare_digest(text.strip().encode(), key)
            for text in given
            for key in self._api_keys
        ]
        if not any(found):
            raise HttpError(
                401,
                "the header `authorization: Bearer KEY`, or `x-api-key: KEY`, with a key of this "
                "server is needed",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _counted(self, receive: Receive) -> Receive:
        num_bytes = 0
        is_whole = False
        deadline: float | None = None

        async def counting() -> Message:
            nonlocal num_bytes, is_whole, deadline
            if is_whole:
                return await receive()
            if deadline is None:
                deadline = asyncio.get_running_loop().time() + self._body_timeout_seconds
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            if message["type"] == "http.request":
                is_whole = not message.get("more_body", False)
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    raise self._too_large()
            return message

        return counting

    def _too_slow(self) -> HttpError:
        return HttpError(
            408,
            f"the body did not arrive within {self._body_timeout_seconds:g} s "
            "(--client-body-timeout)",
            code="body_timeout",
            headers={"connection": "close"},
        )

    def _too_large(self) -> HttpError:
        return HttpError(
            413,
            f"the body is larger than {self._max_body_bytes} bytes (--max-body-bytes)",
            code="body_too_large",
            headers={"connection": "close"},
        )
