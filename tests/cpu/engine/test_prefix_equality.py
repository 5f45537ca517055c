"""Prefix caching changes no token: every layout, any depth of a hit, in any company.

Requests are compared with themselves alone and uncached. Every engine runs in float64 with NaN
in all free pages, slots and records, and checks on each worker that a state it reads is the one
that the plan means. Drafts come from a script that knows the answers and reads its context back
from the cache rows, so rows that a hit should have brought along are missed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.config.engine import SpeculativeConfig
from stagecoach.engine.client import EngineClient
from tests.cpu.engine.prefix_waves import (
    FIRST,
    TOLERANCE,
    Running,
    Waves,
    conversations,
    make_waves,
    params,
    run_waves,
    tokens,
)
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
from tests.cpu.engine.scripted_drafter import Script, mostly_right, scatter_lengths, use_script

# Nothing is ever evicted.
ROOMY: dict[str, Any] = {"max_state_checkpoints": 80, "num_gpu_blocks_override": 300}
# Room for three requests and a page more.
TIGHT: dict[str, Any] = {
    "max_num_batched_tokens": 24,
    "max_num_seqs": 3,
    "num_gpu_blocks_override": 17,
    "state_checkpoint_interval": BLOCK_SIZE,
}


@pytest.fixture(scope="module")
def waves(checkpoint: Path) -> Waves:
    return make_waves(checkpoint)


class MakeDrafts(Protocol):
    """Options of an engine that drafts; None for 0 drafts."""

    def __call__(
        self, num_drafts: int, texts: tuple[tuple[int, ...], ...] = ...
    ) -> SpeculativeConfig | None: ...


@pytest.fixture
def drafts(draft_checkpoint: Path, waves: Waves, monkeypatch: pytest.MonkeyPatch) -> MakeDrafts:
    """Three of four drafts are right, where `texts` are said: by default, those of the waves."""

    def speculation(
        num_drafts: int, texts: tuple[tuple[int, ...], ...] = conversations(waves)
    ) -> SpeculativeConfig | None:
        if num_drafts == 0:
            return None
        use_script(monkeypatch, Script(texts, num_drafts, mostly_right))
        return SpeculativeConfig(
            model=str(draft_checkpoint),
            num_speculative_tokens=num_drafts,
            confidence_schedule=False,
            watchdog=False,
        )

    return speculation


@contextmanager
def serving(checkpoint: Path, pp: int, tp: int, **options: Any) -> Iterator[EngineClient]:
    """An engine that is idle at the end and has found nothing wrong by itself.

    A request that hits what is not finite is computed again, so its answer tells nothing.
    """
    client = start_client(checkpoint, pipeline_parallel_size=pp, tensor_parallel_size=tp, **options)
    try:
        yield client
        assert_idle(client)
        stats = client.stats().prefix_cache
        if stats is not None:
            assert stats.evictions["not_finite"] == stats.evictions["quarantine"] == 0
            assert stats.num_mismatches == 0
    finally:
        client.close()


def texts_of(asks: Sequence[Ask], answers: Sequence[Answer]) -> tuple[tuple[int, ...], ...]:
    pairs = zip(asks, answers, strict=True)
    return tuple(ask.prompt_token_ids + answer.token_ids for ask, answer in pairs)


def assert_all_same(got: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other, TOLERANCE)


def cache_stats(client: EngineClient) -> PrefixCacheStats:
    stats = client.stats().prefix_cache
    assert stats is not None
    return stats


# pp, tp, budget, interval, k: each layout with another mix of the rest.
LAYOUTS = [
    (1, 1, 512, BLOCK_SIZE, 0),
    (1, 1, 3, 0, 0),
    (1, 1, 11, BLOCK_SIZE, 7),
    (1, 2, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 3),
    (1, 4, 16, 0, 7),
    (2, 1, BLOCK_SIZE - 1, 0, 1),
    (2, 2, 512, 2 * BLOCK_SIZE, 7),
    (2, 4, 16, BLOCK_SIZE, 0),
    (3, 1, 16, BLOCK_SIZE, 3),
    (3, 2, BLOCK_SIZE + 1, 0, 0),
    (3, 4, 512, BLOCK_SIZE, 3),
    (4, 1, 24, 0, 7),
    (4, 2, 16, 2 * BLOCK_SIZE, 1),
    (4, 4, 24, BLOCK_SIZE, 7),
]


@pytest.mark.parametrize(("pp", "tp", "budget", "interval", "num_drafts"), LAYOUTS)
def test_layout_budget_and_drafts_change_nothing(
    pp: int,
    tp: int,
    budget: int,
    interval: int,
    num_drafts: int,
    checkpoint: Path,
    waves: Waves,
    drafts: MakeDrafts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor what is found, which is all that can be; windows of 8 have all lengths."""
    if num_drafts == 7:
        scatter_lengths(monkeypatch)
    with serving(
        checkpoint,
        pp,
        tp,
        max_num_batched_tokens=budget,
        state_checkpoint_interval=interval,
        speculative_config=drafts(num_drafts),
        **ROOMY,
    ) as client:
        answers = run_waves(client, waves, interval=interval)
        assert_idle(client)
        stats = cache_stats(client)
        assert stats.num_hit_tokens == sum(answer.num_cached_tokens for answer in answers)
        assert stats.num_queries == len(answers)
        assert stats.num_hits == sum(answer.num_cached_tokens > 0 for answer in answers)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_without_a_cache_nothing_is_found(
    num_drafts: int, checkpoint: Path, waves: Waves, drafts: MakeDrafts
) -> None:
    with serving(
        checkpoint,
        2,
        1,
        enable_prefix_caching=False,
        speculative_config=drafts(num_drafts),
    ) as client:
        answers = run_waves(client, waves, is_all_kept=False)
        assert not any(answer.num_cached_tokens for answer in answers)
        assert client.stats().prefix_cache is None


@pytest.fixture(scope="module")
def at_every_depth(checkpoint: Path) -> tuple[list[Ask], list[Ask], list[Answer], list[Answer]]:
    """One prompt under many salts, each with a checkpoint elsewhere, and what parts there."""
    prompt = tokens(20, 3 * BLOCK_SIZE + 2)
    depths = range(1, len(prompt))
    writers = [
        Ask(prompt, params(20, 2), cache_salt=str(depth), checkpoint_position=depth)
        for depth in depths
    ]
    readers = [
        Ask(prompt[:depth] + tokens(21 + depth, 3), params(depth, 3), cache_salt=str(depth))
        for depth in depths
    ]
    [writer] = run_alone(checkpoint, writers[:1])
    return writers, readers, [writer] * len(writers), run_alone(checkpoint, readers)


@pytest.mark.parametrize(("pp", "tp", "budget", "num_drafts"), [(1, 1, 16, 0), (2, 2, 512, 3)])
def test_a_hit_may_be_of_any_depth(
    pp: int,
    tp: int,
    budget: int,
    num_drafts: int,
    checkpoint: Path,
    at_every_depth: tuple[list[Ask], list[Ask], list[Answer], list[Answer]],
    drafts: MakeDrafts,
) -> None:
    """At positions odd and even, at the start of a page, its middle and its end."""
    writers, readers, written, read = at_every_depth
    texts = texts_of(writers + readers, written + read)
    with serving(
        checkpoint,
        pp,
        tp,
        max_num_batched_tokens=budget,
        state_checkpoint_interval=0,
        speculative_config=drafts(num_drafts, texts),
        **ROOMY,
    ) as client:
        for got, wanted in zip(run(client, writers), written, strict=True):
            assert_same(got, wanted, TOLERANCE)
            assert got.num_cached_tokens == 0
        for depth, (got, wanted) in enumerate(zip(run(client, readers), read, strict=True), 1):
            assert_same(got, wanted, TOLERANCE)
            assert got.num_cached_tokens == depth


@pytest.mark.parametrize(("pp", "tp", "num_drafts"), [(1, 1, 3), (3, 2, 0), (2, 1, 7)])
def test_many_hit_while_the_writer_goes_on(
    pp: int, tp: int, num_drafts: int, checkpoint: Path, drafts: MakeDrafts
) -> None:
    """They read what it left in its prompt and on its way, and it never notices."""
    # Its end is a rung: the first one behind it lies a whole page further on.
    writer = Ask(tokens(60, 9), params(60, 80))
    [written] = run_alone(checkpoint, [writer])
    line = writer.prompt_token_ids + written.token_ids
    # Rungs of the decode that are behind it when its 32nd token is there.
    depths = (8, 16, 24, 32, 40, 40, 33, 39)
    readers = [
        Ask(line[:depth] + tokens(61 + number, 2), params(number, 3))
        for number, depth in enumerate(depths)
    ]
    read = run_alone(checkpoint, readers)
    texts = texts_of([writer, *readers], [written, *read])
    running = Running(writer)
    with serving(
        checkpoint,
        pp,
        tp,
        max_num_batched_tokens=64,
        state_checkpoint_interval=BLOCK_SIZE,
        speculative_config=drafts(num_drafts, texts),
        **ROOMY,
    ) as client:
        running.start(client)
        running.wait_for_tokens(32)
        for depth, got, wanted in zip(depths, run(client, readers), read, strict=True):
            assert_same(got, wanted, TOLERANCE)
            assert got.num_cached_tokens == depth // BLOCK_SIZE * BLOCK_SIZE
        running.wait_for_end()
    assert tuple(running.token_ids) == written.token_ids


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (3, 1), (2, 2)])
def test_a_prompt_is_shared_before_its_end_is_computed(pp: int, tp: int, checkpoint: Path) -> None:
    """All are there from the start: what one plan leaves, the next ones read."""
    shared = tokens(70, 5 * BLOCK_SIZE + 3)
    asks = [Ask(shared + tokens(71 + number, 4), params(number, 4)) for number in range(7)]
    expected = run_alone(checkpoint, asks)
    with serving(
        checkpoint,
        pp,
        tp,
        max_num_batched_tokens=20,
        state_checkpoint_interval=BLOCK_SIZE,
        **ROOMY,
    ) as client:
        answers = run(client, asks)
        assert_all_same(answers, expected)
        cached = [answer.num_cached_tokens for answer in answers]
        assert cached[0] == 0 and all(cached[2:]), cached


@pytest.mark.parametrize(("pp", "num_drafts"), [(1, 3), (2, 7), (3, 1)])
def test_acceptance_after_a_hit_is_that_without(
    pp: int, num_drafts: int, checkpoint: Path, waves: Waves, drafts: MakeDrafts
) -> None:
    """Request by request, where no budget cuts windows."""
    counts = []
    for is_cached in (True, False):
        with serving(
            checkpoint,
            pp,
            1,
            enable_prefix_caching=is_cached,
            speculative_config=drafts(num_drafts),
            **(ROOMY if is_cached else {}),
        ) as client:
            answers = run_waves(client, waves, is_all_kept=is_cached)
        assert any(answer.num_cached_tokens for answer in answers) == is_cached
        counts.append([(answer.num_windows, answer.num_accepted_tokens) for answer in answers])
    assert counts[0] == counts[1]
    assert sum(accepted for _, accepted in counts[0]) > 0


@pytest.mark.parametrize(("pp", "tp", "num_drafts"), [(1, 1, 0), (2, 2, 3), (3, 1, 7), (4, 2, 0)])
def test_preemption_resumes_from_what_it_left(
    pp: int, tp: int, num_drafts: int, checkpoint: Path, drafts: MakeDrafts
) -> None:
    growing = [Ask(tokens(80 + number, 5), params(80 + number, 24)) for number in range(5)]
    expected = run_alone(checkpoint, growing)
    texts = texts_of(growing, expected)
    # Fourteen pages that can be handed out, where all five requests together want twenty.
    with serving(
        checkpoint,
        pp,
        tp,
        num_gpu_blocks_override=15,
        max_state_checkpoints=40,
        max_model_len=64,
        max_num_batched_tokens=12,
        state_checkpoint_interval=BLOCK_SIZE,
        speculative_config=drafts(num_drafts, texts),
    ) as client:
        preemptions = 0
        for _ in range(2):
            answers = run(client, growing)
            assert_all_same(answers, expected)
            preemptions += sum(answer.preemptions for answer in answers)
        assert preemptions > 0
        stats = cache_stats(client)
        assert stats.num_resumed_tokens > 0
        assert sum(stats.evictions.values()) > 0


@pytest.mark.parametrize(
    ("pp", "tp", "num_drafts", "num_checkpoints"), [(1, 1, 3, 0), (1, 1, 0, 4), (2, 2, 3, 1)]
)
def test_slots_for_few_checkpoints_change_nothing(
    pp: int,
    tp: int,
    num_drafts: int,
    num_checkpoints: int,
    checkpoint: Path,
    waves: Waves,
    drafts: MakeDrafts,
) -> None:
    """Nor do pages for few requests: what was evicted is computed again."""
    with serving(
        checkpoint,
        pp,
        tp,
        max_state_checkpoints=num_checkpoints,
        speculative_config=drafts(num_drafts),
        **TIGHT,
    ) as client:
        for _ in range(2):
            run_waves(client, waves, is_all_kept=False)
            assert_idle(client)
        assert sum(cache_stats(client).evictions.values()) > 0


@pytest.mark.parametrize(("pp", "tp", "num_drafts"), [(1, 1, 0), (2, 1, 3), (2, 2, 0)])
def test_what_comes_back_from_the_host_changes_nothing(
    pp: int, tp: int, num_drafts: int, checkpoint: Path, waves: Waves, drafts: MakeDrafts
) -> None:
    with serving(
        checkpoint,
        pp,
        tp,
        max_state_checkpoints=1,
        kv_offloading_size=0.01,
        speculative_config=drafts(num_drafts),
        **TIGHT,
    ) as client:
        for _ in range(2):
            run_waves(client, waves, is_all_kept=False)
            assert_idle(client)
        stats = cache_stats(client)
        assert stats.num_stored > 0 and stats.num_loaded > 0
        assert stats.num_host_checkpoints > 0 and stats.host_bytes > 0


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (3, 2)])
def test_neighbours_and_their_aborts_change_nothing(
    pp: int, tp: int, checkpoint: Path, waves: Waves, drafts: MakeDrafts
) -> None:
    """An aborted request files what it has; another may go on from there."""
    with serving(
        checkpoint,
        pp,
        tp,
        max_num_batched_tokens=20,
        max_num_seqs=4,
        state_checkpoint_interval=BLOCK_SIZE,
        speculative_config=drafts(3),
        **ROOMY,
    ) as client:
        for wave in waves:
            doomed = [turn.ask._replace(is_aborted=True) for turn in wave]
            asks = [turn.ask for turn in wave]
            mixed = [item for pair in zip(doomed, asks, strict=True) for item in pair]
            assert_all_same(run(client, mixed)[1::2], [turn.answer for turn in wave])
            assert_idle(client)
        assert cache_stats(client).num_hits > 0


@pytest.mark.parametrize("partition", [(1, 5), (5, 1), (2, 2, 1, 1)])
def test_any_cut_changes_nothing(
    partition: tuple[int, ...], checkpoint: Path, waves: Waves, drafts: MakeDrafts
) -> None:
    with serving(
        checkpoint,
        len(partition),
        1,
        pp_partition=partition,
        max_num_batched_tokens=20,
        state_checkpoint_interval=BLOCK_SIZE,
        speculative_config=drafts(3),
        **ROOMY,
    ) as client:
        run_waves(client, waves, interval=BLOCK_SIZE)


@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (3, 1)])
def test_a_real_draft_changes_nothing(
    pp: int, tp: int, checkpoint: Path, draft_checkpoint: Path, waves: Waves
) -> None:
    """Untrained, so hardly a draft is right; the schedule and the watchdog are on."""
    with serving(
        checkpoint,
        pp,
        tp,
        max_num_batched_tokens=24,
        state_checkpoint_interval=BLOCK_SIZE,
        speculative_config=SpeculativeConfig(model=str(draft_checkpoint), num_speculative_tokens=5),
        **ROOMY,
    ) as client:
        run_waves(client, waves, interval=BLOCK_SIZE)


@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (3, 1)])
def test_kimi_linear(pp: int, tp: int, linear_checkpoint: Path) -> None:
    with serving(
        linear_checkpoint,
        pp,
        tp,
        max_num_batched_tokens=10,
        state_checkpoint_interval=BLOCK_SIZE,
        **ROOMY,
    ) as client:
        run_waves(client, make_waves(linear_checkpoint), interval=BLOCK_SIZE)


def test_a_reset_forgets_all_and_changes_nothing(checkpoint: Path, waves: Waves) -> None:
    """Also while a request runs that reads and writes what is forgotten."""
    again = Ask(FIRST, params(4, 5, logprobs=2))
    with serving(checkpoint, 2, 1, max_num_batched_tokens=24, **ROOMY) as client:
        for _ in range(2):
            run_waves(client, waves)
            assert run(client, [again])[0].num_cached_tokens == len(FIRST) - 1
            running = Running(Ask(FIRST + tokens(90, 30), params(0, 40)))
            running.start(client)
            client.reset_prefix_cache()
            assert run(client, [again])[0].num_cached_tokens == 0
            running.wait_for_end()
            client.reset_prefix_cache()


@pytest.mark.parametrize(("pp", "tp", "num_drafts"), [(1, 1, 3), (2, 2, 0)])
def test_hits_that_are_verified_are_right_and_change_nothing(
    pp: int, tp: int, num_drafts: int, checkpoint: Path, waves: Waves, drafts: MakeDrafts
) -> None:
    with serving(
        checkpoint,
        pp,
        tp,
        max_num_batched_tokens=24,
        verify_cache=1.0,
        speculative_config=drafts(num_drafts),
        **ROOMY,
    ) as client:
        answers = run_waves(client, waves)
        num_hits = sum(answer.num_cached_tokens > 0 for answer in answers)
        stats = cache_stats(client)
        assert 0 < stats.num_verified + stats.num_unverified <= num_hits
        assert stats.num_verified > 0
