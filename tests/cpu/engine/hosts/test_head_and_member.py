"""Hosts that come together, those that do not, and who hears of it: with threads as hosts."""

import contextlib
import dataclasses
import socket
import threading
import time
from typing import Any

import pytest

from stagecoach.engine.child_processes import Ending
from stagecoach.engine.hosts import head as head_module
from stagecoach.engine.hosts import identity, line, member
from stagecoach.engine.hosts.member import withdraw
from stagecoach.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    HostLostError,
    RendezvousError,
)
from tests.cpu.engine.hosts.party import (
    LIMIT_SECONDS,
    PLAN_CHANNEL,
    Party,
    connect,
    gather,
    node_config,
)

pytestmark = pytest.mark.cpu


def test_two_nodes_start_the_ranks_of_their_stages(party: Party) -> None:
    head = party.head(node_config())
    contact, other = gather(head), party.member(node_config(1), head)
    started = [party.started.get(timeout=LIMIT_SECONDS) for _ in range(2)]
    assert [(rank, generation) for rank, _, generation in started] == [(2, 0), (3, 0)]
    own, theirs = contact.result(), started[0][1]
    assert head.ranks == (0, 1) and own.hosts == theirs.hosts == (0, 0, 1, 1)
    assert own.plan_channel == theirs.plan_channel == PLAN_CHANNEL
    assert own.rendezvous == theirs.rendezvous and own.rendezvous.address is not None
    assert [own.place_on_host(rank) for rank in range(4)] == [0, 1, 0, 1]
    # The secret key stays where the loop is.
    assert theirs.keys is not None and theirs.keys.server_secret is None
    head.end("enough", in_order=True)
    other.result()
    assert party.killed.get(timeout=LIMIT_SECONDS) == "all after 5 s"
    assert party.news.empty()


def test_a_member_may_come_first_and_strangers_are_sent_away(party: Party) -> None:
    head = party.head(node_config())
    other = party.member(node_config(1), head)
    with connect(head) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n")
        # What it has not read yet may cut the connection short.
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1024):
                pass
    silent = connect(head)
    gather(head).result()
    silent.close()
    head.end("enough", in_order=True)
    other.result()


def test_a_rank_that_does_not_come_is_named_on_every_host(party: Party) -> None:
    options = {"pipeline_parallel_size": 3, "nnodes": 3, "distributed_timeout_seconds": 1}
    head = party.head(node_config(**options))
    other = party.member(node_config(1, **options), head)
    text = r"--node-rank 2 of 3 did not come within 1 s \(--distributed-timeout-seconds\)"
    for call in (gather(head), other):
        with pytest.raises(RendezvousError, match=text):
            call.result()
    assert head.store_listener.fileno() == -1, "nothing listens any more"


def test_a_head_that_does_not_come_is_named(party: Party) -> None:
    head = party.head(node_config())
    head.end("gone before anybody came")
    other = party.member(node_config(1, distributed_timeout_seconds=1), head)
    with pytest.raises(RendezvousError, match=r"--node-rank 0 did not answer at 127\.0\.0\.1:\d+"):
        other.result()


def test_one_node_rank_twice(party: Party) -> None:
    options = {"pipeline_parallel_size": 3, "nnodes": 3}
    head = party.head(node_config(**options))
    calls = [gather(head), *(party.member(node_config(1, **options), head) for _ in range(2))]
    for call in calls:
        with pytest.raises(RendezvousError, match=r"--node-rank 1 \(.*\) joined twice: from "):
            call.result()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_num_seqs": 5}, "differ in --max-num-seqs: 5 there, 4 here"),
        ({"seed": 1}, "differ in --seed: 1 there, 0 here"),
        ({"pp_partition": (5, 4)}, "differ in layers of each stage: 5,4 there, 4,5 here"),
    ],
)
def test_options_must_be_the_same(party: Party, options: dict[str, object], text: str) -> None:
    shared = {"pp_partition": (4, 5)}
    head = party.head(node_config(**shared))
    for call in (gather(head), party.member(node_config(1, **shared | options), head)):
        with pytest.raises(RendezvousError, match=text):
            call.result()


def test_versions_must_be_the_same(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    head = party.head(node_config())
    monkeypatch.setattr(identity, "__version__", "9.9")
    for call in (gather(head), party.member(node_config(1), head)):
        with pytest.raises(RendezvousError, match=r"differ in version of stagecoach: 9\.9 there"):
            call.result()


def test_what_may_differ(party: Party) -> None:
    """A folder's name, a log level and the like say nothing of the tokens."""
    head = party.head(node_config())
    other = node_config(1, num_threads=2, log_level="debug", distributed_timeout_seconds=7)
    other = dataclasses.replace(other, engine=dataclasses.replace(other.engine, model="elsewhere"))
    call = party.member(other, head)
    gather(head).result()
    head.end("enough", in_order=True)
    call.result()


def test_an_interface_that_is_not_there_is_named_on_every_host(party: Party) -> None:
    head = party.head(node_config())
    other = party.member(node_config(1, network_interface="nosuch0"), head)
    text = "--network-interface=nosuch0: is not there; this host has .*lo"
    with pytest.raises(ConfigError, match=text):
        other.result()
    with pytest.raises(RendezvousError, match=text):
        gather(head).result()
    with pytest.raises(ConfigError, match=text):
        party.head(node_config(network_interface="nosuch0"))


def test_a_member_that_cannot_load_says_why_instead_of_coming(party: Party) -> None:
    head = party.head(node_config())
    withdraw(party.meeting(node_config(1), head), CheckpointError("no such folder"))
    with pytest.raises(RendezvousError, match=r"--node-rank 1 \(.*\): no such folder"):
        gather(head).result()


def test_hosts_that_do_not_reach_each_other(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    head = party.head(node_config())
    # Nobody listens there any more.
    monkeypatch.setattr(member.network.Doorbell, "_answer", member.network.Doorbell.close)
    for call in (gather(head), party.member(node_config(1), head)):
        with pytest.raises(RendezvousError, match=r"\(lo\) does not reach .* at 127\.0\.0\.1"):
            call.result()


def test_a_stage_stays_on_one_host(party: Party) -> None:
    config = node_config()
    ranks = ((0, 1, 2), (3,))
    head = party.head(config, ranks=ranks)
    for call in (gather(head), party.member(node_config(1), head, ranks=ranks)):
        with pytest.raises(
            RendezvousError, match=r"--tensor-parallel-size=2: the ranks \[2, 3\] of stage 1 are on"
        ):
            call.result()


def test_the_master_must_be_here_and_its_port_free(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module, "_NAME_SECONDS", 0.1)
    head = party.head(node_config())
    with pytest.raises(ConfigError, match=r"--master-port=\d+ of 127\.0\.0\.1: .*in use"):
        party.head(node_config(), port=head.address.port)
    with pytest.raises(ConfigError, match=r"--master-addr=192\.0\.2\.77: no address of this host"):
        party.head(node_config(network_interface="lo"), master="192.0.2.77", port=29501)
    with pytest.raises(ConfigError, match="--master-addr=no such name"):
        party.head(node_config(), master="no such name")


def test_an_engine_that_runs_takes_nobody_more(party: Party) -> None:
    head = party.head(node_config())
    first = party.member(node_config(1), head)
    gather(head).result()
    with pytest.raises(RendezvousError, match="this engine is complete and runs already"):
        party.member(node_config(1), head).result()
    assert party.news.empty()
    head.end("enough", in_order=True)
    first.result()


def test_the_end_of_a_worker_is_told_and_it_can_be_started_again(party: Party) -> None:
    head = party.head(node_config())
    other = party.member(node_config(1), head)
    gather(head).result()
    for _ in range(2):
        party.started.get(timeout=LIMIT_SECONDS)
    party.tell[3](Ending("worker[1,1]", 3, "was killed by SIGKILL", True))
    ending = party.news.get(timeout=LIMIT_SECONDS)
    assert isinstance(ending, Ending) and (ending.name, ending.rank) == ("worker[1,1]", 3)
    assert ending.is_killed and "--node-rank 1" in ending.words
    assert ending.words.endswith("was killed by SIGKILL")
    head.start_workers([0, 3], generation=4)
    rank, _, generation = party.started.get(timeout=LIMIT_SECONDS)
    assert (rank, generation) == (3, 4)
    assert party.killed.get(timeout=LIMIT_SECONDS) == "worker[1,1]"
    head.end("worker[0,0] was killed")
    with pytest.raises(EngineDeadError, match=r"--node-rank 0 .* has ended .*: worker\[0,0\] was"):
        other.result()
    assert party.killed.get(timeout=LIMIT_SECONDS) == "all after 0 s"


def test_a_link_that_is_silent_is_cut_on_both_sides(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No packet says so: neither side hears the other's signs of life any more."""
    monkeypatch.setattr(line, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(line, "PING_SECONDS", 0.1)
    head = party.head(node_config())
    other = party.member(node_config(1), head)
    gather(head).result()
    time.sleep(1.5)
    assert party.news.empty(), "signs of life keep an idle line open"
    monkeypatch.setattr(line.Line, "send", lambda *_: None)
    lost = party.news.get(timeout=LIMIT_SECONDS)
    assert isinstance(lost, HostLostError) and "--node-rank 1" in str(lost)
    with pytest.raises(HostLostError, match=r"--node-rank 0 .* is gone: it ") as also_lost:
        other.result()
    # Whoever notices first ends the connection.
    assert "is gone: it gave no sign of life for 1 s" in f"{lost} {also_lost.value}"


def test_who_comes_long_before_it_is_looked_at_hears_signs_of_life(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head may still start its loop, or wait for a place in a cluster."""
    monkeypatch.setattr(line, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(line, "PING_SECONDS", 0.1)
    head = party.head(node_config())
    other = party.member(node_config(1), head)
    time.sleep(1.5)
    gather(head).result()
    head.end("enough", in_order=True)
    other.result()


def test_who_was_not_looked_at_before_the_end_hears_why(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = party.head(node_config())
    # One on each side of the line.
    arrived = threading.Semaphore(0)
    monkeypatch.setattr(line.Line, "give_signs", lambda _: arrived.release())
    other = party.member(node_config(1), head)
    assert all(arrived.acquire(timeout=LIMIT_SECONDS) for _ in range(2))
    head.end("a port was taken")
    with pytest.raises(RendezvousError, match=r"^a port was taken$"):
        other.result()


def test_a_member_that_reaches_itself_goes_on_looking(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection to a free port of one's own host may get that very port as its source."""
    with socket.socket() as itself:
        itself.bind(("127.0.0.1", 0))
        itself.connect(itself.getsockname())
        head = party.head(node_config())
        original, tries = socket.create_connection, []

        def create_connection(*arguments: Any) -> socket.socket:
            tries.append(arguments)
            return itself.dup() if len(tries) == 1 else original(*arguments)

        monkeypatch.setattr(member.socket, "create_connection", create_connection)
        other = party.member(node_config(1), head)
        gather(head).result()
        head.end("enough", in_order=True)
        other.result()
    assert len(tries) > 1
