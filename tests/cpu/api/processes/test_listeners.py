"""Where several API processes listen, and that nobody is let in beside another server."""

import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stagecoach.api.processes.listeners import listening
from stagecoach.api.settings import ServerSettings
from stagecoach.errors import ConfigError


def settings_of(**fields: Any) -> ServerSettings:
    return ServerSettings(served_model_names=("m",), **{"port": 0, **fields})


def test_processes_share_a_port_and_get_their_share_of_connections() -> None:
    with listening(settings_of(), 4) as listeners:
        ports = {listener.getsockname()[1] for listener in listeners}
        assert len(ports) == 1
        address = ("127.0.0.1", *ports)
        clients = [socket.create_connection(address) for _ in range(200)]
        counts: Counter[int] = Counter()
        for number, listener in enumerate(listeners):
            listener.setblocking(False)
            try:
                while True:
                    listener.accept()[0].close()
                    counts[number] += 1
            except BlockingIOError:
                continue
        for client in clients:
            client.close()
    assert counts.total() == 200
    # Spread by a hash of the client's port: 50 each, and 20 would be five deviations off.
    assert min(counts[number] for number in range(4)) > 20


@pytest.mark.parametrize("num_first", [1, 2])
@pytest.mark.parametrize("num_second", [1, 2])
def test_a_port_that_another_server_has_is_refused(num_first: int, num_second: int) -> None:
    with listening(settings_of(), num_first) as [first, *_]:
        port = first.getsockname()[1]
        second = listening(settings_of(port=port), num_second)
        with pytest.raises(ConfigError, match=f"--port={port}: Address already in use"):
            second.__enter__()
    with listening(settings_of(port=port), num_second) as [free, *_]:
        assert free.getsockname()[1] == port


def test_a_unix_socket_is_one_for_all_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(settings_of(uds=str(path)), 3) as listeners:
        assert len({listener.fileno() for listener in listeners}) == 1
        second = listening(settings_of(uds=str(path)), 1)
        with pytest.raises(ConfigError, match="--uds="):
            second.__enter__()
        assert path.exists()
    assert not path.exists()
