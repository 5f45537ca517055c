"""Where the workers of one engine find each other before they have links.

Owns the names under which they meet: each generation has its own, so that workers that build
their links anew never meet what an earlier attempt left. On one host it is a file, on several a
store on the first of them, which no worker's death takes along.
"""

import datetime
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stagecoach.errors import RendezvousError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """A meeting place; a file that nobody used before, or the address of a store."""

    timeout_seconds: float
    file: Path | None = None
    address: tuple[str, int] | None = None

    def store(self, generation: int, num_workers: int) -> "Store":
        """What the workers of this generation tell each other through.

        Raises:
            RendezvousError: nothing answers at the address within the time.
        """
        from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

        if self.address is None:
            return FileStore(str(self._file_of(generation)), num_workers)
        host, port = self.address
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        try:
            store = TCPStore(host, port, is_master=False, timeout=timeout)
        except RuntimeError as error:
            [why, *_] = str(error).splitlines()
            raise RendezvousError(f"the store at {host}:{port} does not answer: {why}") from error
        return PrefixStore(f"generation {generation}", store)

    def forget_earlier(self, generation: int) -> None:
        """Remove the files of other generations; all workers must have come for this one."""
        if self.file is None:
            return
        own = self._file_of(generation)
        for path in self.file.parent.glob(f"{self.file.name}-*"):
            if path != own:
                path.unlink(missing_ok=True)

    def _file_of(self, generation: int) -> Path:
        assert self.file is not None, "a file or an address"
        return self.file.with_name(f"{self.file.name}-{generation}")


def serve_store(listener: socket.socket) -> "Store":
    """The store behind this listening socket; it serves as long as what is returned lives."""
    from torch._C._distributed_c10d import TCPStore

    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
