"""Addresses and interfaces of this host, and whether another one can be reached.

Owns the choice of what to listen on: the interface that was named, or the one on the way to the
head; never all of them.
"""

import contextlib
import errno
import socket
import threading
import time
from typing import NamedTuple

import psutil

from stagecoach.config.engine import option
from stagecoach.errors import ConfigError

_BACKLOG = 256
_RETRY_SECONDS = 0.5
_ANY_PORT = 9  # of a datagram that is never sent


class Interface(NamedTuple):
    """A network interface of this host and its address."""

    name: str
    address: str


def address_of(host: str, patience_seconds: float = 0.0) -> str:
    """The address that a name stands for.

    Args:
        patience_seconds: how long it may still stand for none: names of pods come after them.

    Raises:
        ConfigError: it stands for none.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            break
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                raise ConfigError(f"{option('master_addr')}={host}: {error}") from None
        time.sleep(_RETRY_SECONDS)
    # IPv4 where there is a choice, as in everything that connects to it.
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return str(found[0][4][0])


def choose_interface(name: str | None, towards: str) -> Interface:
    """The one that is named, or that on the way to this address.

    Raises:
        ConfigError: there is no such interface, it is down or has no address, or no way leads
            there.
    """
    if name is not None:
        return _named_interface(name)
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, _ANY_PORT))
        except OSError as error:
            raise ConfigError(
                f"{option('master_addr')}={towards}: no way leads there from this host: "
                f"{error.strerror}"
            ) from None
        own = str(probe.getsockname()[0])
    for interface, address in _addresses():
        if address == own:
            return Interface(interface, own)
    # The whole of 127.0.0.0/8 is this host's, although only one address is listed.
    return Interface("lo", own)


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: any free one.

    Raises:
        OSError: the port is in use, or the address is none of this host's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def listen_for_members(address: str, port: int) -> socket.socket:
    """The head's.

    Raises:
        ConfigError: the port is in use, or the address is none of this host's.
    """
    try:
        return listen(address, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"{option('master_addr')}={address}: no address of this host, where "
                f"{option('node_rank')} is 0"
            ) from None
        raise ConfigError(
            f"{option('master_port')}={port} of {address}: {error.strerror}"
        ) from None


class Doorbell:
    """A socket of this host that others connect to, to see whether they reach it."""

    def __init__(self, address: str) -> None:
        self._listener = listen(address, 0)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._answer, name="doorbell", daemon=True).start()

    def close(self) -> None:
        # Wakes who waits in `accept`.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _answer(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            caller.close()


def why_unreachable(address: str, port: int, own_address: str, seconds: float) -> str | None:
    """What a connection from this address of ours to that one fails with; None: it works."""
    try:
        socket.create_connection((address, port), seconds, (own_address, 0)).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _named_interface(name: str) -> Interface:
    own = [address for interface, address in _addresses() if interface == name]
    if not own or not psutil.net_if_stats()[name].isup:
        usable = sorted({interface for interface, _ in _addresses()})
        what = "is down or has no address" if name in psutil.net_if_stats() else "is not there"
        raise ConfigError(
            f"{option('network_interface')}={name}: {what}; this host has {', '.join(usable)}"
        )
    return Interface(name, own[0])


def _addresses() -> list[tuple[str, str]]:
    """Name and address of every interface, IPv4 first."""
    found = [
        (item.family, name, item.address)
        for name, items in psutil.net_if_addrs().items()
        for item in items
        # Link-local addresses mean nothing without their interface.
        if item.family in (socket.AF_INET, socket.AF_INET6) and "%" not in item.address
    ]
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return [(name, address) for _, name, address in found]
