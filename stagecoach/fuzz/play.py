"""Runs a script in this process, turn by turn, and says what is wrong with what came back.

Owns when a request arrives and is aborted, and how an exception becomes a finding. Every run
of a script is the same run.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.messages import (
    Abort,
    EngineStats,
    RequestRefused,
    ResetPrefixCache,
    Submit,
)
from stagecoach.errors import ConfigError
from stagecoach.fuzz import check
from stagecoach.fuzz.check import Finding
from stagecoach.fuzz.drafts import KnowingDrafter, Knowledge, ScatteredPolicy
from stagecoach.fuzz.grammars import Obedience
from stagecoach.fuzz.oracle import Answer, Expected, Oracle, seed_of
from stagecoach.fuzz.script import Ask, Script
from stagecoach.fuzz.turns import TurnEngine
from stagecoach.fuzz.workers import Layouts
from stagecoach.resolve import resolve
from stagecoach.schedule.commit import Progress
from stagecoach.schedule.draft_policy import DraftPolicy

# Turns that every token of a schedule may take before it is said to hang.
_TURNS_PER_TOKEN = 20


@dataclass(slots=True)
class Played:
    """One request of a run."""

    answer: Answer = field(default_factory=Answer)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    arrival: int | None = None  # its turn
    is_over: bool = False
    is_aborted: bool = False

    def absorb(self, news: Progress) -> None:
        answer = self.answer
        self.answer = Answer(
            answer.token_ids + news.token_ids,
            answer.logprobs + news.logprobs,
            answer.prompt_logprobs + news.prompt_logprobs,
            news.finish_reason,
            news.stop_reason,
        )
        self.num_cached_tokens = max(self.num_cached_tokens, news.num_cached_tokens)
        self.num_preemptions = news.preemptions
        self.is_over = news.finish_reason is not None


class Outcome(NamedTuple):
    """How a run ended."""

    requests: list[Played]
    stats: EngineStats | None  # None: it did not end in order
    finding: Finding | None


class Judge:
    """Says of any run what is wrong with it; what it knows stays from one to the next."""

    def __init__(self, layouts: Layouts) -> None:
        self.oracle = Oracle(layouts)
        self._obedience = Obedience()

    def play(
        self,
        script: Script,
        run: Callable[[Script, ResolvedConfig, list[Expected], list[Played]], EngineStats],
    ) -> Outcome:
        """Have `run` fill in the requests of a script, and judge them.

        Raises:
            ConfigError, CapacityError, CheckpointError: it cannot be run.
        """
        config = resolve(script.engine_config())
        expected = self.oracle.expect(script, config)
        requests = [Played() for _ in expected]
        try:
            stats = run(script, config, expected, requests)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever ends an engine is a finding
            return Outcome(requests, None, finding_of(error))
        finding = check.check(script, expected, requests, stats) or self._obedience.check(
            config, expected, [played.answer for played in requests]
        )
        return Outcome(requests, stats, finding)


class Player:
    """Runs scripts; what is loaded and known stays from one to the next."""

    def __init__(self) -> None:
        self._layouts = Layouts()
        self._judge = Judge(self._layouts)
        self.oracle = self._judge.oracle

    def play(self, script: Script) -> Outcome:
        """Run a script to its end or to the first finding.

        Raises:
            ConfigError, CapacityError, CheckpointError: it cannot be run.
        """
        return self._judge.play(script, self._run)

    def _run(
        self,
        script: Script,
        config: ResolvedConfig,
        expected: list[Expected],
        requests: list[Played],
    ) -> EngineStats:
        drafter = None
        if config.speculation is not None and script.draft_accuracy is not None:
            drafter = KnowingDrafter(
                Knowledge(
                    tuple(item.sequence for item in expected),
                    config.num_draft_tokens,
                    script.draft_accuracy,
                )
            )
        engine = TurnEngine(
            config,
            self._layouts,
            drafter,
            ScatteredPolicy if script.has_ragged_windows else DraftPolicy,
        )
        num_tokens = sum(len(item.sequence) for item in expected)
        limit = 100 + _TURNS_PER_TOKEN * num_tokens
        num_turns = turn = 0
        while True:
            is_sending = self._send(script, turn, expected, requests, engine)
            if not is_sending and not engine.has_work:
                if all(played.arrival is not None for played in requests):
                    return engine.stats()
                turn = next_turn(script, turn, requests)
                continue
            for news in engine.turn():
                assert not isinstance(news, RequestRefused), f"refused: {news}"
                played = requests[news.request_id - 1]
                assert not played.is_aborted, f"progress after an abort: {news}"
                played.absorb(news)
            turn += 1
            num_turns += 1
            assert num_turns <= limit, f"hangs: no end after {limit} turns"

    def _send(
        self,
        script: Script,
        turn: int,
        expected: list[Expected],
        requests: list[Played],
        engine: TurnEngine,
    ) -> bool:
        """Whatever happens in this turn; False if nothing does."""
        is_sending = turn in script.resets
        if is_sending:
            engine.send(ResetPrefixCache())
        for index, (ask, played) in enumerate(zip(script.requests, requests, strict=True)):
            if played.arrival is None:
                if not may_arrive(ask, turn, requests):
                    continue
                played.arrival = turn
                engine.send(_submission(index, ask, expected[index]))
                is_sending = True
            elif is_due(ask, played, turn):
                played.is_over = played.is_aborted = True
                engine.send(Abort(request_ids=(index + 1,)))
                is_sending = True
        return is_sending


def may_arrive(ask: Ask, turn: int, requests: list[Played]) -> bool:
    return turn >= ask.turn and (ask.after is None or requests[ask.after].is_over)


def is_due(ask: Ask, played: Played, turn: int) -> bool:
    """Whether it is to be aborted now."""
    if played.is_over or ask.abort_after is None or played.arrival is None:
        return False
    return turn >= played.arrival + ask.abort_after


def next_turn(script: Script, turn: int, requests: list[Played]) -> int:
    """The next turn in which somebody arrives at an engine without work."""
    coming = [
        ask.turn
        for ask, played in zip(script.requests, requests, strict=True)
        if played.arrival is None and (ask.after is None or requests[ask.after].is_over)
    ]
    assert coming and min(coming) > turn, f"requests never arrive: {requests}"
    return min([*coming, *(reset for reset in script.resets if reset > turn)])


def _submission(index: int, ask: Ask, expected: Expected) -> Submit:
    return Submit(
        request_id=index + 1,
        prompt_token_ids=expected.prompt_token_ids,
        params=ask.params,
        seed=seed_of(ask.params),
        cache_salt=ask.salt,
        checkpoint_position=expected.checkpoint_position(ask),
    )


def finding_of(error: Exception) -> Finding:
    """An exception, with the place in this package that raised it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "stagecoach" in Path(frame.filename).parts
    ]
    place = ""
    if frames:
        parts = Path(frames[-1].filename).parts
        start = len(parts) - 1 - parts[::-1].index("stagecoach")
        place = f" ({'/'.join(parts[start:])}, line {frames[-1].lineno})"
    return Finding(type(error).__name__, f"{str(error) or repr(error)}{place}")
