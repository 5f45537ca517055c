"""A head and its members as threads of one process, on loopback, with workers that only tell."""

import dataclasses
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.child_processes import ChildProcesses, Ending
from stagecoach.engine.contact import ChannelKeys, Contact
from stagecoach.engine.hosts import member
from stagecoach.engine.hosts.head import Head, News
from stagecoach.engine.hosts.meeting import Meeting, meeting_of_nodes
from stagecoach.engine.hosts.member import run_member
from tests.cpu.engine.fakes import resolved

LIMIT_SECONDS = 10.0
PLAN_CHANNEL = "tcp://127.0.0.1:1"
KEYS = ChannelKeys(server_public=b"public", server_secret=b"secret")


def node_config(node_rank: int = 0, **options: Any) -> ResolvedConfig:
    """Of one of two nodes with a stage each."""
    return resolved(
        **{
            "pipeline_parallel_size": 2,
            "tensor_parallel_size": 2,
            "nnodes": 2,
            "node_rank": node_rank,
            "distributed_timeout_seconds": 5,
            **options,
        }
    )


class Call:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[..., Any], *arguments: object) -> None:
        self._done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                self._done.put((call(*arguments), None))
            except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
                self._done.put((None, error))

        threading.Thread(target=run, daemon=True).start()

    def result(self) -> Any:
        """What it returned or raised; it must come soon."""
        result, error = self._done.get(timeout=LIMIT_SECONDS)
        if error is not None:
            raise error
        return result


class Party:
    """What is started is ended with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: queue.SimpleQueue[tuple[int, Contact, int]] = queue.SimpleQueue()
        self.killed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self.children: list[ChildProcesses] = []
        self.tell: dict[int, Callable[[Ending], None]] = {}
        self._heads: list[Head] = []

        def start(
            processes: ChildProcesses,
            config: ResolvedConfig,
            rank: int,
            contact: Contact,
            generation: int,
        ) -> None:
            self.tell[rank] = processes.tell_end
            self.started.put((rank, contact, generation))

        party = self

        class Children:
            """In the place of processes."""

            def __init__(self, on_end: Callable[[Ending], None]) -> None:
                self.tell_end = on_end

            def kill(self, names: list[str]) -> None:
                for name in names:
                    party.killed.put(name)

            def stop(self, grace_seconds: float) -> None:
                party.killed.put(f"all after {grace_seconds:g} s")

        monkeypatch.setattr(member, "start_worker", start)
        monkeypatch.setattr(member, "ChildProcesses", Children)

    def head(self, config: ResolvedConfig, **changes: Any) -> Head:
        """On a free port."""
        meeting = dataclasses.replace(meeting_of_nodes(config.engine), **{"port": None, **changes})
        head = Head(config, meeting, self.news.put)
        self._heads.append(head)
        return head

    def member(self, config: ResolvedConfig, head: Head, **changes: Any) -> Call:
        return Call(run_member, config, self.meeting(config, head, **changes))

    def meeting(self, config: ResolvedConfig, head: Head, **changes: Any) -> Meeting:
        place = {"master": head.address.address, "port": head.address.port}
        return dataclasses.replace(meeting_of_nodes(config.engine), **place | changes)

    def close(self) -> None:
        for head in self._heads:
            head.end("the test is over", in_order=True)


def gather(head: Head) -> Call:
    return Call(head.gather, PLAN_CHANNEL, KEYS)


def connect(head: Head) -> socket.socket:
    """Somebody who connects and has said nothing yet."""
    return socket.create_connection(head.address, LIMIT_SECONDS)
