"""What runs in one of several API processes.

Owns nothing but its start: the routes are those of a server with one process. Must import no
torch, which is most of what a process would take in time and memory.
"""

import functools
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from stagecoach.api.open_counts import OpenCounts
from stagecoach.api.processes.server import make_service, serve_on
from stagecoach.api.settings import ServerSettings
from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.attach import AttachedEngine
from stagecoach.engine.client import EngineClient
from stagecoach.errors import StagecoachError
from stagecoach.observe import log
from stagecoach.text.tokenizer import load_tokenizer

# Said to the supervisor once this process serves.
SERVING = "serving"


class Place(NamedTuple):
    """Which API process this is, and where its engine is."""

    number: int  # 0 to --api-server-count - 1; the process that replaces it has the same
    client: int  # of the engine; never the same again
    folder: Path  # of the engine
    open_numbers: Any  # of `shared_numbers`
    is_loaded: bool  # the engine serves already


def run_api(
    config: ResolvedConfig,
    settings: ServerSettings,
    version: str,
    place: Place,
    listener: socket.socket,
    owner: Connection,
) -> None:
    """Main function of an API process."""
    name = f"api[{place.number}]"
    log.configure(name, level=settings.log_level)
    engine = AttachedEngine(place.folder, place.client, owner)
    service = make_service(
        config,
        load_tokenizer(config.checkpoint, model_vocab_size=config.model.vocab_size),
        settings,
        start_engine=functools.partial(EngineClient, is_awaited=False, attached_to=engine),
        counts=OpenCounts(place.open_numbers, place.number),
    )
    try:
        serve_on(
            listener,
            service,
            settings,
            version,
            lambda: owner.send(SERVING),
            is_loaded=place.is_loaded,
        )
    except StagecoachError:
        # The engine did not load, which is the supervisor's to tell.
        raise SystemExit(1) from None
