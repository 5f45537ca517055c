"""`stagecoach fuzz`: its report, its status, and a failure from finding to replay."""

import json
from pathlib import Path

import pytest

from stagecoach.cache.prefix_hash import BlockChain
from stagecoach.fuzz import script as scripts
from tests.cpu.cli.command_run import Stagecoach

KEYS = ["schedules", "requests", "steps", "hits", "preemptions", "evictions", "mismatches"]
# One layout and short requests, so that a schedule is quick.
QUICK = ("-pp", "1", "-tp", "1", "--max-model-len", "48", "--num-threads", "1")


def report(stdout: str) -> dict[str, int]:
    """The object in the last line."""
    counts = json.loads(stdout.splitlines()[-1])
    assert list(counts) == KEYS
    return counts


def test_the_last_line_is_the_report(stagecoach: Stagecoach, folder: Path) -> None:
    run = stagecoach("fuzz", "--model", folder, "--schedules", 3, "--seed", 2, *QUICK)
    assert run.status == 0, run.stderr
    counts = report(run.stdout)
    assert counts["schedules"] == 3 and counts["mismatches"] == 0
    assert counts["requests"] >= 3 and counts["steps"] > 3


def test_seconds_end_it_too(stagecoach: Stagecoach, folder: Path) -> None:
    run = stagecoach("fuzz", "--model", folder, "--seconds", "0.01", *QUICK)
    assert run.status == 0
    assert report(run.stdout)["schedules"] == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--dtype", "float32"), "--dtype=float32"),
        (("--schedules", "0"), "--schedules=0"),
        (("--seconds", "-1"), "--seconds=-1"),
        (("--replay", "/no/such/file"), "--replay=/no/such/file"),
        (("--model", "/no/such/model"), "is not a folder"),
        (("-tp", "3"), "--tensor-parallel-size=3"),
        (
            ("--speculative-config", '{"model": "tiny-draft", "acceptance": "rejection"}'),
            "acceptance=rejection",
        ),
        (
            (
                "--speculative-config",
                '{"model": "tiny-draft", "synthetic_acceptance_length": 2, '
                '"confidence_schedule": false, "watchdog": false}',
            ),
            "synthetic_acceptance_length=2",
        ),
        (("--speculative-config", '{"model": "tiny-draft", "watchdog": true}'), "watchdog=true"),
        (
            ("--speculative-config", '{"model": "tiny-draft", "kv_cache_dtype": "fp8"}'),
            "kv_cache_dtype=fp8",
        ),
    ],
)
def test_what_cannot_be_fuzzed_is_wrong_usage(
    stagecoach: Stagecoach, folder: Path, arguments: tuple[str, ...], text: str
) -> None:
    run = stagecoach("fuzz", "--model", folder, *arguments)
    assert run.status == 2
    assert run.stdout == ""
    assert text in " ".join(run.stderr.split())


def test_a_bug_becomes_a_short_file_that_fails_again(
    stagecoach: Stagecoach, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests share states by how long the rest of their prefix is, whatever stands in it."""
    with monkeypatch.context() as planted:
        planted.setattr(
            BlockChain, "tail", lambda self, position: (0,) * (position % self._block_size)
        )
        run = stagecoach(
            "fuzz", "--model", folder, "--schedules", 40, "--seed", 1, "--save-to", tmp_path,
            "--shrink-seconds", 8, "--max-mismatches", 1, "--enable-prefix-caching",
            "--block-size", 16, "--state-checkpoint-interval", 16, "--verify-cache", 0, *QUICK,
        )  # fmt: skip
        assert run.status == 1
        assert report(run.stdout)["mismatches"] == 1
        [path] = tmp_path.glob("*.json")
        assert "shrunk in " in run.stderr
        assert f"stagecoach fuzz --replay {path}" in run.stderr
        assert scripts.encode(scripts.read(path)) in run.stderr
        again = stagecoach("fuzz", "--replay", path)
        assert again.status == 1
        assert report(again.stdout)["schedules"] == 1
    repaired = stagecoach("fuzz", "--replay", path)
    assert repaired.status == 0
    assert report(repaired.stdout)["mismatches"] == 0


def test_ctrl_c_ends_with_the_report(
    stagecoach: Stagecoach, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stagecoach.fuzz.play.Player.play", interrupt)
    run = stagecoach("fuzz", "--model", folder, "--schedules", 3, *QUICK)
    assert run.status == 0
    assert report(run.stdout)["schedules"] == 0
