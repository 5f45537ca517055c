"""`stagecoach serve`: an HTTP server that clients of OpenAI can use unchanged."""

from typing import Annotated, Any

import typer

from stagecoach import __version__
from stagecoach.api.processes.server import serve as serve_http
from stagecoach.api.processes.supervisor import supervise
from stagecoach.api.settings import ServerSettings
from stagecoach.config import EngineConfig
from stagecoach.llm import open_model


def serve(
    *,
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or `demo` or `tiny`.")],
    server_options: dict[str, Any],
    engine_options: dict[str, Any],
) -> None:
    """Serve a model over HTTP. The port listens at once; /ready says when the model is loaded.

    SIGTERM or Ctrl-C takes nothing new and lets open requests finish; a second one ends at once.
    """
    config = EngineConfig(model=model, **engine_options)
    names = {"served_model_names": (model,)}
    settings = ServerSettings(**names | server_options, log_level=config.log_level)
    resolved, tokenizer = open_model(config)
    if settings.api_server_count > 1:
        supervise(resolved, settings, __version__)
    else:
        serve_http(resolved, tokenizer, settings, __version__)
