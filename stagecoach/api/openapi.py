"""The OpenAPI document: which bodies the routes take and give.

Owns the way from our types to schemas. Routes parse and write JSON themselves, so the framework
cannot know.
"""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from stagecoach.api.error_body import ErrorResponse

_TEMPLATE = "#/components/schemas/{}"


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """What a route with this body adds to its description."""
    return {"requestBody": {"required": True, "content": _json(body)}}


def gives(answer: type[msgspec.Struct], *, event: type[msgspec.Struct] | None = None) -> Any:
    """The responses of a route; `event` is what a stream is made of, before its [DONE]."""
    content = _json(answer)
    if event is not None:
        content["text/event-stream"] = {"schema": {"$ref": _TEMPLATE.format(event.__name__)}}
    return {
        "200": {"description": "What was asked for.", "content": content},
        "default": {
            "description": "An error; in a stream, an event of this form instead of [DONE].",
            "content": _json(ErrorResponse),
        },
    }


def describe(
    app: FastAPI,
    *,
    bodies: list[type[BaseModel]],
    answers: list[type[msgspec.Struct]],
) -> None:
    """Have `app` tell the schemas that `takes` and `gives` refer to."""

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
                [*answers, ErrorResponse], ref_template=_TEMPLATE.format("{name}")
            )
            schemas = {**taken["$defs"], **given}
            document.setdefault("components", {})["schemas"] = schemas
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _TEMPLATE.format(kind.__name__)}}}
