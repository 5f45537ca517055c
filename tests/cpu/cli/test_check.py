"""`stagecoach check` as a command: its page, its JSON, its status, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cpu.cli.command_run import Stagecoach

QUICK = ("--skip-layers", "--num-threads", "1")


def test_the_page_names_every_check(stagecoach: Stagecoach, folder: Path) -> None:
    run = stagecoach("check", folder, *QUICK)
    assert run.status == 0
    assert "2 stages x 1 rank: everything that was checked holds" in " ".join(run.stdout.split())
    for check in ("configuration", "files", "tensors", "tokenizer", "chat format", "values"):
        assert f"│ {check} " in run.stdout
        assert f"{check}: ok" in run.stderr
    assert "--skip-layers" in run.stdout
    assert "reads " in run.stderr and " left" not in run.stdout


def test_json_and_a_draft(stagecoach: Stagecoach, folder: Path, draft: Path) -> None:
    run = stagecoach("check", folder, "--draft", draft, "-pp", 1, "-tp", 2, "--json", *QUICK)
    report = json.loads(run.stdout)
    assert run.status == 0 and report["is_ok"] is True
    assert report["draft"] == str(draft) and report["layout"] == "1 stage x 2 ranks"
    verdicts = {item["check"]: item for item in report["verdicts"]}
    assert verdicts["draft tensors"]["status"] == verdicts["draft values"]["status"] == "ok"
    assert verdicts["draft pass"] == {
        "check": "draft pass",
        "status": "skipped",
        "detail": "needs: layers",
        "seconds": verdicts["draft pass"]["seconds"],
    }


def test_a_damaged_checkpoint_ends_with_status_1(
    stagecoach: Stagecoach, folder: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    path = sorted(damaged.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-10])
    run = stagecoach("check", damaged, *QUICK)
    text = " ".join(run.stdout.replace("│", " ").split())
    assert run.status == 1
    assert "not fit to be served" in text and "cut short" in text


def test_a_folder_that_is_not_there_is_a_failed_configuration(
    stagecoach: Stagecoach, tmp_path: Path
) -> None:
    run = stagecoach("check", tmp_path / "nothing", "--json", *QUICK)
    report = json.loads(run.stdout)
    assert run.status == 1
    [failed] = [item for item in report["verdicts"] if item["status"] == "failed"]
    assert failed["check"] == "configuration" and "is not a folder" in failed["detail"]


@pytest.mark.parametrize("name", ["[bold]", "[/models]"])
def test_a_folder_named_like_a_style(stagecoach: Stagecoach, tmp_path: Path, name: str) -> None:
    run = stagecoach("check", tmp_path / name, *QUICK)
    assert run.status == 1 and name in "".join(run.stdout.split("\n"))


def test_a_narrow_terminal_shows_what_was_found(
    stagecoach: Stagecoach, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    page = stagecoach("check", folder, *QUICK, "--skip-values").stdout
    assert all(len(line) <= 30 for line in page.splitlines())
    assert "│ ok      │" in page and "kimi_k" in page


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--device", "cuda"), "--device=cuda: checks run on the CPU"),
        (("--load-format", "dummy"), "--load-format=dummy: there is nothing to check"),
        (("--memory-gib", "0"), "--memory-gib=0: must be above 0"),
        (
            ("--draft", "a", "--speculative-config", '{"model": "b"}'),
            "--draft and --speculative-config both name a draft",
        ),
    ],
)
def test_what_cannot_be_asked(
    stagecoach: Stagecoach, folder: Path, arguments: tuple[str, ...], text: str
) -> None:
    run = stagecoach("check", folder, *arguments)
    assert run.status == 1 and run.stdout == ""
    assert text in run.stderr
