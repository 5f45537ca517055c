"""Two hosts on one machine: network namespaces joined by a cable, each with processes of its own.

Where they cannot be made (no root, no `ip`) both hosts are this one, over loopback; then there is
no cable to cut.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.small_engine import OPTIONS

LIMIT_SECONDS = 100.0
ADDRESSES = ("10.213.0.1", "10.213.0.2")
# Of the small model's engines, as flags.
FLAGS = [
    *("-pp", "2", "-tp", "2", "--nnodes", "2", "--device", "cpu"),
    *("--dtype", OPTIONS["dtype"], "--max-model-len", str(OPTIONS["max_model_len"])),
    *("--max-num-seqs", "6", "--max-num-batched-tokens", "24", "--block-size", "8"),
    *("--num-threads", "1", "--distributed-timeout-seconds", "60"),
]


class Host:
    """A host, what runs on it, and what that logs."""

    def __init__(self, prefix: Sequence[str], folder: Path) -> None:
        self.log: list[str] = []
        self.socket = folder / f"{len(list(folder.iterdir()))}.sock"
        self._prefix = prefix
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def run(self, *arguments: str) -> None:
        """Start a program of Python's here."""
        self._process = subprocess.Popen(
            [*self._prefix, sys.executable, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def serve(self, folder: Path, *options: str) -> None:
        """Start the server, or what runs ranks for it."""
        socket = ("--uds", str(self.socket))
        self.run("-m", "stagecoach", "serve", str(folder), *FLAGS, *socket, *options)

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        self.log.extend(process.stderr)
        process.stderr.close()

    @property
    def process(self) -> "subprocess.Popen[str]":
        assert self._process is not None, "nothing was started"
        return self._process

    def client(self) -> httpx2.Client:
        transport = httpx2.HTTPTransport(uds=str(self.socket))
        return httpx2.Client(transport=transport, base_url="http://host", timeout=LIMIT_SECONDS)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not self._is_ready():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        if not self.socket.exists():
            return False
        with self.client() as client:
            return client.get("/ready").status_code == 200

    def process_ids(self) -> list[int]:
        """Of all that runs here, the program first."""
        program = psutil.Process(self.process.pid)
        return [program.pid, *(child.pid for child in program.children(recursive=True))]

    def worker_ids(self) -> list[int]:
        """Of processes that run ranks: they are forked from a child."""
        program = psutil.Process(self.process.pid)
        direct = program.children()
        return [child.pid for child in program.children(recursive=True) if child not in direct]

    def wait(self, seconds: float = LIMIT_SECONDS) -> int:
        """The program's exit status."""
        status = self.process.wait(seconds)
        assert self._reader is not None
        self._reader.join(seconds)
        return status

    def kill(self) -> None:
        """Everything that runs here at once, as a power cut does."""
        for process_id in self.process_ids():
            # Those that are left notice the end of the first, and may be quicker.
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self.wait()


class TwoHosts:
    """The first serves."""

    def __init__(self, hosts: tuple[Host, Host], cable: str | None, addresses: Sequence[str]):
        self.first, self.second = hosts
        self.addresses = addresses
        self._cable = cable

    @property
    def can_be_cut(self) -> bool:
        return self._cable is not None

    def cut(self) -> None:
        """No packet passes from now on, and nobody is told."""
        assert self._cable is not None, "one host has no cable"
        _ip("-n", self._cable, "link", "set", "cable", "down")

    def start(self, folder: Path, *options: str) -> None:
        master = ("--master-addr", self.addresses[0], *options)
        self.first.serve(folder, *master, "--node-rank", "0")
        self.second.serve(folder, *master, "--node-rank", "1")


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """They end with all that runs on them."""
    names = tuple(f"stagecoach-{os.getpid()}-{number}" for number in (0, 1))
    has_cable = _join(names)
    prefixes = [["ip", "netns", "exec", name] for name in names] if has_cable else [[], []]
    sockets = [folder / "first", folder / "second"]
    for path in sockets:
        path.mkdir()
    hosts = (Host(prefixes[0], sockets[0]), Host(prefixes[1], sockets[1]))
    addresses = ADDRESSES if has_cable else ("127.0.0.1", "127.0.0.1")
    try:
        yield TwoHosts(hosts, names[1] if has_cable else None, addresses)
    finally:
        for host in hosts:
            host.close()
        if has_cable:
            for name in names:
                _ip("netns", "del", name)


def _join(names: tuple[str, ...]) -> bool:
    """Make both namespaces and the cable between them; False where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    first, second = names
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip(
            *("link", "add", "cable", "netns", first, "type", "veth"),
            *("peer", "name", "cable", "netns", second),
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for interface in ("cable", "lo"):
                _ip("-n", name, "link", "set", interface, "up")
    except subprocess.CalledProcessError:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        return False
    return True


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def complete(client: httpx2.Client, model: Path, prompt: Sequence[int], **fields: Any) -> list[int]:
    """Tokens of a greedy answer."""
    body = {
        "model": str(model),
        "prompt": list(prompt),
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


class OpenStream:
    """A client that reads an answer for as long as it comes."""

    def __init__(self, host: Host, model: Path) -> None:
        self.text = ""
        self._body = {
            "model": str(model),
            "prompt": [1, 2, 3],
            "stream": True,
            "max_tokens": 100,
            "n": 6,
            "ignore_eos": True,
        }
        self._host = host
        self._has_begun = threading.Event()
        self._has_ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._has_begun.wait(LIMIT_SECONDS), self.text

    def _read(self) -> None:
        with self._host.client() as client:
            # One answer after the other, until one ends in an error.
            while '"error"' not in self.text:
                self.text = ""
                with client.stream("POST", "/v1/completions", json=self._body) as answer:
                    for part in answer.iter_text():
                        self.text += part
                        self._has_begun.set()
        self._has_ended.set()

    def error(self, seconds: float) -> str:
        """What it ended with."""
        assert self._has_ended.wait(seconds), self.text[-300:]
        return self.text[self.text.index('"error"') :]
