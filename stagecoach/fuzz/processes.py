"""Runs a script on an engine of real processes.

Owns the rough meaning of turns there: a turn has passed when some request made progress, so
who arrives where differs from run to run. Drafts are the real draft's: no worker knows answers.
"""

import queue
import time
from collections.abc import Sequence

import msgspec

from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.client import EngineClient
from stagecoach.engine.messages import EngineStats
from stagecoach.errors import StagecoachError
from stagecoach.fuzz.oracle import Expected, seed_of
from stagecoach.fuzz.play import Judge, Outcome, Played, is_due, may_arrive, next_turn
from stagecoach.fuzz.script import Script
from stagecoach.fuzz.workers import Layouts
from stagecoach.schedule.commit import Progress

# Between two pieces of news; a worker that hangs is noticed by the engine itself.
_SILENCE_SECONDS = 120.0
# For verifications that are under way when the last request ends.
_REST_SECONDS = 20.0
_POLL_SECONDS = 0.05


class ProcessPlayer:
    """An engine a script; one-shot results come from this process."""

    def __init__(self) -> None:
        self._judge = Judge(Layouts())
        self.oracle = self._judge.oracle

    def play(self, script: Script) -> Outcome:
        """As Player.play."""
        return self._judge.play(script, _run)


def _run(
    script: Script,
    config: ResolvedConfig,
    expected: Sequence[Expected],
    requests: list[Played],
) -> EngineStats:
    client = EngineClient(config)
    try:
        run = _Run(script, client, expected, requests)
        run.to_the_end()
        return _stats_at_rest(client)
    finally:
        client.close()


def _stats_at_rest(client: EngineClient) -> EngineStats:
    """Counts once nothing is held: hits may still be verified when all requests have ended."""
    deadline = time.monotonic() + _REST_SECONDS
    while True:
        stats = client.stats()
        is_at_rest = (stats.num_free_pages, stats.num_free_slots) == (
            stats.num_pages,
            stats.num_slots,
        )
        if is_at_rest or time.monotonic() > deadline:
            return stats
        time.sleep(_POLL_SECONDS)


class _Run:
    """One script on one engine."""

    def __init__(
        self,
        script: Script,
        client: EngineClient,
        expected: Sequence[Expected],
        requests: list[Played],
    ) -> None:
        self._script = script
        self._client = client
        self._expected = expected
        self._requests = requests
        self._ids: dict[int, int] = {}
        self._resets = sorted(script.resets)
        self._news: queue.SimpleQueue[tuple[int, Progress | StagecoachError]] = queue.SimpleQueue()

    def to_the_end(self) -> None:
        requests, turn = self._requests, 0
        while True:
            self._send(turn)
            if all(played.is_over for played in requests):
                return
            if all(played.is_over or played.arrival is None for played in requests):
                turn = next_turn(self._script, turn, requests)
                continue
            index, news = self._news.get(timeout=_SILENCE_SECONDS)
            if isinstance(news, StagecoachError):
                raise news
            if not requests[index].is_over:
                requests[index].absorb(news)
            turn += 1

    def _send(self, turn: int) -> None:
        while self._resets and self._resets[0] <= turn:
            self._resets.pop(0)
            self._client.reset_prefix_cache()
        for index, (ask, played) in enumerate(
            zip(self._script.requests, self._requests, strict=True)
        ):
            if played.arrival is None and may_arrive(ask, turn, self._requests):
                played.arrival = turn
                self._submit(index)
            elif is_due(ask, played, turn):
                played.is_over = played.is_aborted = True
                self._client.abort([self._ids[index]])

    def _submit(self, index: int) -> None:
        ask, expected = self._script.requests[index], self._expected[index]
        self._ids[index] = self._client.submit(
            expected.prompt_token_ids,
            msgspec.structs.replace(ask.params, seed=seed_of(ask.params)),
            lambda news: self._news.put((index, news)),
            cache_salt=ask.salt,
            checkpoint_position=expected.checkpoint_position(ask),
        )
