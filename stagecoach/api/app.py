"""The application: its routes, and the one place where exceptions become answers.

Owns which route has which path. The routes are in the modules that it names.
"""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from stagecoach.api import chat_protocol, openapi, protocol, responses
from stagecoach.api.answers import ServedModels
from stagecoach.api.chat import ChatCompletions
from stagecoach.api.completions import Completions
from stagecoach.api.engine_service import EngineService
from stagecoach.api.error_body import failure_of
from stagecoach.api.limits import Limits
from stagecoach.api.operations import Operations
from stagecoach.api.settings import ServerSettings
from stagecoach.errors import StagecoachError

_DESCRIPTION = """\
Kimi-K3-class models behind the protocol of OpenAI. Streams are server-sent events and end with
`[DONE]`; one that breaks ends with an event that has an `error` instead.
"""


def make_app(service: EngineService, settings: ServerSettings, version: str) -> FastAPI:
    """All routes over one engine, which somebody else loads."""
    config = service.config
    models = ServedModels(
        settings.served_model_names, root=config.engine.model, max_model_len=config.max_model_len
    )
    app = FastAPI(
        title="Stagecoach",
        version=version,
        description=_DESCRIPTION,
        root_path=settings.root_path,
    )
    _add_routes(
        app,
        chat=ChatCompletions(service, models),
        completions=Completions(service, models),
        operations=Operations(service, models, version),
    )
    for kind in (
        StagecoachError,
        ValidationError,
        HTTPException,
        ClientDisconnect,
    ):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(Limits, max_body_bytes=settings.max_body_bytes, api_keys=settings.api_keys)
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def _add_routes(
    app: FastAPI, *, chat: ChatCompletions, completions: Completions, operations: Operations
) -> None:
    bodies: list[Any] = []
    answers: list[Any] = []

    def add(
        method: str,
        path: str,
        route: Callable[..., Any],
        gives: Any,
        takes: Any = None,
        event: Any = None,
    ) -> None:
        answers.extend(kind for kind in (gives, event) if kind is not None)
        bodies.extend([] if takes is None else [takes])
        app.add_api_route(
            path,
            route,
            methods=[method],
            summary=(route.__doc__ or path).partition("\n")[0],
            response_class=Response,
            responses=openapi.gives(gives, event=event),
            openapi_extra=None if takes is None else openapi.takes(takes),
        )

    add(
        "POST",
        "/v1/chat/completions",
        chat.create,
        responses.ChatCompletion,
        chat_protocol.ChatCompletionRequest,
        responses.ChatCompletionChunk,
    )
    add(
        "POST",
        "/v1/completions",
        completions.create,
        responses.Completion,
        protocol.CompletionRequest,
        responses.Completion,
    )
    add("GET", "/v1/models", operations.models, responses.ModelList)
    add("GET", "/v1/models/{name:path}", operations.model, responses.Model)
    add("POST", "/tokenize", operations.tokenize, responses.Tokens, chat_protocol.TokenizeRequest)
    add("POST", "/detokenize", operations.detokenize, responses.Text, protocol.DetokenizeRequest)
    add("GET", "/health", operations.health, responses.Health)
    add("GET", "/ready", operations.ready, responses.Health)
    add("GET", "/version", operations.version, responses.Version)
    add("GET", "/server_info", operations.server_info, responses.ServerInfo)
    add("POST", "/v1/cache/reset", operations.reset_cache, responses.CacheReset)
    openapi.describe(app, bodies=bodies, answers=answers)


async def _answer_error(request: Request, error: Exception) -> Response:
    return failure_of(error).response()
