"""Whether the two ends of a line belong to one engine, before either says more.

Owns the first three messages of a line, and what they prove: that the other side has the key of
--host-key-file, too. Each shows an HMAC over a random number of both, so that the key never travels
and no answer is worth anything twice. Knows nothing of who comes and with what.
"""

import hashlib
import hmac
import secrets
from pathlib import Path

from stagecoach.config.engine import option
from stagecoach.engine.hosts.line import Line, LineCutError
from stagecoach.engine.hosts.messages import (
    Admitted,
    Challenge,
    Ended,
    FromMember,
    Hello,
    ToMember,
)
from stagecoach.errors import ConfigError

_NUM_RANDOM_BYTES = 32
_LEAST_KEY_BYTES = 16
# The two proofs differ, or a head could send back what it was shown.
_OF_MEMBER, _OF_HEAD = b"member", b"head"


class StrangerError(Exception):
    """The other side has another key, or only one of both has any; the text says so."""


def read_host_key(path: str | None) -> bytes | None:
    """What is in --host-key-file, without white space around it; None: no file is named.

    Raises:
        ConfigError: it cannot be read, or it is too short to be a secret.
    """
    if path is None:
        return None
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{option('host_key_file')}={path}: {error.strerror}") from None
    if len(key) < _LEAST_KEY_BYTES:
        raise ConfigError(
            f"{option('host_key_file')}={path}: holds {len(key)} bytes, and a key takes "
            f"{_LEAST_KEY_BYTES} or more; `openssl rand -hex 32` makes one"
        )
    return key


def admit(line: Line[FromMember], key: bytes | None) -> None:
    """The head's side; returns once both have shown that they belong together.

    Raises:
        StrangerError: they do not; the other side has been told.
        LineCutError: it is gone, or no member of an engine.
    """
    own = secrets.token_bytes(_NUM_RANDOM_BYTES)
    line.send(Challenge(random=own, has_key=key is not None))
    hello = line.receive()
    if not isinstance(hello, Hello):
        line.send(Ended(reason="the head is of another version of stagecoach"))
        raise LineCutError("it speaks another protocol")
    if not _is_proof(hello.proof, key, _OF_MEMBER, own + hello.random):
        words = _difference(here=key is not None, there=hello.has_key)
        line.send(Ended(reason=_difference(here=hello.has_key, there=key is not None)))
        raise StrangerError(words)
    line.send(Admitted(proof=_proof(key, _OF_HEAD, own + hello.random)))


def ask_to_enter(line: Line[ToMember], key: bytes | None) -> None:
    """A member's side.

    Raises:
        StrangerError: the head does not take this member, or it is none of this engine.
        LineCutError: it is gone.
    """
    challenge = line.receive()
    if not isinstance(challenge, Challenge):
        raise StrangerError("it is of another version of stagecoach")
    own = secrets.token_bytes(_NUM_RANDOM_BYTES)
    both = challenge.random + own
    line.send(Hello(random=own, has_key=key is not None, proof=_proof(key, _OF_MEMBER, both)))
    answer = line.receive()
    if isinstance(answer, Ended):
        raise StrangerError(answer.reason)
    if not isinstance(answer, Admitted) or not _is_proof(answer.proof, key, _OF_HEAD, both):
        raise StrangerError(_difference(here=key is not None, there=challenge.has_key))


def _proof(key: bytes | None, side: bytes, random: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104) of what both sides drew; empty without a key."""
    return b"" if key is None else hmac.new(key, side + random, hashlib.sha256).digest()


def _is_proof(shown: bytes, key: bytes | None, side: bytes, random: bytes) -> bool:
    return hmac.compare_digest(shown, _proof(key, side, random))


def _difference(*, here: bool, there: bool) -> str:
    name = option("host_key_file")
    if here and there:
        return f"{name} holds another key there"
    return f"{name} is given {'here' if here else 'there'} alone"
