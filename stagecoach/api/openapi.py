"""The OpenAPI document: which bodies the routes take and give.

Owns the way from our types to schemas. Routes parse and write JSON themselves, so the framework
cannot know.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from stagecoach.api.error_body import ErrorResponse
from stagecoach.api.error_forms import error_form

_TEMPLATE = "#/components/schemas/{}"


class Route(NamedTuple):
    """One route, and what it takes and gives."""

    method: str
    path: str
    answer: Callable[[Request], Awaitable[Response]]
    takes: type[BaseModel] | None = None
    gives: type[msgspec.Struct] | None = None  # None: no JSON; it is not in the document
    events: Sequence[type[msgspec.Struct]] = ()  # of a stream
    is_ended_by_done: bool = False  # the last event of a stream is the text [DONE]


def add_routes(app: FastAPI, routes: Sequence[Route]) -> None:
    """Have `app` answer them, and its document tell of them."""
    bodies: list[type[BaseModel]] = []
    answers: list[type[msgspec.Struct]] = [ErrorResponse]
    for route in routes:
        if route.method == "GET":
            # As probes of load balancers ask; the server sends no body then.
            _add_untold(app, route, "HEAD")
        if route.gives is None:
            _add_untold(app, route, route.method)
            continue
        error = error_form(route.path)
        answers += (route.gives, *route.events, error)
        bodies += [] if route.takes is None else [route.takes]
        app.add_api_route(
            route.path,
            route.answer,
            methods=[route.method],
            summary=(route.answer.__doc__ or route.path).partition("\n")[0],
            response_class=Response,
            responses=_responses(route.gives, route, error),
            openapi_extra=None if route.takes is None else _request_body(route.takes),
        )
    _describe(app, bodies, answers)


def _add_untold(app: FastAPI, route: Route, method: str) -> None:
    app.add_api_route(
        route.path,
        route.answer,
        methods=[method],
        response_class=Response,
        include_in_schema=False,
    )


def _request_body(takes: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": _json(takes)}}


def _responses(
    gives: type[msgspec.Struct], route: Route, error: type[msgspec.Struct]
) -> dict[int | str, dict[str, Any]]:
    content = _json(gives)
    if route.events:
        content["text/event-stream"] = {"itemSchema": _event_schema(route, error)}
    return {
        "200": {"description": "What was asked for.", "content": content},
        "default": {
            "description": "An error; in a stream, an event of this form instead of its end.",
            "content": _json(error),
        },
    }


def _event_schema(route: Route, error: type[msgspec.Struct]) -> dict[str, Any]:
    """One server-sent event: OpenAPI 3.2.0, section 4.14.3, "Sequential Media Types"."""
    kinds = dict.fromkeys((*route.events, error))
    data: dict[str, Any] = {
        "contentMediaType": "application/json",
        "contentSchema": {
            "anyOf": [{"$ref": _TEMPLATE.format(kind.__name__)} for kind in kinds],
        },
    }
    if route.is_ended_by_done:
        data = {"if": {"const": "[DONE]"}, "else": data}
    return {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"type": "string"} | data},
        "required": ["data"],
    }


def _describe(
    app: FastAPI, bodies: list[type[BaseModel]], answers: list[type[msgspec.Struct]]
) -> None:
    """Have the document hold the schemas that its routes refer to."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                servers=app.servers,
            )
            _, taken = models_json_schema(
                [(body, "validation") for body in bodies], ref_template=_TEMPLATE.format("{model}")
            )
            _, given = msgspec.json.schema_components(
                answers, ref_template=_TEMPLATE.format("{name}")
            )
            schemas = {**taken["$defs"], **given}
            document.setdefault("components", {})["schemas"] = schemas
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _TEMPLATE.format(kind.__name__)}}}
