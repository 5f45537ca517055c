"""The report of a wrong prefix hit lets anybody make the same hit again."""

import json
import shlex
import tempfile
from pathlib import Path

import pytest

from stagecoach.config.engine import EngineConfig, SpeculativeConfig
from stagecoach.engine.mismatch_report import MismatchReporter, repeat_command
from stagecoach.schedule.shadow import Verdict

VERDICT = Verdict(
    request_id=7,
    token_ids=(5, 6, 7, 8, 9, 10),
    position=3,
    state_difference=0.25,
    logit_difference=float("inf"),
    tolerance=1e-3,
)


def test_the_command_repeats_the_options_that_matter() -> None:
    engine = EngineConfig(
        model="my model",
        pipeline_parallel_size=2,
        pp_partition=(4, 5),
        hf_overrides={"a": 1},
        speculative_config=SpeculativeConfig(model="demo-draft", num_speculative_tokens=3),
        debug_poison=True,
        max_num_seqs=9,
        verify_cache=0.01,
        log_level="error",
    )
    words = shlex.split(repeat_command(engine, "/tmp/x.jsonl"))
    assert words[:4] == ["stagecoach", "generate", "--model", "my model"]
    flags = dict(zip(words[4::2], words[5::2], strict=False))
    assert flags["--pipeline-parallel-size"] == "2" and flags["--pp-partition"] == "4,5"
    assert json.loads(flags["--hf-overrides"]) == {"a": 1}
    assert json.loads(flags["--speculative-config"])["num_speculative_tokens"] == 3
    assert "--debug-poison" in words and "--log-level" not in words
    end = ["--max-num-seqs", "1", "--verify-cache", "1", "--max-tokens", "1"]
    assert words[-8:] == [*end, "--prompt-token-ids", "@/tmp/x.jsonl"]


def test_a_mismatch_is_one_line_that_names_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reporter = MismatchReporter(EngineConfig(model="tiny"))
    for _ in range(25):
        reporter.report(VERDICT)
    first, *_, last = caplog.records
    assert len(caplog.records) == 25 and {record.levelname for record in caplog.records} == {
        "ERROR"
    }
    text = first.getMessage()
    assert "hit at 3 of 6 tokens of request 7 is wrong" in text
    assert "state differs by 0.25 and the logits by inf, tolerance 0.001" in text
    path = Path(shlex.split(text)[-1].removeprefix("@"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        [5, 6, 7, 0],
        [5, 6, 7, 8, 9, 10],
        [5, 6, 7, 0],
    ]
    assert len(list(tmp_path.iterdir())) == 20 and "not" in last.getMessage()
