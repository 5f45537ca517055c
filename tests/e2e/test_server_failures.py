"""A server whose processes die or stand still, under load: nobody waits for ever."""

import signal
import time
from pathlib import Path

import httpx2
import openai
import psutil
import pytest

from tests.e2e.endless_streams import FIELDS, EndlessStreams
from tests.e2e.server_process import ServerProcess, serving

LIMIT_SECONDS = 5.0
# A worker or the loop that says nothing for so long hangs.
HANG_SECONDS = 2


def find(server: ServerProcess, victim: str) -> psutil.Process:
    if victim == "loop":
        return server.loop_process()
    return server.worker_processes()[0 if victim == "first worker" else -1]


def assert_dead(server: ServerProcess) -> None:
    """It says so wherever it is asked, and ends in order."""
    for _ in range(4):
        # An API process that had no stream hears of it, or finds it out as it is asked.
        deadline = time.monotonic() + 2
        while (health := httpx2.get(f"{server.url}/health")).json()["status"] != "dead":
            assert health.status_code == 503 and time.monotonic() < deadline
        assert health.status_code == 503
        assert httpx2.get(f"{server.url}/ready").status_code == 503
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(**FIELDS)
            assert caught.value.status_code == 503
    server.signal(signal.SIGTERM)
    assert server.wait(20) == 0


@pytest.mark.parametrize(
    ("victim", "options"),
    [
        ("loop", ("--api-server-count", "2")),
        ("first worker", ()),
        ("last worker", ("-tp", "2", "--api-server-count", "2")),
    ],
    ids=["loop", "first worker", "last worker"],
)
def test_a_killed_process_ends_all_streams_with_an_error(
    folder: Path, temporary_folder: Path, victim: str, options: tuple[str, ...]
) -> None:
    """G05: liveness is that of the engine, not of the process that answers."""
    names = ("--served-model-name", "small", "-pp", "2")
    with serving(folder, temporary_folder, *names, *options) as server:
        streams = EndlessStreams(server.url, 4)
        assert len(server.worker_processes()) == (4 if "-tp" in options else 2)
        find(server, victim).kill()
        streams.join(LIMIT_SECONDS)
        assert len(streams.ends) == 4
        for error in streams.ends:
            assert isinstance(error, openai.APIError)
            assert "was killed by SIGKILL" in error.message
        assert_dead(server)
    told = [line for line in server.log if "killed by SIGKILL. Requests get 503" in line]
    assert len(told) == 1, server.log


@pytest.mark.parametrize("victim", ["loop", "first worker"])
def test_a_process_that_stands_still_ends_all_streams_with_an_error(
    folder: Path, temporary_folder: Path, victim: str
) -> None:
    """G05 to G08: it is alive, so only its silence tells."""
    options = ("--api-server-count", "2") if victim == "loop" else ()
    names = ("--served-model-name", "small", "-pp", "2")
    limit = ("--execute-model-timeout-seconds", str(HANG_SECONDS))
    with serving(folder, temporary_folder, *names, *limit, *options) as server:
        streams = EndlessStreams(server.url, 4)
        find(server, victim).suspend()
        streams.join(HANG_SECONDS + LIMIT_SECONDS)
        assert len(streams.ends) == 4
        for error in streams.ends:
            assert isinstance(error, openai.APIError)
            assert "hangs" in error.message
        assert_dead(server)
