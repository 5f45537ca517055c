"""The key that hosts share: who has it, who has not, and who pretends to."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagecoach.engine.hosts.handshake import StrangerError, admit, ask_to_enter, read_host_key
from stagecoach.engine.hosts.line import Line, LineCutError
from stagecoach.engine.hosts.messages import (
    FROM_MEMBER,
    TO_MEMBER,
    Admitted,
    Challenge,
    Ended,
    FromMember,
    Hello,
    Leaving,
    ToMember,
)
from stagecoach.errors import ConfigError, RendezvousError
from tests.cpu.engine.hosts.party import Call, Party, gather, node_config

pytestmark = pytest.mark.cpu

_KEY, _OTHER_KEY = b"0123456789abcdef", b"fedcba9876543210"

Lines = tuple[Line[FromMember], Line[ToMember]]


@contextlib.contextmanager
def joined() -> Iterator[Lines]:
    """The head's end of a line and a member's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    heads, members = Line(ours, FROM_MEMBER), Line(theirs, TO_MEMBER)
    try:
        yield heads, members
    finally:
        heads.close()
        members.close()


@pytest.fixture
def lines() -> Iterator[Lines]:
    with joined() as lines:
        yield lines


def test_a_key_is_what_the_file_holds_but_white_space(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(_KEY + b"\n")
    assert read_host_key(str(path)) == _KEY and read_host_key(None) is None
    path.write_bytes(_KEY[1:] + b"\n")
    with pytest.raises(ConfigError, match=r"--host-key-file=.*key: holds 15 bytes, .* 16 or more"):
        read_host_key(str(path))
    with pytest.raises(ConfigError, match=r"--host-key-file=.*nowhere: No such file"):
        read_host_key(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("key", [None, _KEY])
def test_both_have_the_same(lines: Lines, key: bytes | None) -> None:
    call = Call(admit, lines[0], key)
    ask_to_enter(lines[1], key)
    call.result()


@pytest.mark.parametrize(
    ("heads", "members", "heads_words", "members_words"),
    [
        (_KEY, _OTHER_KEY, "holds another key there", "holds another key there"),
        (_KEY, None, "is given here alone", "is given there alone"),
        (None, _KEY, "is given there alone", "is given here alone"),
    ],
)
def test_a_difference_is_named_on_both_hosts(
    party: Party,
    heads: bytes | None,
    members: bytes | None,
    heads_words: str,
    members_words: str,
) -> None:
    """The head goes on waiting for who has the key: a stranger must not end its start."""
    head = party.head(node_config(distributed_timeout_seconds=1), secret=heads)
    call, other = gather(head), party.member(node_config(1), head, secret=members)
    with pytest.raises(
        RendezvousError, match=rf"--node-rank 0 .*: --host-key-file {members_words}"
    ):
        other.result()
    text = rf"--node-rank 1 of 2 did not come .*; 127\.0\.0\.1: --host-key-file {heads_words}"
    with pytest.raises(RendezvousError, match=text):
        call.result()


def test_an_engine_comes_together_beside_a_stranger(party: Party, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        path.write_bytes(_KEY)
    head = party.head(node_config(host_key_file=str(paths[0])))
    with pytest.raises(RendezvousError, match="--host-key-file is given there alone"):
        party.member(node_config(1), head).result()
    other = party.member(node_config(1, host_key_file=str(paths[1])), head)
    gather(head).result()
    head.end("enough", in_order=True)
    other.result()


def test_a_proof_that_was_shown_elsewhere_is_worth_nothing(lines: Lines) -> None:
    with joined() as (false_head, deceived):
        asked = Call(ask_to_enter, deceived, _KEY)
        false_head.send(Challenge(random=bytes(32), has_key=True))
        hello = false_head.receive()
        assert isinstance(hello, Hello) and hello.proof
        # What a member shows is no proof of a head,
        false_head.send(Admitted(proof=hello.proof))
        with pytest.raises(StrangerError, match="holds another key there"):
            asked.result()
    # nor of a member to another one.
    call = Call(admit, lines[0], _KEY)
    assert isinstance(lines[1].receive(), Challenge)
    lines[1].send(hello)
    with pytest.raises(StrangerError, match="holds another key there"):
        call.result()
    assert isinstance(lines[1].receive(), Ended)


def test_who_says_something_else_first_is_sent_away(lines: Lines) -> None:
    call = Call(admit, lines[0], None)
    lines[1].receive()
    lines[1].send(Leaving(reason="of another version"))
    assert lines[1].receive() == Ended(reason="the head is of another version of stagecoach")
    with pytest.raises(LineCutError, match="it speaks another protocol"):
        call.result()
