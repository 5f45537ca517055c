"""The application: its routes, and the one place where exceptions become answers.

Owns which route has which path. The routes are in the modules that it names.
"""

from typing import get_args

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from stagecoach.api.answers import Model, ServedModels
from stagecoach.api.chat_api.objects import ChatCompletion, ChatCompletionChunk
from stagecoach.api.chat_api.request import ChatCompletionRequest
from stagecoach.api.chat_api.route import ChatCompletions
from stagecoach.api.completions_api.objects import Completion
from stagecoach.api.completions_api.request import CompletionRequest
from stagecoach.api.completions_api.route import Completions
from stagecoach.api.engine_service import EngineService
from stagecoach.api.error_forms import error_response
from stagecoach.api.limits import Limits
from stagecoach.api.messages_api.objects import Message, MessageEvent, TokensCount
from stagecoach.api.messages_api.request import CountTokensRequest, MessagesRequest
from stagecoach.api.messages_api.route import Messages
from stagecoach.api.openapi import Route, add_routes
from stagecoach.api.operations.dashboard import Dashboard, DashboardData
from stagecoach.api.operations.metrics import CountAnswers, Metrics
from stagecoach.api.operations.objects import (
    CacheReset,
    Health,
    ModelList,
    ServerInfo,
    Text,
    TokenizerInfo,
    Tokens,
    Version,
)
from stagecoach.api.operations.profiles import Profile, Profiles
from stagecoach.api.operations.request import DetokenizeRequest, TokenizeRequest
from stagecoach.api.operations.route import Operations
from stagecoach.api.responses_api.objects import ResponseObject, StreamEvent
from stagecoach.api.responses_api.request import ResponsesRequest
from stagecoach.api.responses_api.route import STORED_PATHS, Responses
from stagecoach.api.settings import ServerSettings
from stagecoach.errors import StagecoachError

_DESCRIPTION = """\
Kimi-K3-class models behind the protocols of OpenAI and Anthropic. Streams are server-sent events;
one that breaks ends with an event that has an `error`.
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
    add_routes(app, _routes(service, models, settings, version))
    for kind in (StagecoachError, ValidationError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, _answer_error)
    if settings.otlp_traces_endpoint is not None:
        _add_traces(app, service, settings.otlp_traces_endpoint, settings.served_model_names[0])
    app.add_middleware(
        Limits,
        max_body_bytes=settings.max_body_bytes,
        body_timeout_seconds=settings.client_body_timeout_seconds,
        api_keys=settings.api_keys,
    )
    app.add_middleware(CountAnswers, observers=service.observers)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def _add_traces(app: FastAPI, service: EngineService, endpoint: str, model_name: str) -> None:
    # Needs an extra that most do without.
    from stagecoach.api.tracing import RequestSpans, TraceContext, otlp_exporter

    service.observers.add(RequestSpans(otlp_exporter(endpoint), model_name))
    app.add_middleware(TraceContext)


def _routes(
    service: EngineService, models: ServedModels, settings: ServerSettings, version: str
) -> list[Route]:
    chat = ChatCompletions(service, models)
    completions = Completions(service, models)
    responses = Responses(service, models)
    messages = Messages(service, models)
    operations = Operations(service, models, version)
    dashboard = Dashboard(service, models, version)
    profiles = Profiles(service, settings.profiler_dir)
    return [
        Route(
            "POST",
            "/v1/chat/completions",
            chat.create,
            takes=ChatCompletionRequest,
            gives=ChatCompletion,
            events=(ChatCompletionChunk,),
            is_ended_by_done=True,
        ),
        Route(
            "POST",
            "/v1/completions",
            completions.create,
            takes=CompletionRequest,
            gives=Completion,
            events=(Completion,),
            is_ended_by_done=True,
        ),
        Route(
            "POST",
            "/v1/responses",
            responses.create,
            takes=ResponsesRequest,
            gives=ResponseObject,
            events=get_args(StreamEvent),
        ),
        *(Route(*place, responses.stored, gives=ResponseObject) for place in STORED_PATHS),
        Route(
            "POST",
            "/v1/messages",
            messages.create,
            takes=MessagesRequest,
            gives=Message,
            events=get_args(MessageEvent),
        ),
        Route(
            "POST",
            "/v1/messages/count_tokens",
            messages.count_tokens,
            takes=CountTokensRequest,
            gives=TokensCount,
        ),
        Route("GET", "/v1/models", operations.models, gives=ModelList),
        Route("GET", "/v1/models/{name:path}", operations.model, gives=Model),
        Route("POST", "/tokenize", operations.tokenize, takes=TokenizeRequest, gives=Tokens),
        Route("GET", "/tokenizer_info", operations.tokenizer_info, gives=TokenizerInfo),
        Route("POST", "/detokenize", operations.detokenize, takes=DetokenizeRequest, gives=Text),
        Route("GET", "/health", operations.health, gives=Health),
        Route("GET", "/ready", operations.ready, gives=Health),
        Route("GET", "/version", operations.version, gives=Version),
        Route("GET", "/server_info", operations.server_info, gives=ServerInfo),
        Route("GET", "/dashboard", dashboard.page),
        Route("GET", "/dashboard/data", dashboard.data, gives=DashboardData),
        Route("GET", "/metrics", Metrics(service, models.names[0], version).show),
        Route("POST", "/v1/cache/reset", operations.reset_cache, gives=CacheReset),
        Route("POST", "/start_profile", profiles.start, gives=Profile),
        Route("POST", "/stop_profile", profiles.stop, gives=Profile),
    ]


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        # Most likely a client's base URL lacks the /v1, or has it twice.
        detail = f"there is no {request.method} {request.url.path!r:.200} here; /docs lists what is"
        error = HTTPException(error.status_code, detail, error.headers)
    return error_response(request.scope, error)
