"""Many schedules: draws them, runs them, counts, and shrinks what fails.

Owns the order of the work and the counts of a whole run. Prints nothing.
"""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from stagecoach.errors import ConfigError
from stagecoach.fuzz import script as scripts
from stagecoach.fuzz.check import Finding
from stagecoach.fuzz.draw import Given, draw_script
from stagecoach.fuzz.oracle import Oracle
from stagecoach.fuzz.play import Outcome
from stagecoach.fuzz.script import Script
from stagecoach.fuzz.shrink import Shrunk, shrink
from stagecoach.resolve import resolve

# Scripts in a row that what the caller fixed does not allow, until the run is given up.
_MOST_REFUSED = 100


class Totals(msgspec.Struct):
    """What a run came to; its fields are the keys of the report."""

    schedules: int = 0
    requests: int = 0
    steps: int = 0
    hits: int = 0
    preemptions: int = 0
    evictions: int = 0
    mismatches: int = 0  # schedules with a finding

    def add(self, outcome: Outcome) -> None:
        self.schedules += 1
        self.requests += len(outcome.requests)
        self.mismatches += outcome.finding is not None
        stats = outcome.stats
        if stats is None:
            return
        self.steps += stats.num_steps
        self.preemptions += stats.num_preemptions
        if stats.prefix_cache is not None:
            self.hits += stats.prefix_cache.num_hits
            self.evictions += sum(stats.prefix_cache.evictions.values())


class Failure(NamedTuple):
    """A script that failed, and what it was shrunk to."""

    name: str
    script: Script
    finding: Finding
    shrunk: Shrunk
    path: Path  # of the shrunk one


class Runs(Protocol):
    """Plays scripts, in one way or another."""

    oracle: Oracle

    def play(self, script: Script) -> Outcome: ...


class Limits(NamedTuple):
    """When a run ends; None: not by that."""

    seconds: float | None = None
    schedules: int | None = None
    mismatches: int = 10
    shrink_seconds: float = 60.0


class Campaign:
    """A run over the scripts of one seed."""

    def __init__(self, given: Given, seed: int, player: Runs, save_to: Path) -> None:
        self._given = given
        self._seed = seed
        self._player = player
        self._save_to = save_to
        self._kinds: set[str] = set()
        self.totals = Totals()

    def run(
        self,
        limits: Limits,
        on_schedule: Callable[[Totals], None],
        on_failure: Callable[[Failure], None],
    ) -> None:
        """Until a limit is reached, or so much has failed that more would say nothing new.

        A script that clashes with what the caller fixed is passed over and not counted.

        Raises:
            ConfigError: hardly any script is possible, or none in the time; names one clash.
        """
        began = time.monotonic()
        num_refused = 0
        refused: ConfigError | None = None
        for index in itertools.count():
            if self.totals.mismatches >= limits.mismatches:
                return
            if limits.schedules is not None and self.totals.schedules >= limits.schedules:
                return
            if limits.seconds is not None and time.monotonic() - began >= limits.seconds:
                if refused is not None and not self.totals.schedules:
                    raise refused
                return
            script = draw_script(self._seed, index, self._given)
            try:
                outcome = self._player.play(script)
            except ConfigError as error:
                refused = error
                num_refused += 1
                if num_refused == _MOST_REFUSED:
                    raise
                continue
            num_refused = 0
            self.totals.add(outcome)
            on_schedule(self.totals)
            if outcome.finding is not None:
                name = f"fuzz-{self._seed}-{index}"
                on_failure(self._fail(name, script, outcome.finding, limits.shrink_seconds))

    def _fail(self, name: str, script: Script, finding: Finding, shrink_seconds: float) -> Failure:
        """Shrink the first script of each kind of finding; write it down in any case."""
        shrunk = Shrunk(script, finding, 0)
        if finding.kind not in self._kinds:
            self._kinds.add(finding.kind)
            shrunk = shrink(
                script,
                finding,
                lambda candidate: self._player.play(candidate).finding,
                self._answers,
                fixed=frozenset(self._given.options),
                max_seconds=shrink_seconds,
            )
        self._save_to.mkdir(parents=True, exist_ok=True)
        path = self._save_to / f"{name}.json"
        path.write_text(scripts.encode(shrunk.script), encoding="utf-8")
        return Failure(name, script, finding, shrunk, path)

    def _answers(self, script: Script) -> list[tuple[int, ...]]:
        expected = self._player.oracle.expect(script, resolve(script.engine_config()))
        return [item.answer.token_ids for item in expected]
