"""The bundled draft in float64: the tokens of plain decoding in a third of the rounds or fewer."""

import pytest

from stagecoach.schedule.speculation_stats import SpeculationStats
from tests.demo_answers import SPECULATION, TEMPERATURES, Answers, answer

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def plain() -> Answers:
    return answer(distributed_executor_backend="uni")


@pytest.fixture(scope="module")
def counts() -> list[SpeculationStats]:
    """What each layout counted."""
    return []


def test_chance_has_a_say(plain: Answers) -> None:
    assert plain.token_ids(0.0) != plain.token_ids(2.0)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2), (3, 1)])
def test_tokens_are_those_of_plain_decoding_and_counts_those_of_every_layout(
    pp: int, tp: int, plain: Answers, counts: list[SpeculationStats]
) -> None:
    drafted = answer(
        distributed_executor_backend="uni",
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        speculative_config=SPECULATION,
    )
    for temperature in TEMPERATURES:
        assert drafted.token_ids(temperature) == plain.token_ids(temperature)
    assert drafted.tokens_per_round(0.0) > 3
    assert drafted.tokens_per_round(1.0) > 3
    assert drafted.stats is not None
    counts.append(drafted.stats)
    assert drafted.stats == counts[0]
