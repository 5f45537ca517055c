"""What the hosts of one engine say to each other, as frozen msgspec structs.

    head --Challenge--> member --Hello--> head --Admitted--> member       on every line, at first
    member --Join, Reached--> head --Roll, Begin--> member       while they come together
    member --WorkerEnded, Leaving--> head --StartWorkers, Ended--> member       afterwards

A member is a process that runs some ranks of the engine; the head is the one with the loop.
"""

import msgspec

from stagecoach.engine.hosts.identity import Identity


class HostMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of everything on the wire."""


class Ping(HostMessage, frozen=True):
    """A sign of life; not answered."""


# member -> head


class Hello(HostMessage, frozen=True):
    """The answer to a Challenge."""

    random: bytes
    has_key: bool
    proof: bytes  # that it is the same key; empty without one


class Join(HostMessage, frozen=True):
    """The first message of a member that was admitted: who comes, and with what."""

    member: int
    ranks: tuple[int, ...]
    host: str  # its name, for messages
    host_key: str  # the same for all members on one host
    process_id: int
    interface: str
    address: str  # of that interface
    port: int  # where others try whether they reach it
    identity: Identity


class Reached(HostMessage, frozen=True):
    """This member tried to reach all others; what failed, in words."""

    failures: tuple[str, ...]


class WorkerEnded(HostMessage, frozen=True):
    """A worker of this member ended unasked."""

    rank: int
    words: str
    is_killed: bool
    generation: int  # that it was started for


class Leaving(HostMessage, frozen=True):
    """This member ends, and so must the engine."""

    reason: str


# head -> member


class Challenge(HostMessage, frozen=True):
    """The first message on a line."""

    random: bytes
    has_key: bool


class Admitted(HostMessage, frozen=True):
    """The answer to a Hello that proved what it had to."""

    proof: bytes  # that the head has the key, too; empty without one


class Place(msgspec.Struct, frozen=True):
    """Where one member can be reached."""

    name: str
    interface: str
    address: str
    port: int


class Roll(HostMessage, frozen=True):
    """All members are there; each tries to reach every other."""

    places: tuple[Place, ...]


class Begin(HostMessage, frozen=True):
    """All reach each other: start the workers."""

    plan_channel: str
    channel_key: bytes
    store: tuple[str, int]
    hosts: tuple[int, ...]  # of each rank
    now: float  # the head's monotonic clock


class StartWorkers(HostMessage, frozen=True):
    """End these ranks by force, if they run, and start them anew for this generation."""

    ranks: tuple[int, ...]
    generation: int


class Ended(HostMessage, frozen=True):
    """The engine is over, or will not be."""

    reason: str
    in_order: bool = False  # as its user wished


FromMember = Ping | Hello | Join | Reached | WorkerEnded | Leaving
ToMember = Ping | Challenge | Admitted | Roll | Begin | StartWorkers | Ended

_ENCODER = msgspec.msgpack.Encoder()
FROM_MEMBER = msgspec.msgpack.Decoder(FromMember)
TO_MEMBER = msgspec.msgpack.Decoder(ToMember)

encode = _ENCODER.encode
