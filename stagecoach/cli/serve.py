"""`stagecoach serve`: an HTTP server that clients of OpenAI can use unchanged."""

from typing import Annotated, Any

import typer

from stagecoach import __version__
from stagecoach.api.engine_service import EngineService
from stagecoach.api.server import serve as serve_http
from stagecoach.api.settings import ServerSettings
from stagecoach.config import EngineConfig
from stagecoach.llm import open_model


def serve(
    *,
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or `demo` or `tiny`.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: one that is free.")] = 8000,
    uds: Annotated[
        str | None, typer.Option(metavar="PATH", help="A Unix socket instead of host and port.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="STAGECOACH_API_KEY",
            metavar="KEY",
            help="What clients must send as `authorization: Bearer KEY`; may be repeated.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="What clients call the model; may be repeated. Default: MODEL."
        ),
    ] = None,
    root_path: Annotated[
        str, typer.Option(metavar="PATH", help="Prefix that a proxy in front strips off.")
    ] = "",
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="A web origin whose pages may call; may be repeated; `*`: any. Default: none.",
        ),
    ] = None,
    max_queue_requests: Annotated[
        int, typer.Option(help="Completions taken beyond --max-num-seqs; then 429.")
    ] = 1024,
    max_body_bytes: Annotated[int, typer.Option(help="Largest body of a request.")] = 16 * 2**20,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that open requests have after SIGTERM.")
    ] = 30.0,
    stall_timeout: Annotated[
        float, typer.Option(help="Seconds without a step, with work, before /health says 503.")
    ] = 60.0,
    engine_options: dict[str, Any],
) -> None:
    """Serve a model over HTTP. The port listens at once; /ready says when the model is loaded.

    SIGTERM or Ctrl-C takes nothing new and lets open requests finish; a second one ends at once.
    """
    config = EngineConfig(model=model, **engine_options)
    settings = ServerSettings(
        served_model_names=tuple(served_model_name or (model,)),
        host=host,
        port=port,
        uds=uds,
        api_keys=tuple(api_key or ()),
        root_path=root_path,
        allow_origins=tuple(allow_origin or ()),
        max_queue_requests=max_queue_requests,
        max_body_bytes=max_body_bytes,
        shutdown_timeout_seconds=shutdown_timeout,
        stall_timeout_seconds=stall_timeout,
        log_level=config.log_level,
    )
    resolved, tokenizer = open_model(config)
    service = EngineService(
        resolved,
        tokenizer,
        max_queue_requests=settings.max_queue_requests,
        stall_timeout_seconds=settings.stall_timeout_seconds,
    )
    serve_http(service, settings, __version__)
