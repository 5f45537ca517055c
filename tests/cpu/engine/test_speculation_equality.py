"""Speculation changes no token: every layout, window length and rate of acceptance.

The drafts come from a script that knows the answers, so that windows are accepted in full, in
part and not at all, as the test wants. Every engine runs in float64 with NaN in all free
pages, slots and records. Each layout runs with prompts in one chunk and in several.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagecoach.config.engine import SpeculativeConfig
from stagecoach.engine.client import EngineClient
from stagecoach.request import SamplingParams
from stagecoach.schedule.speculation_stats import SpeculationStats
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
from tests.cpu.engine.scripted_drafter import (
    Script,
    mostly_right,
    scatter_lengths,
    use_script,
    verify_nothing,
)

TOLERANCE = 1e-9
LAYOUTS = [(pp, tp) for pp in (1, 2, 3, 4) for tp in (1, 2, 4)]
MOST_DRAFTS = 7
SHARED: dict[str, Any] = {
    "temperature": 0.0,
    "max_tokens": 16,
    "ignore_eos": True,
}


def ask(number: int, length: int, **params: Any) -> Ask:
    tokens = tuple((29 * place + 11 * number + 3) % 500 for place in range(length))
    return Ask(tokens, SamplingParams(**(SHARED | {"seed": number} | params)))


@pytest.fixture(scope="module")
def drafted_asks() -> list[Ask]:
    """Prompts of 1 to 3 pages and around k + 1, with every parameter that edits a choice."""
    return [
        ask(0, 1, logprobs=3),
        ask(1, MOST_DRAFTS, temperature=0.7, logprobs=2, prompt_logprobs=2),
        ask(2, MOST_DRAFTS + 1, temperature=1.3, top_k=40, top_p=0.9),
        ask(3, MOST_DRAFTS + 2, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5),
        ask(4, 2 * BLOCK_SIZE - 1, temperature=1.3, min_p=0.02, frequency_penalty=0.4, logprobs=0),
        ask(5, 2 * BLOCK_SIZE, logit_bias={5: 4.0, 9: -3.0}, max_tokens=2),
        ask(6, 3 * BLOCK_SIZE, temperature=0.9, max_tokens=1),
        ask(7, 3 * BLOCK_SIZE - 1, temperature=0.9, min_tokens=9, ignore_eos=False, logprobs=1),
    ]


@pytest.fixture(scope="module")
def drafted_expected(checkpoint: Path, drafted_asks: list[Ask]) -> list[Answer]:
    return run_alone(checkpoint, drafted_asks)


@pytest.fixture(scope="module")
def answers(drafted_asks: list[Ask], drafted_expected: list[Answer]) -> tuple[tuple[int, ...], ...]:
    pairs = zip(drafted_asks, drafted_expected, strict=True)
    return tuple(wanted.prompt_token_ids + got.token_ids for wanted, got in pairs)


def speculation(draft_checkpoint: Path, num_drafts: int) -> SpeculativeConfig:
    """Fixed lengths, so that counts of acceptance are reproducible."""
    return SpeculativeConfig(
        model=str(draft_checkpoint),
        num_speculative_tokens=num_drafts,
        confidence_schedule=False,
        watchdog=False,
    )


def run_and_compare(
    client: EngineClient, asks: list[Ask], expected: list[Answer]
) -> SpeculationStats:
    try:
        for got, wanted in zip(run(client, asks), expected, strict=True):
            assert_same(got, wanted, TOLERANCE)
        assert_idle(client)
        stats = client.stats().speculation
        assert stats is not None
        return stats
    finally:
        client.close()


@pytest.fixture(scope="module")
def counts() -> dict[int, SpeculationStats]:
    """What the first layout counted, by the most drafts of a window."""
    return {}


@pytest.mark.parametrize(("pp", "tp"), LAYOUTS)
@pytest.mark.parametrize("num_drafts", [1, 3, MOST_DRAFTS])
def test_layout_and_draft_length_change_nothing(
    pp: int,
    tp: int,
    num_drafts: int,
    checkpoint: Path,
    draft_checkpoint: Path,
    drafted_asks: list[Ask],
    drafted_expected: list[Answer],
    answers: tuple[tuple[int, ...], ...],
    counts: dict[int, SpeculationStats],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does the layout change what is counted, where no budget cuts windows."""
    use_script(monkeypatch, Script(answers, num_drafts, mostly_right))
    client = start_client(
        checkpoint,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        max_num_batched_tokens=512,
        speculative_config=speculation(draft_checkpoint, num_drafts),
    )
    stats = run_and_compare(client, drafted_asks, drafted_expected)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats == counts.setdefault(num_drafts, stats)


@pytest.mark.parametrize(("pp", "tp"), LAYOUTS)
def test_ragged_windows_change_nothing(
    pp: int,
    tp: int,
    checkpoint: Path,
    draft_checkpoint: Path,
    drafted_asks: list[Ask],
    drafted_expected: list[Answer],
    answers: tuple[tuple[int, ...], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside chunks of prompts, under a budget that holds one whole window and little more."""
    use_script(monkeypatch, Script(answers, MOST_DRAFTS, mostly_right))
    lengths = scatter_lengths(monkeypatch)
    client = start_client(
        checkpoint,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        max_num_batched_tokens=11,
        speculative_config=speculation(draft_checkpoint, MOST_DRAFTS),
    )
    run_and_compare(client, drafted_asks, drafted_expected)
    assert len(set(lengths)) > 4


@pytest.mark.parametrize(("pp", "tp"), [(1, 4), (2, 1), (3, 2), (4, 1)])
def test_drafts_that_nobody_verifies_change_nothing(
    pp: int,
    tp: int,
    checkpoint: Path,
    draft_checkpoint: Path,
    drafted_asks: list[Ask],
    drafted_expected: list[Answer],
    answers: tuple[tuple[int, ...], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_script(monkeypatch, Script(answers, MOST_DRAFTS, mostly_right))
    verify_nothing(monkeypatch)
    client = start_client(
        checkpoint,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        max_num_batched_tokens=16,
        speculative_config=speculation(draft_checkpoint, MOST_DRAFTS),
    )
    stats = run_and_compare(client, drafted_asks, drafted_expected)
    assert stats.num_draft_tokens == 0 < stats.num_proposed_tokens


@pytest.mark.parametrize("is_right", [lambda start, place: True, lambda start, place: False])
def test_acceptance_changes_nothing_but_the_number_of_steps(
    is_right: Callable[[int, int], bool],
    checkpoint: Path,
    draft_checkpoint: Path,
    drafted_asks: list[Ask],
    drafted_expected: list[Answer],
    answers: tuple[tuple[int, ...], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong_token = 501  # in no answer
    assert all(wrong_token not in answer for answer in answers)
    use_script(monkeypatch, Script(answers, MOST_DRAFTS, is_right, wrong_token))
    client = start_client(
        checkpoint,
        pipeline_parallel_size=2,
        speculative_config=speculation(draft_checkpoint, MOST_DRAFTS),
    )
    stats = run_and_compare(client, drafted_asks, drafted_expected)
    if is_right(0, 0):
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    else:
        assert stats.num_accepted_tokens == 0 < stats.num_draft_tokens


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_preemption_drops_drafts_and_nothing_else(
    pp: int,
    tp: int,
    checkpoint: Path,
    draft_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    growing = [ask(number, 5, temperature=0.9, max_tokens=24) for number in range(5)]
    expected = run_alone(checkpoint, growing)
    pairs = zip(growing, expected, strict=True)
    script = Script(
        tuple(wanted.prompt_token_ids + got.token_ids for wanted, got in pairs), 3, mostly_right
    )
    use_script(monkeypatch, script)
    # Eight pages that can be handed out, where all five requests together want twenty.
    client = start_client(
        checkpoint,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        num_gpu_blocks_override=9,
        max_model_len=64,
        max_num_batched_tokens=12,
        speculative_config=speculation(draft_checkpoint, 3),
    )
    try:
        answers = run(client, growing)
        for got, wanted in zip(answers, expected, strict=True):
            assert_same(got, wanted, TOLERANCE)
        assert sum(answer.preemptions for answer in answers) > 0
        assert_idle(client)
    finally:
        client.close()


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (3, 2)])
def test_neighbours_and_their_aborts_change_nothing(
    pp: int,
    tp: int,
    checkpoint: Path,
    draft_checkpoint: Path,
    drafted_asks: list[Ask],
    drafted_expected: list[Answer],
    answers: tuple[tuple[int, ...], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_script(monkeypatch, Script(answers, MOST_DRAFTS, mostly_right))
    scatter_lengths(monkeypatch)
    client = start_client(
        checkpoint,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        max_num_batched_tokens=20,
        max_num_seqs=4,
        speculative_config=speculation(draft_checkpoint, MOST_DRAFTS),
    )
    doomed = [wanted._replace(is_aborted=True) for wanted in drafted_asks]
    mixed = [item for pair in zip(doomed, drafted_asks, strict=True) for item in pair]
    try:
        for _ in range(2):
            got = run(client, mixed)[1::2]
            for one, wanted in zip(got, drafted_expected, strict=True):
                assert_same(one, wanted, TOLERANCE)
            assert_idle(client)
    finally:
        client.close()


@pytest.mark.parametrize("partition", [(1, 5), (5, 1), (2, 2, 1, 1)])
def test_any_cut_changes_nothing(
    partition: tuple[int, ...],
    checkpoint: Path,
    draft_checkpoint: Path,
    drafted_asks: list[Ask],
    drafted_expected: list[Answer],
    answers: tuple[tuple[int, ...], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_script(monkeypatch, Script(answers, 3, mostly_right))
    client = start_client(
        checkpoint,
        pipeline_parallel_size=len(partition),
        pp_partition=partition,
        max_num_batched_tokens=20,
        speculative_config=speculation(draft_checkpoint, 3),
    )
    run_and_compare(client, drafted_asks, drafted_expected)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2), (4, 1)])
def test_a_real_draft_changes_nothing(
    pp: int,
    tp: int,
    checkpoint: Path,
    draft_checkpoint: Path,
    drafted_asks: list[Ask],
    drafted_expected: list[Answer],
) -> None:
    """Untrained, so hardly a draft is right; the schedule and the watchdog are on."""
    client = start_client(
        checkpoint,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        max_num_batched_tokens=24,
        speculative_config=SpeculativeConfig(model=str(draft_checkpoint), num_speculative_tokens=5),
    )
    run_and_compare(client, drafted_asks, drafted_expected)


@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (3, 1)])
def test_kimi_linear(
    pp: int,
    tp: int,
    linear_checkpoint: Path,
    draft_checkpoint: Path,
    drafted_asks: list[Ask],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = run_alone(linear_checkpoint, drafted_asks)
    pairs = zip(drafted_asks, expected, strict=True)
    answers = tuple(wanted.prompt_token_ids + got.token_ids for wanted, got in pairs)
    use_script(monkeypatch, Script(answers, MOST_DRAFTS, mostly_right))
    client = start_client(
        linear_checkpoint,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        max_num_batched_tokens=32,
        speculative_config=speculation(draft_checkpoint, MOST_DRAFTS),
    )
    run_and_compare(client, drafted_asks, expected)
