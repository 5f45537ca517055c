"""One answer whatever the schedule: in float64 the tokens are equal and logits agree to 1e-9.

Every engine here runs with NaN in all free pages and slots.
"""

from pathlib import Path

import pytest

from stagecoach.request import SamplingParams
from tests.cpu.engine.schedules import (
    BLOCK_SIZE,
    Answer,
    Ask,
    assert_idle,
    assert_same,
    run,
    run_alone,
    start_client,
)

TOLERANCE = 1e-9
BUDGETS = (1, 3, 16, BLOCK_SIZE - 1, BLOCK_SIZE + 1, 512)
LAYOUTS = [(pp, tp) for pp in (1, 2, 3, 4) for tp in (1, 2, 4)]


@pytest.mark.parametrize(("pp", "tp"), LAYOUTS)
def test_layout_and_chunk_budget_change_nothing(
    pp: int, tp: int, checkpoint: Path, asks: list[Ask], expected: list[Answer]
) -> None:
    # Every other budget, so that each meets each number of stages and of ranks.
    for budget in BUDGETS[LAYOUTS.index((pp, tp)) % 2 :: 2]:
        client = start_client(
            checkpoint,
            pipeline_parallel_size=pp,
            tensor_parallel_size=tp,
            max_num_batched_tokens=budget,
        )
        try:
            for got, wanted in zip(run(client, asks), expected, strict=True):
                assert_same(got, wanted, TOLERANCE)
            assert_idle(client)
        finally:
            client.close()


@pytest.fixture(scope="module")
def growing() -> list[Ask]:
    """Requests that start on one page and end on four."""
    return [
        Ask(
            tuple(range(10 * number, 10 * number + 5)),
            SamplingParams(temperature=0.9, seed=number, max_tokens=24, ignore_eos=True),
        )
        for number in range(5)
    ]


@pytest.mark.parametrize(
    ("pp", "tp", "is_chaining"),
    [(1, 1, False), (1, 1, True), (1, 2, True), (2, 2, False), (3, 1, False), (4, 2, False)],
)
def test_preemption_changes_nothing(
    pp: int,
    tp: int,
    checkpoint: Path,
    growing: list[Ask],
    growing_expected: list[Answer],
    *,
    is_chaining: bool,
) -> None:
    # Eight pages that can be handed out, where all five requests together want twenty.
    client = start_client(
        checkpoint,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        num_gpu_blocks_override=9,
        max_model_len=64,
        max_num_batched_tokens=12,
        async_scheduling=is_chaining,
    )
    try:
        answers = run(client, growing)
        for got, wanted in zip(answers, growing_expected, strict=True):
            assert_same(got, wanted, TOLERANCE)
        assert sum(answer.preemptions for answer in answers) > 0
        assert_idle(client)
    finally:
        client.close()


@pytest.fixture(scope="module")
def growing_expected(checkpoint: Path, growing: list[Ask]) -> list[Answer]:
    return run_alone(checkpoint, growing)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (3, 2)])
def test_neighbours_and_their_aborts_change_nothing(
    pp: int, tp: int, checkpoint: Path, asks: list[Ask], expected: list[Answer]
) -> None:
    client = start_client(
        checkpoint,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        max_num_batched_tokens=16,
        max_num_seqs=4,
    )
    doomed = [ask._replace(is_aborted=True) for ask in asks]
    mixed = [ask for pair in zip(doomed, asks, strict=True) for ask in pair]
    try:
        for _ in range(2):
            answers = run(client, mixed)
            for got, wanted in zip(answers[1::2], expected, strict=True):
                assert_same(got, wanted, TOLERANCE)
            assert_idle(client)
    finally:
        client.close()


@pytest.mark.parametrize("partition", [(1, 5), (5, 1), (2, 4), (3, 3), (1, 1, 4), (2, 2, 1, 1)])
def test_any_cut_changes_nothing(
    partition: tuple[int, ...], checkpoint: Path, asks: list[Ask], expected: list[Answer]
) -> None:
    client = start_client(
        checkpoint,
        pipeline_parallel_size=len(partition),
        pp_partition=partition,
        max_num_batched_tokens=20,
    )
    try:
        for got, wanted in zip(run(client, asks), expected, strict=True):
            assert_same(got, wanted, TOLERANCE)
    finally:
        client.close()


@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 1), (3, 4)])
def test_kimi_linear_layouts(
    pp: int, tp: int, linear_checkpoint: Path, asks: list[Ask], linear_expected: list[Answer]
) -> None:
    client = start_client(
        linear_checkpoint,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        max_num_batched_tokens=10,
    )
    try:
        for got, wanted in zip(run(client, asks), linear_expected, strict=True):
            assert_same(got, wanted, TOLERANCE)
        assert_idle(client)
    finally:
        client.close()
