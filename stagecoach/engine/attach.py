"""An engine as a process has it that did not start it.

Owns the port of one more client of a running engine, and the line to the process that owns the
engine: whoever holds the other end tells of the engine's death, and its own death ends this
process.
"""

import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from stagecoach.engine.ports import ClientPort, ZmqClientPort
from stagecoach.errors import EngineDeadError, error_class


class AttachedEngine:
    """A running engine of another process; a `RunningEngine` for one client."""

    def __init__(self, folder: Path, client: int, owner: Connection) -> None:
        """Connect to it.

        Args:
            folder: where its sockets are.
            client: a number that no client of this engine has had.
            owner: what `tell_failure` sends comes here; its end ends this process.
        """
        self.client = client
        self.port: ClientPort = ZmqClientPort(folder, client=client)
        self._owner = owner
        self._failure: EngineDeadError | None = None
        self._has_failed = threading.Event()
        threading.Thread(target=self._listen, name="owner", daemon=True).start()

    def failure(self, timeout_seconds: float = 0.0) -> EngineDeadError | None:
        """Why the engine ended, as its owner tells; waits that long for its word."""
        self._has_failed.wait(timeout_seconds)
        return self._failure

    def stop(self, *, in_order: bool = True) -> None:
        """Leave the engine, which goes on for others."""
        self.port.close()

    def _listen(self) -> None:
        while True:
            try:
                kind, reason = self._owner.recv()
            except (EOFError, OSError):
                # Nobody is left who could end this process or tell of the engine.
                os._exit(1)
            error = error_class(kind)(reason)
            self._failure = (
                error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
            )
            self._has_failed.set()


def tell_failure(line: Connection, failure: Exception) -> None:
    """Tell the process at the other end of `line` why its engine ended; nothing if it is gone."""
    try:
        line.send((type(failure).__name__, str(failure)))
    except OSError:
        # Its end is noticed where processes are waited for.
        return
