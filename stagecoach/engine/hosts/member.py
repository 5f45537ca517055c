"""A process that runs ranks of an engine that another one serves.

Owns its worker processes and its line to the head; decides nothing. It ends when the head says so
or is gone, and all its workers with it; when it is ended itself it says so first.
"""

import contextlib
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from os import getpid
from types import FrameType
from typing import NamedTuple

from stagecoach.config.engine import ResolvedConfig, option
from stagecoach.engine.child_processes import ChildProcesses, Ending, start_worker
from stagecoach.engine.contact import ChannelKeys, Contact
from stagecoach.engine.hosts import network
from stagecoach.engine.hosts.handshake import StrangerError, ask_to_enter
from stagecoach.engine.hosts.identity import identity_of
from stagecoach.engine.hosts.line import SILENCE_SECONDS, Line, LineCutError
from stagecoach.engine.hosts.meeting import HeadAddress, Meeting
from stagecoach.engine.hosts.messages import (
    TO_MEMBER,
    Begin,
    Ended,
    Join,
    Leaving,
    Reached,
    Roll,
    StartWorkers,
    ToMember,
    WorkerEnded,
)
from stagecoach.engine.hosts.reach import failures_to_reach
from stagecoach.errors import (
    ConfigError,
    EngineDeadError,
    HostLostError,
    RendezvousError,
    StagecoachError,
    WorkerDiedError,
)
from stagecoach.observe.log import get_logger
from stagecoach.pipeline.rendezvous import Rendezvous
from stagecoach.pipeline.topology import Topology

_LOG = get_logger(__name__)

_RETRY_SECONDS = 0.25
_LOOK_UP_SECONDS = 2.0
_STOP_SECONDS = 5.0
_WITHDRAW_SECONDS = 5.0


class _Cut(NamedTuple):
    reason: str


class _Signal(NamedTuple):
    number: int


_Event = ToMember | _Cut | _Signal | Ending


def run_member(config: ResolvedConfig, meeting: Meeting) -> None:
    """Run this member's ranks until the head's user ends the engine.

    Raises:
        ConfigError: there is no such interface; the head is told.
        RendezvousError: the engine did not come together, or the head cannot be found.
        EngineDeadError, HostLostError: the engine failed, or the head is gone.
    """
    member = _Member(config, meeting)
    with _signals(member.events):
        member.run()


def withdraw(meeting: Meeting, error: StagecoachError) -> None:
    """Tell the head, if it is there, that this member cannot come and why."""
    with contextlib.suppress(RendezvousError, HostLostError):
        line = _connect(meeting, _WITHDRAW_SECONDS)
        _enter(line, meeting)
        line.send(Leaving(reason=_words(meeting, error)))
        line.close()


def _words(meeting: Meeting, error: Exception) -> str:
    return f"{meeting.name(meeting.member, socket.gethostname())}: {error}"


class _Member:
    def __init__(self, config: ResolvedConfig, meeting: Meeting) -> None:
        self._config = config
        self._meeting = meeting
        self._line: Line[ToMember] | None = None
        self._contact: Contact | None = None
        self._head_name = meeting.name(0, meeting.master)
        self._interface: network.Interface | None = None
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()

    def run(self) -> None:
        processes = ChildProcesses(self.events.put)
        doorbell: network.Doorbell | None = None
        try:
            timeout = self._config.engine.distributed_timeout_seconds
            self._line = line = _connect(self._meeting, timeout, self.events)
            _enter(line, self._meeting)
            self._interface = network.choose_interface(
                self._config.engine.network_interface, line.peer_address
            )
            doorbell = network.Doorbell(self._interface.address)
            self._join(line, self._interface, doorbell.port)
            line.start(self.events.put, lambda reason: self.events.put(_Cut(reason)))
            self._obey(line, processes)
        except (ConfigError, WorkerDiedError, OSError) as error:
            if self._line is not None:
                self._line.send(Leaving(reason=_words(self._meeting, error)))
            raise
        finally:
            processes.stop(0.0)
            if doorbell is not None:
                doorbell.close()
            if self._line is not None:
                self._line.close()

    def _join(self, line: Line[ToMember], interface: network.Interface, port: int) -> None:
        meeting = self._meeting
        host = socket.gethostname()
        line.send(
            Join(
                member=meeting.member,
                ranks=meeting.ranks[meeting.member],
                host=host,
                host_key=meeting.host_key or f"member {meeting.member}",
                process_id=getpid(),
                interface=interface.name,
                address=interface.address,
                port=port,
                identity=identity_of(self._config),
            )
        )
        _LOG.info("%s waits for the others", meeting.name(meeting.member, host))

    def _obey(self, line: Line[ToMember], processes: ChildProcesses) -> None:
        """Until the end.

        Raises:
            RendezvousError, EngineDeadError, HostLostError: as of `run_member`.
        """
        while True:
            match self.events.get():
                case Roll() as roll:
                    self._head_name = roll.places[0].name
                    failures = failures_to_reach(roll, self._meeting.member)
                    line.send(Reached(failures=tuple(failures)))
                case Begin() as begin:
                    self._contact = self._contact_of(begin)
                    self._start(processes, self._meeting.ranks[self._meeting.member], 0)
                case StartWorkers(ranks=ranks, generation=generation):
                    workers = [Topology.of(self._config.engine).worker(rank) for rank in ranks]
                    processes.kill([worker.name for worker in workers])
                    self._start(processes, ranks, generation)
                case Ending(rank=int(rank)) as ending:
                    line.send(
                        WorkerEnded(
                            rank=rank,
                            words=ending.words,
                            is_killed=ending.is_killed,
                            generation=ending.generation,
                        )
                    )
                case Ended(reason=reason, in_order=in_order):
                    processes.stop(_STOP_SECONDS if in_order else 0.0)
                    if in_order:
                        _LOG.info("%s has ended the engine", self._head_name)
                        return
                    raise self._error(reason)
                case _Cut(reason=reason):
                    raise HostLostError(f"{self._head_name} is gone: {reason}")
                case _Signal(number=number):
                    name = signal.Signals(number).name
                    line.send(Leaving(reason=f"was ended by {name}"))
                    raise HostLostError(f"ended by {name}, and the engine with it")

    def _error(self, reason: str) -> EngineDeadError:
        if self._contact is None:
            return RendezvousError(reason)
        return EngineDeadError(f"{self._head_name} has ended the engine: {reason}")

    def _contact_of(self, begin: Begin) -> Contact:
        engine = self._config.engine
        assert self._interface is not None, "chosen before anybody was met"
        return Contact(
            plan_channel=begin.plan_channel,
            rendezvous=Rendezvous(
                address=begin.store, timeout_seconds=engine.distributed_timeout_seconds
            ),
            hosts=begin.hosts,
            interface=self._interface.name,
            is_interface_chosen=engine.network_interface is not None,
            keys=ChannelKeys(server_public=begin.channel_key),
            # But for the message's way here, which is short beside a step.
            clock_offset=begin.now - time.monotonic(),
        )

    def _start(self, processes: ChildProcesses, ranks: tuple[int, ...], generation: int) -> None:
        assert self._contact is not None, "the head says where before it says who"
        for rank in ranks:
            start_worker(processes, self._config, rank, self._contact, generation)


def _connect(
    meeting: Meeting, seconds: float, events: "queue.SimpleQueue[_Event] | None" = None
) -> Line[ToMember]:
    """A line to the head, which may be started later.

    Raises:
        RendezvousError: nobody answers within the time.
        HostLostError: a signal ended this process meanwhile.
    """
    deadline = time.monotonic() + seconds
    reason, head = "it is not known where", None
    while (left := deadline - time.monotonic()) > 0:
        if events is not None and not events.empty():
            raise HostLostError("ended by a signal before the engine was found")
        try:
            # A signal is heard in between.
            head = _find(meeting, min(left, _LOOK_UP_SECONDS))
            connection = socket.create_connection(head, min(left, SILENCE_SECONDS))
            if connection.getsockname() != connection.getpeername():
                return Line(connection, TO_MEMBER)
            # Where nobody listens yet, a free port of this host may connect to itself.
            connection.close()
            reason = "nobody listens there"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(_RETRY_SECONDS, max(0.0, left)))
    where = meeting.master if head is None else f"{head.address}:{head.port}"
    raise RendezvousError(
        f"{meeting.noun} 0 did not answer at {where} within {seconds:g} s "
        f"({option('distributed_timeout_seconds')}): {reason}"
    )


def _enter(line: Line[ToMember], meeting: Meeting) -> None:
    """Show that this is a member of the engine; the line is closed where that fails.

    Raises:
        RendezvousError: the head has another key, or none.
        HostLostError: it is gone.
    """
    head = meeting.name(0, meeting.master)
    try:
        ask_to_enter(line, meeting.secret)
    except StrangerError as error:
        line.close()
        raise RendezvousError(f"{head}: {error}") from None
    except LineCutError as error:
        line.close()
        raise HostLostError(f"{head} is gone: {error}") from None


def _find(meeting: Meeting, seconds: float) -> HeadAddress:
    if meeting.look_up is not None:
        return meeting.look_up(seconds)
    assert meeting.port is not None, "either a port or a way to look it up"
    try:
        return HeadAddress(network.address_of(meeting.master), meeting.port)
    except ConfigError as error:
        # The name of a host that is still to come.
        raise OSError(str(error)) from None


@contextlib.contextmanager
def _signals(events: "queue.SimpleQueue[_Event]") -> Iterator[None]:
    """SIGINT and SIGTERM become events; only a program's main thread can have them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        events.put(_Signal(number))

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
