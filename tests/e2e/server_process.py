"""`stagecoach serve` as a process on loopback, and what it logs."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil

from tests.small_engine import SHAPE

LIMIT_SECONDS = 60.0
_LISTENING = re.compile(r"listening on (\S+)")


class ServerProcess:
    """A server that was started.

    Attributes:
        url: where it listens.
        log: its lines so far.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.log: list[str] = []
        self.url = ""
        self._is_listening = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            found = _LISTENING.search(line)
            if found:
                self.url = found[1]
                self._is_listening.set()
        self._is_listening.set()

    def wait_until_listening(self) -> None:
        assert self._is_listening.wait(LIMIT_SECONDS)
        assert self.url, self.log

    def wait_until_ready(self) -> None:
        self.wait_until_listening()
        deadline = time.monotonic() + LIMIT_SECONDS
        # Of several API processes one may be ready before the others; the line is about all.
        while not any("serving " in line for line in self.log):
            assert time.monotonic() < deadline, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.05)
        assert httpx2.get(f"{self.url}/ready", timeout=LIMIT_SECONDS).status_code == 200

    def loop_process(self) -> psutil.Process:
        """The engine loop: the first child that was spawned."""
        return self._spawned()[0]

    def api_processes(self) -> list[psutil.Process]:
        """Those of a server with several."""
        return self._spawned()[1:]

    def _spawned(self) -> list[psutil.Process]:
        spawned = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if "spawn_main" in " ".join(child.cmdline()):
                    spawned.append(child)
        return sorted(spawned, key=lambda child: child.create_time())

    def worker_processes(self) -> list[psutil.Process]:
        """Workers are forked from a child."""
        server = psutil.Process(self.process.pid)
        direct = server.children()
        return [child for child in server.children(recursive=True) if child not in direct]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Its exit status."""
        status = self.process.wait(seconds)
        self._reader.join()
        return status


@contextmanager
def serving(
    model: Path | str, temporary_folder: Path, *options: str, is_awaited: bool = True
) -> Iterator[ServerProcess]:
    """A server on a free port; ended by force if the test did not end it."""
    command = [sys.executable, "-m", "stagecoach", "serve", str(model), "--port", "0"]
    command += ["--num-threads", "1", "--max-model-len", str(SHAPE.max_length), *options]
    environment = os.environ | {"TMPDIR": str(temporary_folder), "OMP_NUM_THREADS": "1"}
    environment.pop("STAGECOACH_API_KEY", None)
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    server = ServerProcess(process)
    try:
        if is_awaited:
            server.wait_until_ready()
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
        server.wait(LIMIT_SECONDS)
        assert process.stderr is not None
        process.stderr.close()
