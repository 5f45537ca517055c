"""How a worker reaches its engine, wherever it runs.

Owns the addresses and keys that a process needs before it can say a word; they stay the same
for the engine's life. Knows neither sockets nor process groups.
"""

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from stagecoach.pipeline.rendezvous import Rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelKeys:
    """Of the plan channel between hosts; who has them is a worker of this engine."""

    server_public: bytes
    server_secret: bytes | None = None  # the loop's alone


class HostGate(NamedTuple):
    """Where the loop lets workers of other hosts in."""

    address: str  # of this host; the port is free to choose
    keys: ChannelKeys  # with the secret one
    told: Connection  # where the loop then says which address it is, as ZeroMQ spells it


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """What every worker of one host is started with."""

    plan_channel: str  # where the loop's socket for workers is, as ZeroMQ spells it
    rendezvous: Rendezvous
    hosts: tuple[int, ...]  # of each rank
    interface: str = "lo"  # what tensors go through
    is_interface_chosen: bool = False  # by the user, not by its route
    keys: ChannelKeys | None = None  # None: the channel stays within this host
    clock_offset: float = 0.0  # seconds that the loop's monotonic clock is ahead of this host's

    @staticmethod
    def on_one_host(folder: Path, num_workers: int, timeout_seconds: float) -> "Contact":
        """For an engine whose sockets and files are in this folder."""
        return Contact(
            plan_channel=plan_channel_in(folder),
            rendezvous=Rendezvous(file=folder / "rendezvous", timeout_seconds=timeout_seconds),
            hosts=(0,) * num_workers,
        )

    def clock(self) -> float:
        """Monotonic seconds of the loop's host."""
        return time.monotonic() + self.clock_offset

    def place_on_host(self, rank: int) -> int:
        """How many ranks before this one are on its host: its GPU, if all see the same ones."""
        return self.hosts[:rank].count(self.hosts[rank])


def plan_channel_in(folder: Path) -> str:
    return f"ipc://{folder / 'workers'}"
