"""Who may start and stop a profile, and what the one who asked is told."""

from typing import Any

import pytest

from stagecoach.engine.messages import ProfileAnswer, StartProfile, StopProfile, ToClient, ToWorker
from stagecoach.engine.profile_round import ProfileRounds

START = StartProfile(query_id=1, folder="f")
STOP = StopProfile(query_id=2)


class Port:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.to_workers: list[ToWorker] = []
        self.to_clients: list[tuple[int, ToClient]] = []

    def send_workers(self, message: ToWorker) -> None:
        self.to_workers.append(message)

    def send_client(self, client: int, message: ToClient) -> None:
        self.to_clients.append((client, message))


@pytest.fixture
def port() -> Port:
    return Port()


@pytest.fixture
def rounds(port: Port) -> ProfileRounds:
    return ProfileRounds(port, 2)  # type: ignore[arg-type]


def answered(rounds: ProfileRounds, query_id: int, *answers: dict[str, Any]) -> None:
    # The later rank first: answers come in any order.
    for rank in reversed(range(len(answers))):
        assert rounds.is_open
        rounds.note(rank, ProfileAnswer(query_id=query_id, **answers[rank]))
    assert not rounds.is_open


def test_the_client_hears_when_every_worker_has_answered(port: Port, rounds: ProfileRounds) -> None:
    rounds.begin(5, START)
    assert port.to_workers == [START] and not port.to_clients
    answered(rounds, 1, {}, {})
    assert port.to_clients.pop() == (5, ProfileAnswer(query_id=1))
    rounds.begin(6, STOP)
    answered(rounds, 2, {"paths": ("a",)}, {"paths": ("b",)})
    assert port.to_clients.pop() == (6, ProfileAnswer(query_id=2, paths=("a", "b")))
    assert port.to_workers == [START, STOP]


def test_what_does_not_fit_is_refused_and_reaches_no_worker(
    port: Port, rounds: ProfileRounds
) -> None:
    rounds.begin(5, STOP)
    rounds.begin(5, START)
    # Not even while the first is under way.
    rounds.begin(6, START)
    rounds.begin(6, STOP)
    answered(rounds, 1, {}, {})
    rounds.begin(6, START)
    refusals = [message for _, message in port.to_clients if message.is_refused]  # type: ignore[union-attr]
    assert [(item.query_id, item.error) for item in refusals] == [  # type: ignore[union-attr]
        (2, "no profile is being recorded"),
        (1, "a profile is being started or stopped"),
        (2, "a profile is being started or stopped"),
        (1, "a profile is being recorded already"),
    ]
    assert port.to_workers == [START]


def test_a_start_that_fails_on_some_can_be_stopped(port: Port, rounds: ProfileRounds) -> None:
    rounds.begin(5, START)
    answered(rounds, 1, {}, {"error": "worker[1,0]: no"})
    assert port.to_clients.pop() == (5, ProfileAnswer(query_id=1, error="worker[1,0]: no"))
    rounds.begin(5, STOP)
    assert port.to_workers == [START, STOP]
    answered(rounds, 2, {"paths": ("a",)}, {"error": "worker[1,0]: nothing is recorded"})
    rounds.begin(5, START)
    answered(rounds, 1, {"error": "x"}, {"error": "y"})
    # It failed on all: nothing is recorded.
    assert port.to_clients[-1] == (5, ProfileAnswer(query_id=1, error="x; y"))
    rounds.begin(5, START)
    assert rounds.is_open
