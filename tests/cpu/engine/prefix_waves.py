"""Waves of requests whose prompts begin alike, and how much of each a cache must find.

A wave is submitted at once, when the one before has ended. Waves are made of what requests
before answered alone and uncached, so they hold conversations.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stagecoach.engine.client import EngineClient
from stagecoach.errors import StagecoachError
from stagecoach.request import SamplingParams
from stagecoach.schedule.commit import Progress
from tests.cpu.engine.schedules import BLOCK_SIZE, Answer, Ask, assert_same, run, run_alone

TOLERANCE = 1e-9
TIMEOUT_SECONDS = 60.0


class Found(NamedTuple):
    """Cached tokens of one request, at least and at most."""

    least: int
    most: int
    needs_grid: bool = False  # nothing is sure to be found where no grid has a rung


class Turn(NamedTuple):
    """One request: what it asks, says, and finds in a fresh cache that nothing is evicted from."""

    ask: Ask
    answer: Answer
    found: Found


Waves = tuple[tuple[Turn, ...], ...]


class Running:
    """A request that others are submitted beside."""

    def __init__(self, ask: Ask) -> None:
        self.token_ids: list[int] = []
        self._ask = ask
        self._news = threading.Condition()
        self._is_over = False

    def start(self, client: EngineClient) -> None:
        client.submit(self._ask.prompt_token_ids, self._ask.params, self._hear)

    def wait_for_tokens(self, count: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.token_ids) >= count, TIMEOUT_SECONDS)

    def wait_for_end(self) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self._is_over, TIMEOUT_SECONDS)

    def _hear(self, news: Progress | StagecoachError) -> None:
        # An error is that of the others as well, who raise it.
        with self._news:
            if isinstance(news, Progress):
                self.token_ids.extend(news.token_ids)
                self._is_over = news.finish_reason is not None
            self._news.notify_all()


def tokens(number: int, count: int) -> tuple[int, ...]:
    """Row `number` of plain tokens; no two rows begin alike."""
    return tuple((37 * place + 13 * number + 5) % 500 for place in range(count))


def params(number: int, num_tokens: int, **other: object) -> SamplingParams:
    """Greedy and sampled by turns."""
    settings: dict[str, object] = {
        "temperature": (0.0, 0.8, 1.3)[number % 3],
        "seed": number,
        "max_tokens": num_tokens,
        "ignore_eos": True,
    }
    return SamplingParams(**(settings | other))  # type: ignore[arg-type]


FIRST = tokens(1, 3 * BLOCK_SIZE + 5)
SECOND = tokens(2, 2 * BLOCK_SIZE)


def make_waves(checkpoint: Path) -> Waves:
    """Three waves, for grids of one or two pages or none.

    The last token of a prompt is always computed, and that of an answer never was.
    """
    rung = BLOCK_SIZE * 2
    # Where requests part at a rung, a grid has it; else the first of them asks for it.
    parted = Found(rung, rung, needs_grid=True)
    nothing = Found(0, 0)
    logprobs = {"logprobs": 2}
    wave_0 = _answered(
        checkpoint,
        [
            (Ask(FIRST, params(0, 9, **logprobs)), nothing),
            (Ask(SECOND, params(1, 6)), nothing),
        ],
    )
    first, second = (_conversation(turn) for turn in wave_0)
    wave_1 = _answered(
        checkpoint,
        [
            (Ask(FIRST, params(4, 5, **logprobs)), _exactly(len(FIRST) - 1)),
            (Ask(FIRST[:rung] + tokens(3, 7), params(5, 4)), parted),
            (Ask(FIRST[: rung + 5] + tokens(4, 9), params(6, 3, **logprobs)), parted),
            (Ask(first + tokens(5, 6), params(7, 7)), _exactly(len(first) - 1)),
            (Ask(SECOND, params(8, 3)), _exactly(len(SECOND) - 1)),
            (Ask(second + tokens(6, 1), params(9, 3)), _exactly(len(second) - 1)),
            (Ask(FIRST, params(10, 2, prompt_logprobs=1)), nothing),
            (Ask(FIRST, params(11, 9), cache_salt="tenant"), nothing),
            (Ask(FIRST, params(12, 2, skip_reading_prefix_cache=True)), nothing),
        ],
    )
    third, salted = _conversation(wave_1[3]), _conversation(wave_1[7])
    wave_2 = _answered(
        checkpoint,
        [
            (Ask(FIRST[: rung + 5] + tokens(7, 8), params(13, 4)), _exactly(rung)),
            (Ask(third + tokens(8, 5), params(14, 4, **logprobs)), _exactly(len(third) - 1)),
            (Ask(salted + tokens(9, 2), params(15, 3), cache_salt="tenant"),
             _exactly(len(salted) - 1)),
            (Ask(FIRST[: rung + 8], params(16, 3)), Found(rung, rung + 7)),
            (Ask(FIRST[:5] + tokens(10, 9), params(17, 3)), nothing),
        ],
    )  # fmt: skip
    return wave_0, wave_1, wave_2


def run_waves(
    client: EngineClient, waves: Waves, *, interval: int = 0, is_all_kept: bool = True
) -> list[Answer]:
    """All waves in order: equal to the uncached answers, and what is found is what can be.

    Args:
        interval: of the grid, in tokens.
        is_all_kept: the cache is fresh and nothing is evicted from it.
    """
    answers: list[Answer] = []
    for wave in waves:
        got = run(client, [turn.ask for turn in wave])
        for number, (answer, turn) in enumerate(zip(got, wave, strict=True)):
            assert_same(answer, turn.answer, TOLERANCE)
            cached, found = answer.num_cached_tokens, turn.found
            assert cached < len(turn.ask.prompt_token_ids), f"request {number}: all of it"
            if is_all_kept:
                least = found.least if interval or not found.needs_grid else 0
                assert least <= cached <= found.most, f"request {number}: {cached}, not {found}"
        answers += got
    return answers


def conversations(waves: Waves) -> tuple[tuple[int, ...], ...]:
    """Prompt and answer of every request."""
    return tuple(_conversation(turn) for wave in waves for turn in wave)


def _answered(checkpoint: Path, asks: Sequence[tuple[Ask, Found]]) -> tuple[Turn, ...]:
    answers = run_alone(checkpoint, [ask for ask, _ in asks])
    return tuple(
        Turn(ask, answer, found) for (ask, found), answer in zip(asks, answers, strict=True)
    )


def _conversation(turn: Turn) -> tuple[int, ...]:
    return turn.ask.prompt_token_ids + turn.answer.token_ids


def _exactly(num_tokens: int) -> Found:
    return Found(num_tokens, num_tokens)
