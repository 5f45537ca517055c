"""`--verify-cache` on real engines: right hits pass in every layout and type, wrong ones do not."""

import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.config.engine import SpeculativeConfig
from stagecoach.engine.client import EngineClient
from stagecoach.model.stage_memory import KdaMemory, MlaMemory
from stagecoach.request import SamplingParams
from stagecoach.runner.stage_runner import StageRunner
from stagecoach.runner.step_outcome import StepOutcome
from stagecoach.schedule.step_plan import Segment, StepPlan
from tests.cpu.engine.schedules import (
    BLOCK_SIZE,
    Answer,
    Ask,
    assert_idle,
    run,
    run_alone,
    start_client,
)

SHARED = tuple((41 * place + 9) % 500 for place in range(4 * BLOCK_SIZE + 5))


def ask(number: int, num_shared: int, num_own: int, **params: Any) -> Ask:
    own = tuple((23 * place + 57 * number + 2) % 500 for place in range(num_own))
    defaults = {"temperature": 0.7, "seed": number, "max_tokens": 6, "ignore_eos": True}
    return Ask((*SHARED[:num_shared], *own), SamplingParams(**(defaults | params)))


ASKS = [
    ask(0, len(SHARED), 4, logprobs=2),
    ask(1, len(SHARED), 1, temperature=0.0),
    ask(2, 3 * BLOCK_SIZE, 12, repetition_penalty=1.3),
    ask(3, 2 * BLOCK_SIZE + 3, 9, top_k=20),
]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Answer]:
    return run_alone(checkpoint, ASKS)


@contextmanager
def engine(checkpoint: Path, **options: Any) -> Iterator[EngineClient]:
    defaults = {"verify_cache": 1.0, "state_checkpoint_interval": BLOCK_SIZE}
    client = start_client(checkpoint, **{**defaults, **options})
    try:
        yield client
    finally:
        client.close()


def wait_for_verdicts(client: EngineClient) -> PrefixCacheStats:
    """Shadows may be at work when the last request has ended."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        stats = client.stats().prefix_cache
        assert stats is not None
        if stats.num_verified + stats.num_mismatches + stats.num_unverified == stats.num_hits:
            assert_idle(client)
            return stats
        time.sleep(0.01)
    raise AssertionError(f"verifications hang: {stats}")


def speculation(draft_checkpoint: Path) -> SpeculativeConfig:
    return SpeculativeConfig(
        model=str(draft_checkpoint),
        num_speculative_tokens=3,
        confidence_schedule=False,
        watchdog=False,
    )


def tokens(answers: list[Answer]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize(("pp", "tp", "budget"), [(1, 1, 512), (2, 1, 13), (1, 2, 64), (3, 2, 512)])
def test_right_hits_are_verified_and_disturb_nobody(
    pp: int,
    tp: int,
    budget: int,
    has_drafts: bool,
    checkpoint: Path,
    draft_checkpoint: Path,
    expected: list[Answer],
) -> None:
    with engine(
        checkpoint,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        speculative_config=speculation(draft_checkpoint) if has_drafts else None,
    ) as client:
        for _ in range(3):
            assert tokens(run(client, ASKS)) == tokens(expected)
            stats = wait_for_verdicts(client)
        totals = client.stats()
    assert stats.num_hits >= 2 * len(ASKS)
    assert stats.num_verified == stats.num_hits
    assert totals.num_prompt_tokens == 3 * sum(len(item.prompt_token_ids) for item in ASKS)
    assert totals.num_generated_tokens == 3 * sum(item.params.max_tokens or 0 for item in ASKS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_hits_are_verified_in_every_type(dtype: str, checkpoint: Path) -> None:
    with engine(checkpoint, dtype=dtype, max_num_batched_tokens=24) as client:
        for item in (*ASKS, *ASKS):
            run(client, [item])
        stats = wait_for_verdicts(client)
    assert stats.num_hits >= len(ASKS) and stats.num_verified == stats.num_hits


@pytest.mark.parametrize("pp", [1, 2])
def test_hits_on_the_host_tier_are_verified(
    pp: int, checkpoint: Path, expected: list[Answer]
) -> None:
    """The state comes back for its reader and once more to be compared."""
    others = [ask(number, 0, 40) for number in range(10, 15)]
    with engine(
        checkpoint,
        pipeline_parallel_size=pp,
        num_gpu_blocks_override=1 + 17,
        max_num_seqs=2,
        max_state_checkpoints=2,
        kv_offloading_size=0.005,
        state_checkpoint_interval=0,
    ) as client:
        for _ in range(2):
            for item, answer in zip(ASKS, expected, strict=True):
                assert tokens(run(client, [item])) == [answer.token_ids]
                wait_for_verdicts(client)
            for item in others:
                run(client, [item])
        stats = wait_for_verdicts(client)
    assert stats.num_loaded > 0 and stats.num_mismatches == 0
    assert stats.num_verified > 0


def test_without_room_a_shadow_is_given_up_and_nobody_waits(
    checkpoint: Path, expected: list[Answer]
) -> None:
    """Pages for one request and a little, two seats, one checkpoint."""
    with engine(
        checkpoint,
        num_gpu_blocks_override=1 + 8,
        max_model_len=8 * BLOCK_SIZE,
        max_num_seqs=2,
        max_state_checkpoints=1,
    ) as client:
        for _ in range(3):
            for item, answer in zip(ASKS, expected, strict=True):
                assert tokens(run(client, [item])) == [answer.token_ids]
        assert tokens(run(client, ASKS)) == tokens(expected)
        stats = wait_for_verdicts(client)
    assert stats.num_mismatches == 0 and stats.num_unverified > 0


def spoil_first_hit(
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[StageRunner, Segment], None],
    is_there: Callable[[StageRunner], bool],
) -> None:
    """Change memory right before the first segment that reads a checkpoint."""
    first_steps: list[int] = []
    original = StageRunner.run

    def spoil_and_run(self: StageRunner, plan: StepPlan, *masks: Any) -> StepOutcome:
        for segment in plan.segments:
            is_hit = segment.start > 0 and segment.read_slot != segment.write_slot
            if is_hit and is_there(self) and first_steps in ([], [plan.step]):
                first_steps[:] = [plan.step]
                spoil(self, segment)
                break
        return original(self, plan, *masks)

    monkeypatch.setattr(StageRunner, "run", spoil_and_run)


def spoil_state(runner: StageRunner, segment: Segment) -> None:
    """One number of one state of one layer."""
    assert runner._memory is not None
    layers = runner._memory.stage_memory.layers.values()
    layer = next(layer for layer in layers if isinstance(layer, KdaMemory))
    layer.recurrent_SHVK[segment.read_slot, 0, 0, 0] += 0.01


def spoil_pages(runner: StageRunner, segment: Segment) -> None:
    """The first row of the first page, which the hit shares."""
    assert runner._memory is not None
    layers = runner._memory.stage_memory.layers.values()
    layer = next(layer for layer in layers if isinstance(layer, MlaMemory))
    layer.cache_RD[segment.page_ids[0] * BLOCK_SIZE] += 0.5


@pytest.mark.parametrize(
    ("spoil", "pp", "tp", "worker"),
    [
        (spoil_state, 1, 1, (0, 0)),
        (spoil_state, 3, 2, (1, 1)),
        (spoil_state, 2, 2, (0, 0)),
        (spoil_pages, 1, 1, (0, 0)),
        (spoil_pages, 3, 1, (1, 0)),
    ],
)
def test_a_wrong_hit_is_found_told_and_never_matched_again(
    spoil: Callable[[StageRunner, Segment], None],
    pp: int,
    tp: int,
    worker: tuple[int, int],
    checkpoint: Path,
    expected: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with engine(
        checkpoint,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        state_checkpoint_interval=0,
    ) as client:
        assert tokens(run(client, ASKS[:1])) == tokens(expected[:1])
        spoil_first_hit(
            monkeypatch,
            spoil,
            lambda runner: (runner._stage.index, runner._tensor_parallel.rank) == worker,
        )
        [wrong] = run(client, ASKS[:1])
        assert wrong.num_cached_tokens > 0
        stats = wait_for_verdicts(client)
        assert (stats.num_hits, stats.num_mismatches, stats.num_verified) == (1, 1, 0)
        [again] = run(client, ASKS[:1])
        assert again.token_ids == expected[0].token_ids and again.num_cached_tokens == 0
        [hit] = run(client, ASKS[:1])
        assert hit.token_ids == expected[0].token_ids and hit.num_cached_tokens > 0
        stats = wait_for_verdicts(client)
        assert (stats.num_hits, stats.num_mismatches, stats.num_verified) == (2, 1, 1)
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    text = record.getMessage()
    assert f"hit at {wrong.num_cached_tokens} of {len(ASKS[0].prompt_token_ids)} tokens" in text
    assert Path(shlex.split(text)[-1].removeprefix("@")).parent == tmp_path
