"""How many schedules it takes to find a planted bug.

`python -m tests.cpu.fuzz.hunt` prints the table of docs/fuzz.md.
"""

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from stagecoach.draft.tiny import mla_draft_config, write_tiny_draft
from stagecoach.fuzz.check import Finding
from stagecoach.fuzz.draw import Given, draw_script
from stagecoach.fuzz.play import Player
from stagecoach.fuzz.script import Script
from stagecoach.model.tiny import kimi_k3_config, write_tiny_model
from stagecoach.resolve import resolve
from tests.cpu.fuzz.conftest import DRAFT_SHAPE, SHAPE
from tests.cpu.fuzz.mutations import MUTATIONS, Mutation, without_checks

SEED = 2
MOST_SCHEDULES = 40
_BY_TOKENS = ("tokens", "logprobs", "ending")


class Found(NamedTuple):
    """The schedule that found a bug."""

    index: int
    script: Script
    finding: Finding


def hunt(
    mutation: Mutation,
    model: str,
    draft: str,
    player: Player,
    *,
    indices: Iterable[int] = range(MOST_SCHEDULES),
    by_tokens_alone: bool = False,
) -> Found | None:
    """The first of the schedules that finds it; None if none does.

    Args:
        by_tokens_alone: without poison, tags and checks of pools; an exception is no finding.
    """
    options = {"tensor_parallel_size": 1, "enable_prefix_caching": True} | dict(mutation.options)
    if mutation.drafts:
        options["speculative_config"] = {
            "model": draft,
            "num_speculative_tokens": 4,
            "confidence_schedule": False,
            "watchdog": False,
        }
    if by_tokens_alone:
        options["debug_poison"] = False
    given = Given(model, options, ((1, 1), (2, 1)), draft, 96, has_vocabulary=mutation.grammars)
    for index in indices:
        script = draw_script(SEED, index, given)
        # Its one-shot results come from an engine without the bug.
        player.oracle.expect(script, resolve(script.engine_config()))
        with pytest.MonkeyPatch.context() as monkeypatch:
            mutation.plant(monkeypatch)
            if by_tokens_alone:
                without_checks(monkeypatch)
            finding = player.play(script).finding
        if finding is not None and (not by_tokens_alone or finding.kind in _BY_TOKENS):
            return Found(index, script, finding)
    return None


def main() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    player = Player()
    wanted = [item for item in MUTATIONS if item.name in sys.argv[1:] or len(sys.argv) == 1]
    with tempfile.TemporaryDirectory() as folder:
        model, draft = Path(folder) / "model", Path(folder) / "draft"
        write_tiny_model(model, kimi_k3_config(SHAPE), seed=21)
        write_tiny_draft(draft, mla_draft_config(DRAFT_SHAPE), seed=22)
        sys.stdout.write("| bug | schedules | found by | by tokens alone |\n")
        sys.stdout.write("| --- | --: | --- | --: |\n")
        for mutation in wanted:
            found = hunt(mutation, str(model), str(draft), player)
            alone = hunt(mutation, str(model), str(draft), player, by_tokens_alone=True)
            sys.stdout.write(
                f"| {mutation.what} | {_shown(found)} | {found.finding.kind if found else '-'} "
                f"| {_shown(alone)} |\n"
            )
            sys.stdout.flush()


def _shown(found: Found | None) -> str:
    return "-" if found is None else str(found.index + 1)


if __name__ == "__main__":
    main()
