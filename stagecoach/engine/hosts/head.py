"""The member that has the engine loop: waits for the others, checks them, and hears of their ends.

Owns the listening socket, a line to each member, and the order in which an engine of several hosts
starts: all join, all try to reach each other, all begin. What goes wrong on the way ends all of
them with the same words.
"""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stagecoach.config.engine import ResolvedConfig, option
from stagecoach.engine.child_processes import Ending
from stagecoach.engine.contact import ChannelKeys, Contact
from stagecoach.engine.hosts import network
from stagecoach.engine.hosts.handshake import StrangerError, admit
from stagecoach.engine.hosts.identity import identity_of
from stagecoach.engine.hosts.line import SILENCE_SECONDS, Line, LineCutError
from stagecoach.engine.hosts.meeting import HeadAddress, Meeting
from stagecoach.engine.hosts.messages import (
    FROM_MEMBER,
    Begin,
    Ended,
    FromMember,
    Join,
    Leaving,
    Place,
    Reached,
    Roll,
    StartWorkers,
    WorkerEnded,
)
from stagecoach.engine.hosts.reach import failures_to_reach
from stagecoach.errors import EngineDeadError, HostLostError, RendezvousError
from stagecoach.observe.log import get_logger
from stagecoach.pipeline.rendezvous import Rendezvous
from stagecoach.pipeline.topology import Topology

_LOG = get_logger(__name__)

# For the name of this very host to be known where it was started just now.
_NAME_SECONDS = 15.0
# Until the next is tried where one could not be taken.
_ACCEPT_SECONDS = 0.5
# A connection that has not joined by then is somebody else's.
_JOIN_SECONDS = 10.0

News = Ending | EngineDeadError


class _Arrival(NamedTuple):
    """A member that asks to join."""

    line: Line[FromMember]
    join: Join


class _Word(NamedTuple):
    """What a member that has joined says while they come together, or how it ended."""

    member: int
    message: FromMember | None
    cut: str = ""


class Head:
    """This process, as the member 0 of a meeting."""

    def __init__(
        self, config: ResolvedConfig, meeting: Meeting, on_news: Callable[[News], None]
    ) -> None:
        """Listen for the others.

        Args:
            on_news: hears of ends that nobody asked for, once the engine has begun.

        Raises:
            ConfigError: the address or the port cannot be listened on, or there is no such
                interface.
        """
        engine = config.engine
        self._config = config
        self._meeting = meeting
        self._on_news = on_news
        self._identity = identity_of(config)
        master = network.address_of(meeting.master, _NAME_SECONDS)
        self.interface = network.choose_interface(engine.network_interface, master)
        # Where others look it up, any address will do that they can reach.
        address = master if meeting.port is not None else self.interface.address
        self._listener = network.listen_for_members(address, meeting.port or 0)
        self.address = HeadAddress(address, self._listener.getsockname()[1])
        self._doorbell = network.Doorbell(self.interface.address)
        # For process groups to meet; made here so that its port is known when all begin.
        self.store_listener = network.listen(self.interface.address, 0)
        self._store_address = (self.interface.address, int(self.store_listener.getsockname()[1]))
        self._deadline = time.monotonic() + engine.distributed_timeout_seconds
        self._lock = threading.Lock()
        self._lines: dict[int, Line[FromMember]] = {}
        self._joins: dict[int, Join] = {}
        self._strangers: dict[str, str] = {}  # why they were sent away, by address
        self._inbox: queue.SimpleQueue[_Arrival | _Word | Leaving | None] = queue.SimpleQueue()
        self._has_begun = False
        self._end: Ended | None = None
        threading.Thread(target=self._accept, name="members", daemon=True).start()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that run in this member's own processes."""
        return self._meeting.ranks[0]

    def gather(self, plan_channel: str, keys: ChannelKeys) -> Contact:
        """Wait for all members and have them begin.

        Args:
            plan_channel: where the loop's socket for other hosts is.
            keys: with the secret one, which stays here.

        Returns:
            What this member's own workers are started with.

        Raises:
            RendezvousError: why they do not come together; all that have joined are told.
        """
        try:
            self._publish()
            self._wait_for_all()
            self._try_all_ways()
        except RendezvousError as error:
            self.end(str(error))
            raise
        hosts = self._hosts()
        key = keys.server_public
        with self._lock:
            self._has_begun = True
        for line in self._lines.values():
            line.send(
                Begin(
                    plan_channel=plan_channel,
                    channel_key=key,
                    store=self._store_address,
                    hosts=hosts,
                    now=time.monotonic(),
                )
            )
        self._doorbell.close()
        self._hear_again()
        return Contact(
            plan_channel=plan_channel,
            rendezvous=Rendezvous(
                address=self._store_address,
                timeout_seconds=self._config.engine.distributed_timeout_seconds,
            ),
            hosts=hosts,
            interface=self.interface.name,
            is_interface_chosen=self._config.engine.network_interface is not None,
            keys=ChannelKeys(server_public=key),
        )

    def start_workers(self, ranks: Sequence[int], generation: int) -> None:
        """Have members end and start anew those of these ranks that are theirs."""
        for member, theirs in enumerate(self._meeting.ranks):
            asked = tuple(rank for rank in theirs if rank in ranks)
            if asked and member in self._lines:
                self._lines[member].send(StartWorkers(ranks=asked, generation=generation))

    def end(self, reason: str, *, in_order: bool = False, wait_seconds: float = 1.0) -> None:
        """Tell all members that it is over; returns when they have gone, or after that time.

        Args:
            in_order: as its user wished.
        """
        with self._lock:
            if self._end is not None:
                return
            self._end = Ended(reason=reason, in_order=in_order)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._doorbell.close()
        # Open still where no store was started.
        self.store_listener.close()
        self._turn_away()
        self._inbox.put(None)
        with self._lock:
            lines = list(self._lines.values())
        for line in lines:
            line.send(self._end)
        deadline = time.monotonic() + wait_seconds
        for line in lines:
            line.wait_until_closed(max(0.0, deadline - time.monotonic()))
            line.close()
        if self._meeting.release is not None:
            self._meeting.release()

    def _turn_away(self) -> None:
        """Who asked to join, and was not looked at before the end, hears of it."""
        assert self._end is not None, "nobody more is let in"
        with contextlib.suppress(queue.Empty):
            while True:
                waiting = self._inbox.get_nowait()
                if isinstance(waiting, _Arrival):
                    waiting.line.send(self._end)
                    waiting.line.close()

    def _publish(self) -> None:
        if self._meeting.publish is not None:
            self._meeting.publish(self.address)
        _LOG.info(
            "%d others are awaited at %s:%d",
            len(self._meeting.ranks) - 1,
            self.address.address,
            self.address.port,
        )

    def _accept(self) -> None:
        while True:
            try:
                connection, (address, *_) = self._listener.accept()
            except OSError as error:
                if self._end is not None:
                    return
                # Somebody who was gone again, or a process with too many open files.
                _LOG.warning("a connection could not be taken: %s", error)
                time.sleep(_ACCEPT_SECONDS)
                continue
            threading.Thread(
                target=self._greet, args=(connection, address), name="greeting", daemon=True
            ).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        """Let a member in that says who it is; anything else is sent away."""
        line: Line[FromMember] = Line(connection, FROM_MEMBER)
        connection.settimeout(_JOIN_SECONDS)
        try:
            admit(line, self._meeting.secret)
            join = line.receive()
        except StrangerError as error:
            _LOG.warning("%s asked to join and was sent away: %s", address, error)
            with self._lock:
                self._strangers[address] = str(error)
            line.close()
            return
        except LineCutError as error:
            _LOG.debug("a connection that did not join: %s", error)
            line.close()
            return
        connection.settimeout(SILENCE_SECONDS)
        with self._lock:
            refusal = self._end
            if refusal is None and self._has_begun:
                refusal = Ended(reason="this engine is complete and runs already")
            if isinstance(join, Join) and refusal is None:
                # It may be long until this member is looked at.
                line.give_signs()
                self._inbox.put(_Arrival(line, join))
                return
            if isinstance(join, Leaving) and refusal is None:
                # It cannot come, and says so instead.
                self._inbox.put(join)
        line.send(refusal or Ended(reason="the engine is told"))
        line.close()

    def _wait_for_all(self) -> None:
        missing = set(range(1, len(self._meeting.ranks)))
        while missing:
            received = self._next(lambda: self._absence(missing))
            if isinstance(received, _Arrival):
                refusal = self._refusal(received.join)
                if refusal is not None:
                    received.line.send(Ended(reason=refusal))
                    received.line.close()
                    raise RendezvousError(refusal)
                self._welcome(received)
                missing.discard(received.join.member)
            else:
                self._note(received)

    def _absence(self, missing: set[int]) -> str:
        seconds = self._config.engine.distributed_timeout_seconds
        numbers = ", ".join(map(str, sorted(missing)))
        with self._lock:
            sent_away = [f"; {where}: {why}" for where, why in self._strangers.items()]
        return (
            f"{self._meeting.noun} {numbers} of {len(self._meeting.ranks)} did not come within "
            f"{seconds} s ({option('distributed_timeout_seconds')}) to "
            f"{self.address.address}:{self.address.port}{''.join(sent_away)}"
        )

    def _refusal(self, join: Join) -> str | None:
        """Why this member cannot take part, in words for all."""
        name = self._meeting.name(join.member, join.host)
        if not 0 < join.member < len(self._meeting.ranks):
            return f"{name}: there are {len(self._meeting.ranks)}, counted from 0, the head's"
        if join.member in self._joins:
            first = self._joins[join.member]
            return (
                f"{name} joined twice: from {first.host} ({first.address}), process "
                f"{first.process_id}, and from {join.host} ({join.address}), process "
                f"{join.process_id}"
            )
        difference = join.identity.difference(self._identity)
        if difference is not None:
            head = self._meeting.name(0, socket.gethostname())
            return f"{name} and {head} differ in {difference}"
        expected = self._meeting.ranks[join.member]
        if join.ranks != expected:
            return f"{name} holds the ranks {join.ranks}, not {expected}"
        return None

    def _welcome(self, arrival: _Arrival) -> None:
        join = arrival.join
        with self._lock:
            self._joins[join.member] = join
            self._lines[join.member] = arrival.line
            end = self._end
        if end is not None:
            # It came in between; the lines that were told are not these.
            arrival.line.send(end)
            arrival.line.close()
            raise RendezvousError(end.reason)
        _LOG.info(
            "%s has joined from %s (%s)",
            self._meeting.name(join.member, join.host),
            join.address,
            join.interface,
        )
        arrival.line.start(
            lambda message: self._hear(join, message), lambda reason: self._hear_cut(join, reason)
        )

    def _try_all_ways(self) -> None:
        """
        Raises:
            RendezvousError: a member does not reach another one.
        """
        self._check_stages()
        own = Place(
            self._meeting.name(0, socket.gethostname()),
            self.interface.name,
            self.interface.address,
            self._doorbell.port,
        )
        places = [own]
        for member, join in sorted(self._joins.items()):
            name = self._meeting.name(member, join.host)
            places.append(Place(name, join.interface, join.address, join.port))
        roll = Roll(places=tuple(places))
        for line in self._lines.values():
            line.send(roll)
        failures = list(failures_to_reach(roll, 0))
        awaited = set(self._lines)
        while awaited:
            received = self._next(lambda: f"{self._meeting.noun} {min(awaited)} says nothing more")
            if isinstance(received, _Arrival):
                refusal = self._refusal(received.join) or "all have joined already"
                received.line.send(Ended(reason=refusal))
                received.line.close()
                raise RendezvousError(refusal)
            self._note(received)
            if isinstance(received.message, Reached):
                awaited.discard(received.member)
                failures += received.message.failures
        if failures:
            raise RendezvousError("; ".join(failures))

    def _check_stages(self) -> None:
        """
        Raises:
            RendezvousError: ranks of one stage are on different hosts.
        """
        hosts, topology = self._hosts(), Topology.of(self._config.engine)
        for stage in range(topology.num_stages):
            if len({hosts[rank] for rank in topology.stage_ranks(stage)}) > 1:
                ranks = list(topology.stage_ranks(stage))
                raise RendezvousError(
                    f"{option('tensor_parallel_size')}={topology.tp_size}: the ranks {ranks} of "
                    f"stage {stage} are on different hosts; they must share one, so a host takes "
                    f"a multiple of {topology.tp_size} ranks"
                )

    def _hosts(self) -> tuple[int, ...]:
        """The host of each rank, numbered in the order of ranks."""
        keys = {}
        for member, ranks in enumerate(self._meeting.ranks):
            own = self._meeting.host_key if member == 0 else self._joins[member].host_key
            keys.update(dict.fromkeys(ranks, own or f"member {member}"))
        order = list(dict.fromkeys(keys[rank] for rank in sorted(keys)))
        return tuple(order.index(keys[rank]) for rank in sorted(keys))

    def _next(self, silence: Callable[[], str]) -> _Arrival | _Word:
        """What comes next while they come together.

        Raises:
            RendezvousError: with those words once the time is over; or this member ends.
        """
        try:
            received = self._inbox.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            raise RendezvousError(silence()) from None
        if received is None:
            raise RendezvousError(self._end.reason if self._end else "the engine was closed")
        if isinstance(received, Leaving):
            raise RendezvousError(received.reason)
        return received

    def _note(self, word: _Word) -> None:
        """
        Raises:
            RendezvousError: that member has ended.
        """
        name = self._meeting.name(word.member, self._joins[word.member].host)
        if word.message is None:
            raise RendezvousError(f"{name} is gone: {word.cut}")
        if isinstance(word.message, Leaving):
            raise RendezvousError(f"{name}: {word.message.reason}")

    def _hear_again(self) -> None:
        """What members said while the last of them was told to begin."""
        with contextlib.suppress(queue.Empty):
            while True:
                word = self._inbox.get_nowait()
                if isinstance(word, _Arrival):
                    word.line.close()
                elif isinstance(word, _Word):
                    join = self._joins[word.member]
                    if word.message is None:
                        self._hear_cut(join, word.cut)
                    else:
                        self._hear(join, word.message)

    def _keep(self, word: _Word) -> bool:
        """For who brings the members together, as long as that lasts."""
        with self._lock:
            if not self._has_begun:
                self._inbox.put(word)
            return not self._has_begun

    def _hear(self, join: Join, message: FromMember) -> None:
        if self._keep(_Word(join.member, message)):
            return
        name = self._meeting.name(join.member, join.host)
        match message:
            case WorkerEnded(rank=rank, words=words) as ended:
                worker, words = Topology.of(self._config.engine).worker(rank), f"of {name} {words}"
                self._on_news(Ending(worker.name, rank, words, ended.is_killed, ended.generation))
            case Leaving(reason=reason):
                self._on_news(HostLostError(f"{name}: {reason}"))

    def _hear_cut(self, join: Join, reason: str) -> None:
        if not self._keep(_Word(join.member, None, reason)) and self._end is None:
            name = self._meeting.name(join.member, join.host)
            self._on_news(HostLostError(f"{name} is gone: {reason}"))
