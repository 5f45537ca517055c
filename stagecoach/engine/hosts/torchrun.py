"""Ranks that were started from outside: by torchrun, or by whatever sets the same variables.

Owns the reading of the environment: RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
Every rank is a member of its own; rank 0 is also the head. Where torchrun keeps a store at
MASTER_PORT, that store tells where the head waits; else the head waits at the port itself.
"""

import datetime
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stagecoach.config.engine import EngineConfig, option
from stagecoach.engine.hosts.handshake import read_host_key
from stagecoach.engine.hosts.meeting import HeadAddress, Meeting
from stagecoach.errors import ConfigError, RendezvousError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

# For the agent, which was there before this process was.
_STORE_SECONDS = 30.0
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def meeting_of_ranks(engine: EngineConfig, variables: Mapping[str, str] | None = None) -> Meeting:
    """What this process is, as the environment says.

    Args:
        variables: instead of this process's own.

    Raises:
        ConfigError: a variable is missing or no number, they are not those of this many ranks, or
            the key that all share cannot be read.
    """
    if variables is None:
        variables = os.environ  # noqa: TID251
    missing = [name for name in _NEEDED if name not in variables]
    if missing:
        raise ConfigError(
            f"{option('launcher')}=torchrun: {', '.join(missing)} is not set; start this command "
            "with torchrun"
        )
    rank, size, port = (_number(variables, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if size != engine.num_workers or not 0 <= rank < size:
        raise ConfigError(
            f"{option('launcher')}=torchrun: RANK={rank} and WORLD_SIZE={size}, but "
            f"{option('pipeline_parallel_size')}={engine.pipeline_parallel_size} and "
            f"{option('tensor_parallel_size')}={engine.tensor_parallel_size} take "
            f"{engine.num_workers} ranks"
        )
    master = variables["MASTER_ADDR"]
    has_store = variables.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    bulletin = _Bulletin(master, port, variables) if has_store else None
    return Meeting(
        member=rank,
        noun="rank",
        ranks=tuple((number,) for number in range(size)),
        master=master,
        port=None if has_store else port,
        publish=bulletin.publish if bulletin else None,
        look_up=bulletin.look_up if bulletin else None,
        # A group of torchrun is what one agent started, on one host.
        host_key=variables.get("GROUP_RANK") or socket.gethostname(),
        secret=read_host_key(engine.host_key_file),
    )


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise ConfigError(
            f"{option('launcher')}=torchrun: {name}={variables[name]}: must be a number"
        ) from None


class _Bulletin:
    """The store of torchrun's agent, where the head says where it waits."""

    def __init__(self, master: str, port: int, variables: Mapping[str, str]) -> None:
        self._master = master
        self._port = port
        # Each attempt of a run has another head.
        run = variables.get("TORCHELASTIC_RUN_ID", "")
        attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"stagecoach {run} {attempt}"

    def publish(self, head: HeadAddress) -> None:
        """
        Raises:
            RendezvousError: the store does not answer.
        """
        try:
            self._store(_STORE_SECONDS).set(self._key, f"{head.address} {head.port}")
        except RuntimeError as error:
            raise RendezvousError(
                f"torchrun's store at {self._master}:{self._port}: {str(error).splitlines()[0]}"
            ) from None

    def look_up(self, seconds: float) -> HeadAddress:
        """
        Raises:
            OSError: the head has not said so within the time.
        """
        try:
            store = self._store(seconds)
            store.wait([self._key], datetime.timedelta(seconds=seconds))
            address, port = store.get(self._key).decode().split()
        except RuntimeError as error:
            raise OSError(str(error).splitlines()[0]) from None
        return HeadAddress(address, int(port))

    def _store(self, seconds: float) -> "TCPStore":
        from torch._C._distributed_c10d import TCPStore

        return TCPStore(
            self._master,
            self._port,
            is_master=False,
            timeout=datetime.timedelta(seconds=seconds),
        )
