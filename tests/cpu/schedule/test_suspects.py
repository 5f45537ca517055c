"""A request that kills workers is found; others come through."""

from random import Random

import pytest

from stagecoach.request import FinishReason, Request, SamplingParams
from stagecoach.schedule.suspects import Suspects


def request(number: int) -> Request:
    return Request(
        request_id=number,
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(),
        seed=0,
        max_tokens=9,
    )


def test_a_lone_request_is_at_fault_the_second_time() -> None:
    suspects, lone = Suspects(), request(1)
    assert suspects.note_death([lone]) is None and suspects.num_seats() is None
    assert suspects.note_death([lone]) is lone


def test_the_token_of_a_replay_does_not_acquit() -> None:
    suspects, lone = Suspects(), request(1)
    assert suspects.note_death([lone]) is None
    lone.output_token_ids.append(7)
    assert suspects.note_death([lone]) is lone


def test_getting_on_in_between_acquits() -> None:
    suspects, lone = Suspects(), request(1)
    for _ in range(5):
        assert suspects.note_death([lone]) is None
        lone.output_token_ids.extend((7, 8))
    assert suspects.num_seats() is None


def test_deaths_without_requests_accuse_nobody() -> None:
    suspects, lone = Suspects(), request(1)
    assert suspects.note_death([lone]) is None
    assert suspects.note_death([]) is None and suspects.note_death([]) is None
    assert suspects.num_seats() is None
    # Nor do they acquit: it had no turn.
    assert suspects.note_death([lone]) is lone


@pytest.mark.parametrize("num_requests", [2, 5])
@pytest.mark.parametrize("guilty", [0, 1])
def test_several_suspects_get_their_seats_one_by_one(num_requests: int, guilty: int) -> None:
    """The next once the one before has got on; so the third death has one suspect."""
    suspects = Suspects()
    requests = [request(number) for number in range(num_requests)]
    assert suspects.note_death(requests) is None and suspects.note_death(requests) is None
    for number in range(guilty):
        assert suspects.num_seats() == 1 + number
        requests[number].output_token_ids.extend((7, 8))
    assert suspects.num_seats() == 1 + guilty
    assert suspects.note_death(requests[: guilty + 1]) is requests[guilty]
    requests[guilty].finish_reason = FinishReason.ERROR
    for number in range(guilty + 1, num_requests):
        assert suspects.num_seats() == number - guilty
        requests[number].output_token_ids.extend((7, 8))
    assert suspects.num_seats() is None


def test_suspects_that_end_or_get_on_leave_all_seats() -> None:
    suspects = Suspects()
    requests = [request(number) for number in range(3)]
    for _ in range(2):
        suspects.note_death(requests)
    requests[0].finish_reason = FinishReason.ABORT
    assert suspects.num_seats() == 1
    requests[1].output_token_ids.extend((5, 6))
    assert suspects.num_seats() == 2
    requests[1].finish_reason = FinishReason.LENGTH
    assert suspects.num_seats() == 1
    requests[2].output_token_ids.extend((5, 6))
    assert suspects.num_seats() is None


def test_whoever_is_lethal_is_found_within_three_deaths_of_its_own() -> None:
    """Random seats and turns: innocent requests never end, and the guilty one does."""
    for seed in range(200):
        random = Random(seed)
        suspects, alive = Suspects(), [request(number) for number in range(6)]
        lethal = random.choice(alive)
        num_deaths = 0
        while lethal in alive:
            num_seats = suspects.num_seats() or random.randint(1, 6)
            seated = alive[:num_seats]
            if lethal in seated:
                num_deaths += 1
                found = suspects.note_death(seated)
                assert found in (None, lethal)
                if found is not None:
                    alive.remove(found)
                continue
            for other in seated:
                other.output_token_ids.extend((1, 2))
                if random.random() < 0.3:
                    other.finish_reason = FinishReason.STOP
                    alive.remove(other)
        assert num_deaths <= 3
