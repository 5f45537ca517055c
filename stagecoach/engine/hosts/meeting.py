"""Who comes together for one engine, and where.

Owns the numbering of members: 0 is the head, which has the engine loop; each holds some ranks, or
none. Who starts the members is a launcher's business: `torchrun.py` and `ray_cluster.py` make
meetings of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from stagecoach.config.engine import EngineConfig, option
from stagecoach.engine.hosts.handshake import read_host_key
from stagecoach.pipeline.topology import Topology


class HeadAddress(NamedTuple):
    """Where the head waits for the others."""

    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What one member knows of it before it has met anybody."""

    member: int  # which of them this process is
    noun: str  # what a member's number is called, as in "node rank 1"
    ranks: tuple[tuple[int, ...], ...]  # of each member
    master: str  # a name or address of the head's host
    port: int | None  # None: any free one, which is made known otherwise
    publish: Callable[[HeadAddress], None] | None = None  # the head's word where it waits
    # The others' way to it, within so many seconds; an OSError if there is none yet.
    look_up: Callable[[float], HeadAddress] | None = None
    release: Callable[[], None] | None = None  # what the head does at the very end
    host_key: str | None = None  # the same for members on one host; None: each has its own
    secret: bytes | None = field(default=None, repr=False)  # of --host-key-file, the same for all

    def name(self, member: int, host: str) -> str:
        """How messages call it."""
        return f"{self.noun} {member} ({host})"


def meeting_of_nodes(engine: EngineConfig) -> Meeting:
    """A member on each of --nnodes hosts.

    Raises:
        ConfigError: the key that they share cannot be read.
    """
    topology = Topology.of(engine)
    return Meeting(
        member=engine.node_rank,
        noun=option("node_rank"),
        ranks=tuple(
            tuple(topology.host_ranks(node, engine.nnodes)) for node in range(engine.nnodes)
        ),
        master=engine.master_addr,
        port=engine.master_port,
        secret=read_host_key(engine.host_key_file),
    )
