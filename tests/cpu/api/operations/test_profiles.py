"""/start_profile and /stop_profile, over an engine that answers what a test wants."""

from pathlib import Path
from typing import Any

import pytest

from stagecoach.api.operations.profiles import Profiles
from stagecoach.engine.messages import ProfileAnswer
from stagecoach.errors import ConfigError
from tests.cpu.api.conftest import Server
from tests.cpu.api.scripted import scripted_server

ROUTES = ("/start_profile", "/stop_profile")


def test_the_folder_of_each_profile_is_a_new_one(model_folder: Path, tmp_path: Path) -> None:
    folders: list[str] = []

    def start(folder: str, timeout_seconds: float) -> ProfileAnswer:
        folders.append(folder)
        return ProfileAnswer(query_id=1)

    def stop(timeout_seconds: float) -> ProfileAnswer:
        return ProfileAnswer(query_id=2, paths=(f"{folders[-1]}/a", f"{folders[-1]}/b"))

    with scripted_server(model_folder, profiler_dir=str(tmp_path)) as (server, engine):
        engine.start_profile, engine.stop_profile = start, stop  # type: ignore[attr-defined]
        for _ in range(2):
            begun = server.call("POST", "/start_profile")
            assert begun.json == {"status": "recording", "paths": []}
            ended = server.call("POST", "/stop_profile")
            assert ended.json["status"] == "written"
            assert ended.json["paths"] == [f"{folders[-1]}/{name}" for name in ("a", "b")]
    assert len(set(folders)) == 2
    assert {Path(folder).parent for folder in folders} == {tmp_path}


@pytest.mark.parametrize("path", ROUTES)
def test_without_the_flag_it_is_refused_by_name(server: Server, path: str) -> None:
    answer = server.call("POST", path)
    assert answer.status == 400
    assert "--profiler-dir" in answer.error["message"]
    assert server.get(path).status == 405


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        (
            {"error": "a profile is being recorded already", "is_refused": True},
            409,
            "profile_conflict",
        ),
        ({"error": "worker[0,0]: no space"}, 500, "profile_failed"),
    ],
)
@pytest.mark.parametrize("path", ROUTES)
def test_what_the_engine_refuses_has_its_status(
    model_folder: Path, path: str, fields: dict[str, Any], status: int, code: str
) -> None:
    def refuse(*_: Any) -> ProfileAnswer:
        return ProfileAnswer(query_id=1, **fields)

    with scripted_server(model_folder, profiler_dir="profiles") as (server, engine):
        engine.start_profile = engine.stop_profile = refuse  # type: ignore[attr-defined]
        answer = server.call("POST", path)
        assert (answer.status, answer.error["code"]) == (status, code)
        assert answer.error["message"] == fields["error"]


def test_workers_that_are_threads_cannot_be_recorded(started: Server) -> None:
    assert started.service.config.engine.distributed_executor_backend == "uni"
    with pytest.raises(ConfigError, match="--profiler-dir with --distributed-executor-backend=uni"):
        Profiles(started.service, "folder")
