"""Engines of two hosts, over a network of their own where this machine can have one."""

import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagecoach import SamplingParams
from stagecoach.engine.hosts.line import SILENCE_SECONDS
from tests.e2e.process_watch import Watch
from tests.e2e.two_hosts import LIMIT_SECONDS, OpenStream, TwoHosts, complete, two_hosts
from tests.small_engine import thread_engine

# From the loss of a host until all others have ended and every client has its error.
_END_SECONDS = 20.0
_PROMPTS = ([1, 2, 3], list(range(5, 45)), [7] * 9)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path) as hosts:
        yield hosts


def test_two_hosts_answer_as_one_process_does_until_one_is_killed(
    hosts: TwoHosts, folder: Path, draft_folder: Path, tmp_path: Path
) -> None:
    """With drafts and a key; the second host comes late, loses a worker, and dies silently."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with thread_engine(folder) as llm:
        outputs = llm.generate(_PROMPTS, params, use_tqdm=False)
    key = tmp_path / "host-key"
    key.write_text(secrets.token_hex(32), "utf-8")
    options = (
        *("--master-addr", hosts.addresses[0], "--host-key-file", str(key), "--recover"),
        "--speculative-config",
        f'{{"model": "{draft_folder}", "confidence_schedule": false, "watchdog": false}}',
    )
    hosts.first.serve(folder, *options, "--node-rank", "0")
    while not any("awaited at" in line for line in hosts.first.log):
        assert hosts.first.process.poll() is None, hosts.first.log
        time.sleep(0.05)
    hosts.second.serve(folder, *options, "--node-rank", "1")
    hosts.first.wait_until_ready()
    with hosts.first.client() as client:
        for prompt, output in zip(_PROMPTS, outputs, strict=True):
            tokens = complete(client, folder, prompt, max_tokens=20)
            assert tokens == output.outputs[0].token_ids
        os.kill(hosts.second.worker_ids()[0], signal.SIGKILL)
        tokens = complete(client, folder, _PROMPTS[1], max_tokens=20)
        assert tokens == outputs[1].outputs[0].token_ids
        assert client.get("/health").json()["status"] == "ok"
        stream = OpenStream(hosts.first, folder)
        watch = Watch(hosts.first.process_ids()[1:])
        hosts.second.kill()
        assert "--node-rank 1" in stream.error(_END_SECONDS)
        health = client.get("/health")
        assert health.status_code == 503 and "--node-rank 1" in health.text
        assert "is gone" in health.text
    # Of the first host only the server stays, which says so, and what Python keeps for itself.
    deadline = time.monotonic() + _END_SECONDS
    while len(hosts.first.process_ids()) > 3:
        assert time.monotonic() < deadline, hosts.first.process_ids()
        time.sleep(0.05)
    watch.close()
    hosts.first.process.send_signal(signal.SIGTERM)
    assert hosts.first.wait(_END_SECONDS) == 0


def test_a_cut_link_is_noticed_on_both_sides(hosts: TwoHosts, folder: Path) -> None:
    if not hosts.can_be_cut:
        pytest.skip("needs network namespaces")
    hosts.start(folder)
    hosts.first.wait_until_ready()
    stream = OpenStream(hosts.first, folder)
    hosts.cut()
    assert "--node-rank 1" in stream.error(SILENCE_SECONDS + _END_SECONDS)
    with hosts.first.client() as client:
        health = client.get("/health")
        assert health.status_code == 503 and "no sign of life" in health.text
    assert hosts.second.wait(SILENCE_SECONDS + _END_SECONDS) == 1
    assert "HostLostError: --node-rank 0" in hosts.second.log[-1]


def test_ctrl_c_on_one_host_ends_those_that_wait(hosts: TwoHosts, folder: Path) -> None:
    """A third one never comes, and need not."""
    hosts.start(folder, "-pp", "3", "--nnodes", "3")
    while not any("--node-rank 1 (" in line and "joined" in line for line in hosts.first.log):
        assert hosts.first.process.poll() is None, hosts.first.log
        time.sleep(0.05)
    hosts.second.process.send_signal(signal.SIGINT)
    for host in (hosts.second, hosts.first):
        assert host.wait(_END_SECONDS) == 1
        assert "ended by SIGINT" in host.log[-1]


def test_the_others_end_with_a_server_that_is_killed(hosts: TwoHosts, folder: Path) -> None:
    hosts.start(folder)
    hosts.first.wait_until_ready()
    watch = Watch([*hosts.first.process_ids(), *hosts.second.process_ids()])
    hosts.first.process.kill()
    assert hosts.second.wait(_END_SECONDS) == 1
    assert "HostLostError: --node-rank 0" in hosts.second.log[-1]
    assert watch.running_after(_END_SECONDS) == set()
    watch.close()


def test_an_interface_that_does_not_lead_to_the_other_host(hosts: TwoHosts, folder: Path) -> None:
    if not hosts.can_be_cut:
        pytest.skip("needs network namespaces")
    master = ("--master-addr", hosts.addresses[0])
    hosts.first.serve(folder, *master, "--node-rank", "0")
    # Reached over the cable, it offers an address that only itself can reach.
    hosts.second.serve(folder, *master, "--node-rank", "1", "--network-interface", "lo")
    for host in (hosts.first, hosts.second):
        assert host.wait(LIMIT_SECONDS) == 1
        text = host.log[-1]
        assert "does not reach" in text and "(lo)" in text and "--network-interface" in text
