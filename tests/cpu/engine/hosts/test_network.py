"""Which interface and address a host is found at."""

import socket

import pytest

from stagecoach.engine.hosts import network
from stagecoach.errors import ConfigError

pytestmark = pytest.mark.cpu


def test_the_way_to_this_host_is_its_own_loopback() -> None:
    assert network.choose_interface(None, "127.0.0.1") == ("lo", "127.0.0.1")
    assert network.choose_interface("lo", "192.0.2.1") == ("lo", "127.0.0.1")
    assert network.address_of("127.0.0.1") == "127.0.0.1"
    assert network.address_of("localhost") == "127.0.0.1"


def test_an_interface_that_is_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = dict(network.psutil.net_if_stats())
    stats["lo"] = stats["lo"]._replace(isup=False)
    monkeypatch.setattr(network.psutil, "net_if_stats", lambda: stats)
    with pytest.raises(ConfigError, match="--network-interface=lo: is down or has no address"):
        network.choose_interface("lo", "127.0.0.1")


def test_no_way_leads_to_an_address_of_another_family_or_net(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(own: socket.socket, address: tuple[str, int]) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    with pytest.raises(ConfigError, match=r"--master-addr=10\.9\.9\.9: no way leads there"):
        network.choose_interface(None, "10.9.9.9")


def test_a_doorbell_answers_until_it_is_taken_down() -> None:
    bell = network.Doorbell("127.0.0.1")
    for _ in range(3):
        assert network.why_unreachable("127.0.0.1", bell.port, "127.0.0.1", 5.0) is None
    bell.close()
    assert network.why_unreachable("127.0.0.1", bell.port, "127.0.0.1", 5.0) == (
        "Connection refused"
    )


def test_a_name_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find(host: str, port: None, **options: object) -> list[tuple[object, ...]]:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, None, None, "", ("10.0.0.7", 0))]

    monkeypatch.setattr(network.socket, "getaddrinfo", find)
    monkeypatch.setattr(network, "_RETRY_SECONDS", 0.01)
    assert network.address_of("leader.example", patience_seconds=5.0) == "10.0.0.7"
    asked.clear()
    with pytest.raises(ConfigError, match=r"--master-addr=leader\.example: .*not known"):
        network.address_of("leader.example")
