"""/start_profile and /stop_profile: what the workers execute, recorded into files.

Owns the routes and the folder of each profile. The engine records (`--profiler-dir`).
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stagecoach.api.answers import json_response
from stagecoach.api.engine_service import EngineService
from stagecoach.api.error_body import HttpError
from stagecoach.engine.client import EngineClient
from stagecoach.engine.messages import ProfileAnswer
from stagecoach.errors import ConfigError

# Writing down a long recording takes minutes; every step waits meanwhile.
_ANSWER_SECONDS = 600.0


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A profile that began or, with its files, one that ended."""

    status: Literal["recording", "written"]
    paths: list[str]  # one a worker


class Profiles:
    """The routes and what they answer from."""

    def __init__(self, service: EngineService, profiler_dir: str | None) -> None:
        """
        Raises:
            ConfigError: workers of this engine cannot be recorded.
        """
        backend = service.config.engine.distributed_executor_backend
        if profiler_dir is not None and backend != "mp":
            raise ConfigError(
                f"--profiler-dir with --distributed-executor-backend={backend}: "
                "only workers that are processes can be recorded"
            )
        self._service = service
        self._folder = None if profiler_dir is None else Path(profiler_dir)

    async def start(self, request: Request) -> Response:
        """Record what every worker executes, until /stop_profile."""
        milliseconds = time.time_ns() // 10**6 % 1000
        folder = self._checked_folder() / time.strftime(f"%Y%m%d-%H%M%S-{milliseconds:03}")
        await self._ask(lambda client: client.start_profile(str(folder), _ANSWER_SECONDS))
        return json_response(Profile(status="recording", paths=[]))

    async def stop(self, request: Request) -> Response:
        """End the recording; answers when every file is written."""
        self._checked_folder()
        answer = await self._ask(lambda client: client.stop_profile(_ANSWER_SECONDS))
        return json_response(Profile(status="written", paths=list(answer.paths)))

    def _checked_folder(self) -> Path:
        if self._folder is None:
            raise HttpError(
                400,
                "this server records no profiles: it was started without --profiler-dir",
                code="no_profiler",
            )
        return self._folder.absolute()

    async def _ask(self, question: Callable[[EngineClient], ProfileAnswer]) -> ProfileAnswer:
        client = self._service.answering_client()
        answer = await asyncio.to_thread(question, client)
        if answer.is_refused:
            raise HttpError(409, str(answer.error), code="profile_conflict")
        if answer.error is not None:
            raise HttpError(500, answer.error, code="profile_failed")
        return answer
