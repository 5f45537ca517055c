"""What is told when a prefix hit and its recomputation differ.

Owns the line in the log and the file it names, with which anybody can make the same hit again.
Knows nothing of how hits are verified.
"""

import dataclasses
import json
import os
import shlex
import tempfile
from collections.abc import Iterator
from typing import Any

from stagecoach.config.engine import EngineConfig, option
from stagecoach.observe.log import get_logger
from stagecoach.schedule.shadow import Verdict

_LOG = get_logger(__name__)

# Files of one engine: what is broken once is broken often.
_MOST_FILES = 20

# The command sets these itself, or they cannot matter.
_NOT_REPEATED = {
    "model",
    "max_num_seqs",
    "verify_cache",
    "log_level",
    "distributed_executor_backend",
    "execute_model_timeout_seconds",
}


class MismatchReporter:
    """Reports mismatches of one engine."""

    def __init__(self, engine: EngineConfig) -> None:
        self._engine = engine
        self._num_files = 0

    def report(self, verdict: Verdict) -> None:
        """One line: of a right hit at debug level; of a wrong one with how to repeat it."""
        if verdict.is_equal:
            _LOG.debug(
                "prefix hit at %d of %d tokens is right: the state differs by %.3g and the logits "
                "by %.3g, tolerance %.3g",
                verdict.position,
                len(verdict.token_ids),
                verdict.state_difference,
                verdict.logit_difference,
                verdict.tolerance,
            )
            return
        _LOG.error(
            "prefix hit at %d of %d tokens of request %d is wrong: the state differs by %.3g and "
            "the logits by %.3g, tolerance %.3g; its checkpoint left the cache. %s",
            verdict.position,
            len(verdict.token_ids),
            verdict.request_id,
            verdict.state_difference,
            verdict.logit_difference,
            verdict.tolerance,
            self._how_to_repeat(verdict),
        )

    def _how_to_repeat(self, verdict: Verdict) -> str:
        if self._num_files == _MOST_FILES:
            return f"{_MOST_FILES} prompts were written before this one, which is not"
        self._num_files += 1
        return f"To repeat: {repeat_command(self._engine, write_prompts(verdict))}"


def write_prompts(verdict: Verdict) -> str:
    """Write the prompts that make the hit, a JSON list a line, for this user's eyes only.

    One that parts from the prompt where the hit ended leaves its state one token before its end,
    which is there. After the prompt it comes again: with one seat it ends after the shadow.
    """
    shared, parting = verdict.token_ids[: verdict.position], verdict.token_ids[verdict.position]
    other = (*shared, 0 if parting else 1)
    descriptor, path = tempfile.mkstemp(prefix="stagecoach-mismatch-", suffix=".jsonl")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        for token_ids in (other, verdict.token_ids, other):
            file.write(json.dumps(token_ids) + "\n")
    return path


def repeat_command(engine: EngineConfig, path: str) -> str:
    """The command line that files the state at the hit's position, hits it, and verifies it.

    It needs no salt, and whoever may read a log should not learn a tenant's.
    """
    words = ["stagecoach", "generate", "--model", engine.model, *_flags(engine)]
    # One request at a time, so that each finds what those before it have left.
    words += ["--max-num-seqs", "1", "--verify-cache", "1", "--max-tokens", "1"]
    return shlex.join([*words, "--prompt-token-ids", f"@{path}"])


def _flags(engine: EngineConfig) -> Iterator[str]:
    """The options that differ from their defaults."""
    for item in dataclasses.fields(engine):
        value = getattr(engine, item.name)
        if item.name in _NOT_REPEATED or value == _default(item):
            continue
        name = option(item.name)
        if isinstance(value, bool):
            yield name if value else name.replace("--", "--no-", 1)
        else:
            yield from (name, _spelt(value))


def _default(item: "dataclasses.Field[Any]") -> object:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _spelt(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {name: part for name, part in dataclasses.asdict(value).items() if part is not None}
    return json.dumps(value) if isinstance(value, dict) else str(value)
