"""The command that the report of a wrong hit names: it makes that hit, right or wrong."""

import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stagecoach.config.engine import EngineConfig
from stagecoach.engine.mismatch_report import repeat_command, write_prompts
from stagecoach.runner.stage_runner import StageRunner, StepOutcome
from stagecoach.schedule.shadow import Verdict
from stagecoach.schedule.step_plan import Save, Segment, StepPlan
from tests.cpu.cli.command_run import FAST, Stagecoach

POSITION = 37


@pytest.fixture
def command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words of the command, behind the program's name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = EngineConfig(model=str(folder), dtype="float64", block_size=8)
    verdict = Verdict(
        request_id=1,
        token_ids=tuple(range(60)),
        position=POSITION,
        state_difference=1.0,
        logit_difference=1.0,
        tolerance=1e-9,
    )
    return shlex.split(repeat_command(engine, write_prompts(verdict)))[1:]


def test_it_makes_the_same_hit(command: list[str], stagecoach: Stagecoach) -> None:
    result = stagecoach(*command, *FAST, "--json")
    assert result.status == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [output["num_cached_tokens"] for output in answer["outputs"][:2]] == [0, POSITION]
    stats = answer["stats"]["prefix_cache"]
    assert stats["num_verified"] == 1 and stats["num_mismatches"] == 0


def test_it_shows_the_fault_again(
    command: list[str], stagecoach: Stagecoach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are filed one token early."""
    run = StageRunner.run

    def early(segment: Segment) -> Segment:
        saves = tuple(Save(save.position - 1, save.slot) for save in segment.saves)
        return msgspec.structs.replace(segment, saves=saves)

    def run_early(self: StageRunner, plan: StepPlan, *masks: Any) -> StepOutcome:
        segments = tuple(map(early, plan.segments))
        return run(self, msgspec.structs.replace(plan, segments=segments), *masks)

    monkeypatch.setattr(StageRunner, "run", run_early)
    result = stagecoach(*command, *FAST, "--json")
    assert f"prefix hit at {POSITION} of 60 tokens" in result.stderr
    assert json.loads(result.stdout)["stats"]["prefix_cache"]["num_mismatches"] == 1


def test_a_file_of_prompts_that_is_none_is_refused(
    stagecoach: Stagecoach, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    for content, words in ((None, "No such file"), ("[1, 2]\nx\n", "must be a JSON list")):
        if content is not None:
            path.write_text(content)
        result = stagecoach("generate", "--model", folder, "--prompt-token-ids", f"@{path}")
        assert result.status == 1 and words in result.stderr, result.stderr
