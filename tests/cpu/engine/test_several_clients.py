"""Several clients of one engine: each hears its own, and one that is gone leaves nothing."""

from pathlib import Path

import pytest

from stagecoach.engine.client import EngineClient
from stagecoach.engine.loop import EngineLoop
from stagecoach.engine.messages import (
    EngineReady,
    EngineStats,
    ForgetClient,
    GetStats,
    Hello,
    Outputs,
    Submit,
)
from stagecoach.engine.ports import CLIENT_SHIFT
from stagecoach.errors import EngineDeadError
from stagecoach.request import SamplingParams
from tests.cpu.engine.fakes import LoopRun, ScriptedPort, expected_tokens, outputs, resolved, submit
from tests.cpu.engine.schedules import start_client

pytestmark = pytest.mark.cpu


def of(client: int, number: int) -> Submit:
    return submit(client << CLIENT_SHIFT | number, max_tokens=4)


def test_each_client_hears_of_its_own_requests_only() -> None:
    run = LoopRun()
    asked = {client: of(client, 1) for client in (0, 1, 7)}

    def ask() -> None:
        for client in (1, 7):
            run.port.say(Hello(), client)
        for client, message in asked.items():
            run.port.say(message, client)

    run.port.then(ask, run.port.finish_all)
    port = run.run()
    for client, message in asked.items():
        assert len(port.sent(EngineReady, client)) == 1
        heard = {item.request_id for sent in port.sent(Outputs, client) for item in sent.items}
        assert heard == {message.request_id}
        assert outputs(port, message.request_id) == expected_tokens(message)


def test_one_that_is_gone_leaves_nothing_running() -> None:
    """Also what it sent last, which may arrive after the news of its end."""
    run = LoopRun(max_num_seqs=2)
    lasting = of(1, 1)

    def ask() -> None:
        for client in (1, 2):
            run.port.say(Hello(), client)
        for message in (of(2, 1), lasting, of(2, 2), of(2, 3)):
            run.port.say(message, message.request_id >> CLIENT_SHIFT)

    def lose() -> None:
        run.port.say(ForgetClient(client=2))
        run.port.say(of(2, 4), client=2)
        run.port.say(GetStats(query_id=1), client=2)
        run.port.say(GetStats(query_id=1), client=1)

    run.port.then(ask, lose, run.port.finish_all)
    port = run.run()
    assert outputs(port, lasting.request_id) == expected_tokens(lasting)
    [stats] = port.sent(EngineStats)
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    assert not port.sent(Outputs, client=2)


def test_one_that_goes_while_the_engine_loads_is_forgotten() -> None:
    port = ScriptedPort(config := resolved())

    def ask() -> None:
        port.say(of(2, 1), client=2)
        port.say(ForgetClient(client=2))

    port.say(Hello())
    port.then(ask, port.ready, port.finish_all)
    EngineLoop(config, port).run()
    assert not port.sent(Outputs)


def test_ids_and_seeds_of_two_clients_never_meet(checkpoint: Path) -> None:
    owner = start_client(checkpoint)
    try:
        other = EngineClient(owner.config, is_awaited=False, attached_to=_Other())
        ids = [client.new_request_id() for client in (owner, other) for _ in range(3)]
        seeds = [owner._derived_seed(request_id) for request_id in ids]
        assert len(set(ids)) == len(set(seeds)) == 6
        other.close()
    finally:
        owner.close()


class _Other:
    """An engine whose client is the fifth, and says nothing."""

    client = 5

    def __init__(self) -> None:
        self.port = self

    def send(self, message: object) -> None:
        self.last = message

    def receive(self, timeout_seconds: float) -> None:
        return None

    def failure(self, timeout_seconds: float = 0.0) -> None:
        return None

    def stop(self, *, in_order: bool = True) -> None:
        self.last = None

    def close(self) -> None:
        self.last = None


@pytest.mark.parametrize("has_request", [True, False])
def test_a_loop_that_hangs_ends_what_is_open(checkpoint: Path, *, has_request: bool) -> None:
    """G05, G07: it is alive, and says nothing when it is asked."""
    owner = start_client(checkpoint)
    other = _Other()
    ends: list[object] = []
    try:
        config = owner.config
        object.__setattr__(config.engine, "execute_model_timeout_seconds", 0.3)
        client = EngineClient(config, is_awaited=False, attached_to=other)
        client.ready = owner.ready
        if has_request:
            client.submit((1, 2), SamplingParams(), ends.append)
            client._receiver.join(5)
            [error] = ends
            assert isinstance(error, EngineDeadError) and "it hangs" in str(error)
        else:
            with pytest.raises(EngineDeadError, match="it hangs"):
                client.stats(5)
        assert isinstance(other.last, GetStats)
        with pytest.raises(EngineDeadError, match="it hangs"):
            client.submit((1, 2), SamplingParams(), ends.append)
        client.close()
    finally:
        owner.close()
