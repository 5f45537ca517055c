"""`stagecoach serve`: an HTTP server that clients of OpenAI can use unchanged."""

from typing import Annotated, Any

import typer

from stagecoach import __version__
from stagecoach.api.processes.server import serve as serve_http
from stagecoach.api.processes.supervisor import supervise
from stagecoach.api.settings import ServerSettings
from stagecoach.config.engine import EngineConfig
from stagecoach.engine.hosts.launchers import own_meeting
from stagecoach.engine.hosts.meeting import Meeting
from stagecoach.engine.hosts.member import run_member, withdraw
from stagecoach.errors import StagecoachError
from stagecoach.llm import open_model
from stagecoach.resolve import resolve


def serve(
    *,
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or `demo` or `tiny`.")],
    server_options: dict[str, Any],
    engine_options: dict[str, Any],
) -> None:
    """Serve a model over HTTP. The port listens at once; /ready says when the model is loaded.

    SIGTERM or Ctrl-C takes nothing new and lets open requests finish; a second one ends at once.

    With --nnodes or torchrun only the first of the processes serves; the others run their ranks
    until it ends.
    """
    config = EngineConfig(model=model, **engine_options)
    names = {"served_model_names": (model,)}
    settings = ServerSettings(**names | server_options, log_level=config.log_level)
    meeting = own_meeting(config)
    if meeting is not None and meeting.member > 0:
        _run_ranks(config, meeting)
        return
    resolved, tokenizer = open_model(config)
    if settings.api_server_count > 1:
        supervise(resolved, settings, __version__)
    else:
        serve_http(resolved, tokenizer, settings, __version__)


def _run_ranks(config: EngineConfig, meeting: Meeting) -> None:
    """Run ranks of an engine that another process serves, until it ends."""
    try:
        resolved = resolve(config)
    except StagecoachError as error:
        withdraw(meeting, error)
        raise
    run_member(resolved, meeting)
