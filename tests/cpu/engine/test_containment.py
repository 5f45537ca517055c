"""NaN ends the requests it reaches, and nobody else: real engines, layouts and drafts.

The embedding of one token is NaN, so that exactly the prefixes with that token are; or NaN is
written into memory while an engine runs. Engines run in float64 with poisoned free memory.
"""

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stagecoach.config.engine import SpeculativeConfig
from stagecoach.engine.client import EngineClient
from stagecoach.errors import StagecoachError
from stagecoach.kernels.ragged import StepTensors
from stagecoach.model.stage_memory import KdaMemory
from stagecoach.request import FinishReason, SamplingParams
from stagecoach.runner.stage_runner import StageRunner
from stagecoach.runner.step_outcome import StepOutcome
from stagecoach.schedule.commit import Progress
from stagecoach.schedule.step_plan import StepPlan
from tests.cpu.engine.schedules import BLOCK_SIZE, Ask, assert_idle, run_alone, start_client
from tests.cpu.engine.scripted_drafter import Script, ScriptedDrafter, mostly_right

POISON = 333
NUM_SHARED = 2 * BLOCK_SIZE + 3
SHARED = tuple((37 * place + 5) % 300 for place in range(NUM_SHARED))


class Ending(NamedTuple):
    """How one request ended."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: str | None
    num_cached_tokens: int


def play(client: EngineClient, asks: Sequence[Ask], timeout_seconds: float = 60.0) -> list[Ending]:
    """Submit all at once and wait for all; the engine must not end."""
    parts: list[list[Progress]] = [[] for _ in asks]
    failures: list[StagecoachError] = []
    done = threading.Semaphore(0)

    def on_news(index: int, news: Progress | StagecoachError) -> None:
        if isinstance(news, StagecoachError):
            failures.append(news)
            done.release()
            return
        parts[index].append(news)
        if news.finish_reason is not None:
            done.release()

    for index, ask in enumerate(asks):
        client.submit(
            ask.prompt_token_ids, ask.params, lambda news, index=index: on_news(index, news)
        )
    for _ in asks:
        assert done.acquire(timeout=timeout_seconds), "a request hangs"
        assert not failures, failures
    return [
        Ending(
            tuple(token for part in progress for token in part.token_ids),
            progress[-1].finish_reason,
            progress[-1].error,
            max(part.num_cached_tokens for part in progress),
        )
        for progress in parts
    ]


def ask(number: int, prompt: Sequence[int], **params: Any) -> Ask:
    defaults = {"temperature": 0.8, "seed": number, "max_tokens": 9, "ignore_eos": True}
    return Ask(tuple(prompt), SamplingParams(**(defaults | params)))


def without_cache(item: Ask) -> Ask:
    params = msgspec.structs.replace(item.params, skip_reading_prefix_cache=True)
    return item._replace(params=params)


def tail(number: int, length: int) -> tuple[int, ...]:
    return tuple((53 * place + 19 * number + 1) % 300 for place in range(length))


HEALTHY = [
    ask(0, (*SHARED, *tail(0, 6)), temperature=0.0, logprobs=2),
    ask(1, (*SHARED, *tail(1, 9)), top_k=30, top_p=0.9),
    ask(2, tail(2, BLOCK_SIZE), repetition_penalty=1.2, prompt_logprobs=1),
    ask(3, (*SHARED, *tail(3, 3)), min_p=0.01, presence_penalty=0.3),
]
POISONED = [
    ask(4, (*SHARED, *tail(4, 4), POISON, *tail(5, 5)), logprobs=1),
    ask(5, (*SHARED[:-2], POISON), repetition_penalty=1.2, prompt_logprobs=2),
    ask(6, (POISON, *tail(6, 20)), temperature=0.0),
]
# Its output is the token, so that it is healthy at first and has drafts.
TURNS_BAD = ask(7, (*SHARED, *tail(7, 5)), logit_bias={POISON: 100.0}, min_tokens=9)


class PoisonDrafter(ScriptedDrafter):
    """Drafts the poisoned token where it is wrong; what it is told may hold NaN."""

    def write_context(self, taps_TNH: Tensor, step: StepTensors, draft_rows_YRD: Tensor) -> None:
        super().write_context(torch.zeros_like(taps_TNH), step, draft_rows_YRD)

    def _answer(self, start: int, prefix: tuple[int, ...]) -> list[int]:
        try:
            return super()._answer(start, prefix)
        except AssertionError:
            return [POISON] * self._script.num_drafts


@pytest.fixture(scope="module")
def poisoned_checkpoint(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(checkpoint, folder)
    num_poisoned = 0
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("embed_tokens.weight"):
                tensor[POISON] = torch.nan
                num_poisoned += 1
        save_file(tensors, path)
    assert num_poisoned == 1
    yield folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    answers = [answer.token_ids for answer in run_alone(checkpoint, HEALTHY)]
    assert all(POISON not in answer for answer in answers)
    return answers


def use_poison_drafts(
    monkeypatch: pytest.MonkeyPatch, expected: list[tuple[int, ...]], num_drafts: int
) -> None:
    answers = tuple(
        item.prompt_token_ids + answer for item, answer in zip(HEALTHY, expected, strict=True)
    )
    script = Script(answers, num_drafts, mostly_right, wrong_token=POISON)
    monkeypatch.setattr(
        "stagecoach.runner.stage_runner.load_drafter", lambda *_, **__: PoisonDrafter(script)
    )


@contextmanager
def engine(checkpoint: Path, **options: Any) -> Iterator[EngineClient]:
    client = start_client(checkpoint, **{"max_num_seqs": 8, **options})
    try:
        yield client
        assert_idle(client)
    finally:
        client.close()


def speculation(draft_checkpoint: Path, num_drafts: int) -> dict[str, Any]:
    if not num_drafts:
        return {}
    return {
        "speculative_config": SpeculativeConfig(
            model=str(draft_checkpoint),
            num_speculative_tokens=num_drafts,
            confidence_schedule=False,
            watchdog=False,
        )
    }


def assert_contained(endings: Sequence[Ending]) -> None:
    for ending in endings:
        assert ending.finish_reason is FinishReason.ERROR, ending
        assert ending.error is not None and ending.error.startswith("NonFiniteError"), ending


def assert_healthy(endings: Sequence[Ending], expected: Sequence[tuple[int, ...]]) -> None:
    for ending, token_ids in zip(endings, expected, strict=True):
        assert ending.finish_reason is FinishReason.LENGTH and ending.error is None, ending
        assert ending.token_ids == token_ids


@pytest.mark.parametrize(
    ("pp", "tp", "num_drafts", "budget"),
    [(1, 1, 0, 512), (2, 1, 7, 11), (1, 2, 3, 512), (3, 1, 0, 11), (2, 2, 3, 64), (4, 1, 1, 512)],
)
def test_a_poisoned_token_ends_only_the_requests_that_have_it(
    pp: int,
    tp: int,
    num_drafts: int,
    budget: int,
    poisoned_checkpoint: Path,
    draft_checkpoint: Path,
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one batch with the others, and again when the cache could know its prefix."""
    use_poison_drafts(monkeypatch, expected, num_drafts)
    options = speculation(draft_checkpoint, num_drafts)
    with engine(
        poisoned_checkpoint,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        max_num_batched_tokens=budget,
        state_checkpoint_interval=BLOCK_SIZE,
        **options,
    ) as client:
        for _ in range(2):
            mixed = [POISONED[0], *HEALTHY[:2], POISONED[1], TURNS_BAD, *HEALTHY[2:], POISONED[2]]
            endings = play(client, mixed)
            assert_healthy([*endings[1:3], *endings[5:7]], expected)
            bad = [endings[0], endings[3], endings[4], endings[7]]
            assert_contained(bad)
            assert [ending.token_ids for ending in bad] == [(), (), (POISON,), ()]
            assert_idle(client)
        # Nothing behind the token can be found again, all before it is right.
        for item in POISONED:
            [ending] = play(client, [item])
            assert_contained([ending])
            assert ending.num_cached_tokens <= item.prompt_token_ids.index(POISON)
        assert_healthy([play(client, [item])[0] for item in HEALTHY], expected)
        assert_idle(client)


def corrupt(
    monkeypatch: pytest.MonkeyPatch, pick: Callable[[StepPlan], int | None], stage: int
) -> list[int]:
    """Write NaN into the state slot that `pick` names, right before a stage runs the plan.

    Returns:
        The slots that were spoilt from here on.
    """
    spoilt: list[int] = []
    run = StageRunner.run

    def spoil_and_run(self: StageRunner, plan: StepPlan, *masks: Any) -> StepOutcome:
        slot = pick(plan) if self._stage.index == stage else None
        if slot is not None and not spoilt:
            spoilt.append(slot)
            assert self._memory is not None
            layers = self._memory.stage_memory.layers.values()
            states = [layer for layer in layers if isinstance(layer, KdaMemory)]
            assert states, f"no state to spoil on stage {stage}"
            for layer in states:
                layer.recurrent_SHVK[slot] = torch.nan
        return run(self, plan, *masks)

    monkeypatch.setattr(StageRunner, "run", spoil_and_run)
    return spoilt


@pytest.mark.parametrize(
    ("pp", "stage", "num_drafts", "budget"),
    [(1, 0, 0, 512), (2, 0, 0, 9), (3, 1, 7, 512)],
)
def test_nan_in_a_live_slot_ends_its_request(
    pp: int,
    stage: int,
    num_drafts: int,
    budget: int,
    checkpoint: Path,
    draft_checkpoint: Path,
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a window or between two chunks; the same request comes through afterwards."""
    use_poison_drafts(monkeypatch, expected, num_drafts)

    def pick(plan: StepPlan) -> int | None:
        slots = [
            segment.read_slot
            for segment in plan.segments
            if segment.read_slot == segment.write_slot and segment.start > 0
        ]
        # In a batch of several where the budget allows one.
        return slots[0] if len(slots) > (budget > 100) else None

    spoilt = corrupt(monkeypatch, pick, stage)
    with engine(
        checkpoint,
        pipeline_parallel_size=pp,
        max_num_batched_tokens=budget,
        **speculation(draft_checkpoint, num_drafts),
    ) as client:
        # What reads from the cache would start over instead.
        endings = play(client, [without_cache(item) for item in HEALTHY])
        assert len(spoilt) == 1
        bad = [index for index, ending in enumerate(endings) if ending.error is not None]
        assert len(bad) == 1
        assert_contained([endings[bad[0]]])
        cut = endings[bad[0]].token_ids
        assert cut == expected[bad[0]][: len(cut)] and len(cut) < len(expected[bad[0]])
        others = [index for index in range(len(HEALTHY)) if index not in bad]
        assert_healthy([endings[index] for index in others], [expected[index] for index in others])
        assert_idle(client)
        assert_healthy(play(client, HEALTHY), expected)


def test_nan_in_a_checkpoint_ends_nobody_and_is_never_read_again(
    checkpoint: Path, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader starts over without the cache, which shows what was at fault."""

    def pick(plan: StepPlan) -> int | None:
        slots = [
            segment.read_slot
            for segment in plan.segments
            if segment.start > 0 and segment.read_slot != segment.write_slot
        ]
        return slots[0] if slots else None

    spoilt = corrupt(monkeypatch, pick, stage=0)
    with engine(checkpoint) as client:
        assert_healthy(play(client, HEALTHY[:1]), expected[:1])
        [reader] = play(client, HEALTHY[:1])
        assert len(spoilt) == 1 and reader.num_cached_tokens > 0
        assert_healthy([reader], expected[:1])
        assert_idle(client)
        stats = client.stats().prefix_cache
        assert stats is not None and stats.evictions["quarantine"] > 0
        for _ in range(2):
            assert_healthy(play(client, HEALTHY[:1]), expected[:1])
        assert client.stats().num_preemptions == 1
