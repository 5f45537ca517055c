"""What a process that torchrun started learns from its environment."""

import dataclasses
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from stagecoach.config.engine import EngineConfig
from stagecoach.engine.hosts.launchers import own_meeting
from stagecoach.engine.hosts.meeting import HeadAddress
from stagecoach.engine.hosts.torchrun import meeting_of_ranks
from stagecoach.errors import ConfigError
from stagecoach.pipeline.rendezvous import serve_store

pytestmark = pytest.mark.cpu

_ENGINE = EngineConfig(
    model="unused", launcher="torchrun", pipeline_parallel_size=2, tensor_parallel_size=2
)
_VARIABLES: Mapping[str, str] = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "gpu-a",
    "MASTER_PORT": "1234",
}


def test_every_rank_is_a_member_of_its_own() -> None:
    meeting = meeting_of_ranks(_ENGINE, _VARIABLES)
    assert (meeting.member, meeting.ranks) == (3, ((0,), (1,), (2,), (3,)))
    assert (meeting.master, meeting.port, meeting.host_key) == ("gpu-a", 1234, "1")
    assert meeting.name(3, "gpu-b") == "rank 3 (gpu-b)"


def test_the_shared_key_is_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef\n")
    engine = dataclasses.replace(_ENGINE, host_key_file=str(path))
    assert meeting_of_ranks(engine, _VARIABLES).secret == b"0123456789abcdef"
    assert meeting_of_ranks(_ENGINE, _VARIABLES).secret is None


def test_without_groups_a_host_is_its_name() -> None:
    variables = {name: text for name, text in _VARIABLES.items() if name != "GROUP_RANK"}
    assert meeting_of_ranks(_ENGINE, variables).host_key == socket.gethostname()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"RANK": None, "MASTER_PORT": None}, "RANK, MASTER_PORT is not set"),
        ({"RANK": "first"}, "RANK=first: must be a number"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE=8, but --pipeline-parallel-size=2 and --tensor-"),
        ({"RANK": "4"}, "RANK=4 and WORLD_SIZE=4"),
    ],
)
def test_what_does_not_fit_is_named(changes: Mapping[str, str | None], text: str) -> None:
    variables = {
        name: value for name, value in {**_VARIABLES, **changes}.items() if value is not None
    }
    with pytest.raises(ConfigError, match=f"--launcher=torchrun: .*{re.escape(text)}"):
        meeting_of_ranks(_ENGINE, variables)


def test_the_environment_is_read_where_nothing_else_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in _VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    meeting = own_meeting(_ENGINE)
    assert meeting is not None and meeting.member == 3
    assert own_meeting(EngineConfig(model="unused")) is None


def test_the_agents_store_tells_where_the_head_waits() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    variables = {
        **_VARIABLES,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "a run",
    }
    store = serve_store(listener)
    meetings = [
        meeting_of_ranks(_ENGINE, {**variables, "TORCHELASTIC_RESTART_COUNT": attempt})
        for attempt in ("0", "1")
    ]
    for meeting in meetings:
        assert meeting.port is None and meeting.publish is not None and meeting.look_up is not None
    first, second = meetings
    assert first.publish is not None and first.look_up is not None and second.look_up is not None
    first.publish(HeadAddress("10.0.0.1", 4711))
    assert first.look_up(5.0) == HeadAddress("10.0.0.1", 4711)
    # The next attempt has another head, which has not spoken yet.
    with pytest.raises(OSError, match=r"\S"):
        second.look_up(0.5)
    del store
