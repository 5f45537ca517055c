"""Tokens under a grammar: each obeys, and no schedule, layout or draft changes one of them.

Free requests run between those that are constrained. Every engine runs in float64 with NaN in
all free pages and slots; tables stand for grammars, and fail when a token does not obey.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagecoach.config.engine import SpeculativeConfig
from stagecoach.request import SamplingParams
from tests.cpu.engine.schedules import (
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
)
from tests.cpu.table_constraint import Automaton, Table, obeys, table, use_tables

TOLERANCE = 1e-9
NUM_DRAFTS = 5
VOCAB_SIZE = 512
END = 258  # <|end_of_msg|>
NUM_TABLES = 5

TABLES: list[Table] = [
    Automaton(seed, VOCAB_SIZE, END, end_share=1.0 if seed % 2 else 0.0).table()
    for seed in range(NUM_TABLES)
]


@pytest.fixture(autouse=True)
def _tables(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tables(monkeypatch, TABLES)


def ask(number: int, length: int, table_number: int | None, **params: Any) -> Ask:
    tokens = tuple((29 * place + 11 * number + 3) % 500 for place in range(length))
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": 14, "seed": number}
    if table_number is None:
        defaults["ignore_eos"] = True
    else:
        defaults["structured_outputs"] = table(table_number)
    return Ask(tokens, SamplingParams(**(defaults | params)))


ASKS = [
    ask(0, 1, 0, logprobs=3),
    ask(1, 7, 1, temperature=1.0, logprobs=2, prompt_logprobs=1, logit_bias={END: 1.0}),
    ask(2, 9, None, temperature=1.0, logprobs=1),
    ask(3, 16, 2, temperature=1.0, top_p=0.8, min_p=0.01),
    ask(4, 23, 3, presence_penalty=0.5, repetition_penalty=1.3, logit_bias={END: 3.0}),
    ask(5, 33, 1, temperature=1.3, top_k=4, logit_bias={7: -5.0}, frequency_penalty=0.4),
    ask(6, 24, None),
    ask(7, 15, 4, temperature=1.0, stop_token_ids=tuple(TABLES[4][2])[:2], logprobs=0),
]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Answer]:
    with pytest.MonkeyPatch.context() as patch:
        use_tables(patch, TABLES)
        return run_alone(checkpoint, ASKS)


@pytest.fixture(scope="module")
def answers(expected: list[Answer]) -> tuple[tuple[int, ...], ...]:
    return known(ASKS, expected)


def known(asks: list[Ask], expected: list[Answer]) -> tuple[tuple[int, ...], ...]:
    """What a scripted drafter knows; behind the end of a text it is wrong."""
    pairs = zip(asks, expected, strict=True)
    return tuple(wanted.prompt_token_ids + got.token_ids for wanted, got in pairs)


def speculation(draft_checkpoint: Path, **options: Any) -> SpeculativeConfig:
    defaults: dict[str, Any] = {
        "num_speculative_tokens": NUM_DRAFTS,
        "confidence_schedule": False,
        "watchdog": False,
    }
    return SpeculativeConfig(model=str(draft_checkpoint), **(defaults | options))


def compare(
    checkpoint: Path, asks: list[Ask], expected: list[Answer], **options: Any
) -> list[Answer]:
    client = start_client(checkpoint, **options)
    try:
        got = run(client, asks)
        assert_idle(client)
    finally:
        client.close()
    for one, wanted in zip(got, expected, strict=True):
        assert_same(one, wanted, TOLERANCE)
    return got


def test_every_token_obeys_and_some_texts_end(expected: list[Answer]) -> None:
    ended = 0
    for wanted, got in zip(ASKS, expected, strict=True):
        if wanted.params.structured_outputs is None:
            continue
        assert wanted.params.structured_outputs.regex is not None
        rules = TABLES[int(wanted.params.structured_outputs.regex.split()[1])]
        assert obeys(rules, got.token_ids)
        ended += END in got.token_ids
    assert ended >= 2


def test_logprobs_are_those_of_the_raw_logits(expected: list[Answer]) -> None:
    """The best token of all is listed, though hardly ever allowed."""
    ranks = [entry.rank for entry in expected[0].logprobs]
    assert max(ranks) > 9
    assert any(entry.top_ids[0] not in TABLES[0][0] for entry in expected[0].logprobs)


@pytest.mark.parametrize(("pp", "tp", "budget"), [(1, 1, 5), (2, 1, 5), (1, 2, 512), (2, 2, 9)])
def test_layout_and_chunks_change_nothing(
    pp: int, tp: int, budget: int, checkpoint: Path, expected: list[Answer]
) -> None:
    compare(
        checkpoint,
        ASKS,
        expected,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        max_num_batched_tokens=budget,
    )


@pytest.mark.parametrize(
    ("pp", "tp", "is_ragged"), [(1, 1, False), (2, 1, True), (1, 2, True), (2, 2, False)]
)
def test_drafts_change_nothing(
    pp: int,
    tp: int,
    is_ragged: bool,
    checkpoint: Path,
    draft_checkpoint: Path,
    expected: list[Answer],
    answers: tuple[tuple[int, ...], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Right ones, allowed ones that are wrong, and such that do not obey, at every place."""
    use_script(monkeypatch, Script(answers, NUM_DRAFTS, mostly_right, wrong_token=7))
    if is_ragged:
        scatter_lengths(monkeypatch)
    got = compare(
        checkpoint,
        ASKS,
        expected,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        max_num_batched_tokens=17 if is_ragged else 512,
        speculative_config=speculation(draft_checkpoint),
    )
    assert sum(answer.num_accepted_tokens for answer in got) > 10


@pytest.mark.parametrize("bad_place", [0, 2, NUM_DRAFTS - 1])
def test_a_draft_that_does_not_obey_at_any_place_of_a_window(
    bad_place: int,
    checkpoint: Path,
    draft_checkpoint: Path,
    expected: list[Answer],
    answers: tuple[tuple[int, ...], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outlaw = next(
        token
        for token in range(VOCAB_SIZE)
        if not any(token in allowed for rules in TABLES for allowed in rules.values())
    )
    script = Script(answers, NUM_DRAFTS, lambda _, place: place != bad_place, outlaw)
    use_script(monkeypatch, script)
    got = compare(checkpoint, ASKS, expected, speculative_config=speculation(draft_checkpoint))
    # Behind it nothing is worth verifying, so nothing is.
    for wanted, answer in zip(ASKS, got, strict=True):
        if wanted.params.structured_outputs is not None:
            assert answer.num_accepted_tokens <= answer.num_windows * bad_place
    assert sum(answer.num_accepted_tokens for answer in got) > 0 or bad_place == 0


@pytest.mark.parametrize(
    "is_right", [lambda start, place: True, lambda start, place: (start + place) % 3 != 0]
)
def test_a_text_ends_inside_a_window(
    is_right: Callable[[int, int], bool],
    checkpoint: Path,
    draft_checkpoint: Path,
    expected: list[Answer],
    answers: tuple[tuple[int, ...], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts go on behind the end token, with more ends; none of that counts."""
    use_script(monkeypatch, Script(answers, NUM_DRAFTS, is_right, END))
    got = compare(
        checkpoint,
        ASKS,
        expected,
        pipeline_parallel_size=2,
        speculative_config=speculation(draft_checkpoint),
    )
    assert sum(answer.num_accepted_tokens for answer in got) > 10


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2)])
def test_preemption_in_the_middle_of_a_text_changes_nothing(
    pp: int,
    tp: int,
    checkpoint: Path,
    draft_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    growing = [
        ask(number, 5, 2 * (number % 3) if number % 4 else None, temperature=1.0, max_tokens=24)
        for number in range(5)
    ]
    expected = run_alone(checkpoint, growing)
    use_script(monkeypatch, Script(known(growing, expected), 3, mostly_right))
    # Eight pages that can be handed out, where all five requests together want twenty.
    got = compare(
        checkpoint,
        growing,
        expected,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        num_gpu_blocks_override=9,
        max_model_len=64,
        max_num_batched_tokens=12,
        speculative_config=speculation(draft_checkpoint, num_speculative_tokens=3),
    )
    assert sum(answer.preemptions for answer in got) > 0


def test_hits_that_are_verified_change_nothing(checkpoint: Path, expected: list[Answer]) -> None:
    """A shadow has no grammar; what it compares are logits that no mask has touched."""
    client = start_client(checkpoint, verify_cache=1.0, state_checkpoint_interval=8)
    try:
        for _ in range(2):
            for one, wanted in zip(run(client, ASKS[3:6]), expected[3:6], strict=True):
                assert_same(one, wanted, TOLERANCE)
        cache = client.stats().prefix_cache
        assert cache is not None and cache.num_verified > 0 == cache.num_mismatches
    finally:
        client.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_judged_by_probabilities_every_token_obeys(
    temperature: float, checkpoint: Path, draft_checkpoint: Path, expected: list[Answer]
) -> None:
    asks = [
        ask(number, 6 + number, number % NUM_TABLES, temperature=temperature)
        for number in range(NUM_TABLES)
    ]
    client = start_client(
        checkpoint, speculative_config=speculation(draft_checkpoint, acceptance="rejection")
    )
    try:
        got = run(client, asks)
        assert_idle(client)
    finally:
        client.close()
    for number, answer in enumerate(got):
        assert obeys(TABLES[number], answer.token_ids)
    if temperature == 0.0:
        assert [answer.token_ids for answer in got] == [
            answer.token_ids for answer in run_alone(checkpoint, asks)
        ]
