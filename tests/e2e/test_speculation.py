"""The bundled draft over real processes: drafts are accepted, and tokens are those without it."""

import pytest

from tests.demo_answers import SPECULATION, TEMPERATURES, Answers, answer


@pytest.fixture(scope="module")
def plain() -> Answers:
    """One stage, one rank, no draft, in this process."""
    return answer(distributed_executor_backend="uni")


@pytest.mark.parametrize(("pp", "tp"), [(2, 2), (3, 1)])
def test_processes_give_the_tokens_of_plain_decoding(pp: int, tp: int, plain: Answers) -> None:
    drafted = answer(
        pipeline_parallel_size=pp, tensor_parallel_size=tp, speculative_config=SPECULATION
    )
    for temperature in TEMPERATURES:
        assert drafted.token_ids(temperature) == plain.token_ids(temperature)
    assert drafted.tokens_per_round(0.0) > 3
