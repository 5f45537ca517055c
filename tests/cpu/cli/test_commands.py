"""The command line as a whole: status, streams, help, and what each command prints."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from stagecoach.__main__ import app, main
from stagecoach.compatibility import rules, support_table
from stagecoach.demo.tasks import FAMILIES
from tests.cpu.cli.command_run import (
    FAST,
    Stagecoach,
    always_drafting,
    spoil_first_request,
)

_BAD_ACTIVATION = '{"text_config": {"hidden_act": "x"}}'
_LONGER = ("--hf-overrides", '{"text_config": {"max_position_embeddings": 8192}}')

MAIN: Any = typer.main.get_command(app)
BENCH = MAIN.commands["bench"]
COMMANDS: dict[str, Any] = {
    **{name: command for name, command in MAIN.commands.items() if command is not BENCH},
    **{f"bench {name}": command for name, command in BENCH.commands.items()},
}


def test_the_commands() -> None:
    assert set(COMMANDS) == {
        "generate", "serve", "demo", "eval", "fuzz", "chat", "check", "plan", "support",
        "bench serve", "bench latency", "bench throughput",
    }  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_option_and_what_it_does(stagecoach: Stagecoach, name: str) -> None:
    run = stagecoach(*name.split(), "--help")
    assert run.status == 0
    text = " ".join(run.stdout.split())
    assert "..." not in text.replace("INT,INT,...", "").replace("[OPTIONS]", "")
    assert "completion" not in text
    for parameter in COMMANDS[name].params:
        assert len(parameter.help or "") > 10, f"{name}: {parameter.name} says nothing"
        for spelling in (*parameter.opts, *parameter.secondary_opts):
            assert spelling in text or parameter.param_type_name == "argument"
    assert COMMANDS[name].help.split("\n")[0].split(".")[0] in text


@pytest.mark.parametrize("group", [MAIN, BENCH], ids=["stagecoach", "bench"])
def test_help_lists_the_commands_whole(stagecoach: Stagecoach, group: Any) -> None:
    run = stagecoach(*(["bench"] if group is BENCH else []), "--help")
    assert run.status == 0
    for command in group.commands.values():
        assert command.short_help in run.stdout
    assert "..." not in run.stdout.replace("[ARGS]...", "")
    assert "completion" not in run.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-command",),
        ("generate", "--no-such-option"),
        ("generate", "--temperature", "hot"),
        ("generate", "stray"),
        ("generate", "--max-tokens"),
        ("eval", "tiny", "--limit", "many"),
    ],
)
def test_wrong_usage_has_status_2(stagecoach: Stagecoach, arguments: tuple[str, ...]) -> None:
    run = stagecoach(*arguments)
    assert run.status == 2
    assert run.stdout == ""
    assert "Error: " in run.stderr


@pytest.mark.parametrize(
    ("arguments", "name", "text"),
    [
        (("--model", "/no/such/model", "--prompt", "x"), "ConfigError", "is not a folder"),
        (("--model", "tiny"), "RequestError", "prompt: none given; use --prompt TEXT"),
        (("--prompt-token-ids", "1,2"), "RequestError", "must be a JSON list of integers"),
        (("--prompt-token-ids", '["a"]'), "RequestError", "must be a JSON list of integers"),
        (("--prompt-file", "/no/such/file"), "RequestError", "prompt_file: /no/such/file: "),
        (("--prompt", "x", "--speculative-config", '{"k": 7}'), "ConfigError", "unknown key 'k'"),
        (
            ("--prompt", "x", "--speculative-config", '{"model": "/no/such/draft"}'),
            "ConfigError",
            "--speculative-config model=/no/such/draft: ",
        ),
        (("--prompt", "x", "--dtype", "int4"), "ConfigError", "--dtype='int4': must be one of"),
        (("--prompt", "x", "--log-level", "loud"), "ConfigError", "--log-level='loud'"),
        (("--prompt", "x", "-pp", "0"), "ConfigError", "--pipeline-parallel-size=0"),
        (("--prompt", "x", "-pp", "99"), "ConfigError", "num_hidden_layers=4"),
        (("--prompt", "x", "-tp", "3"), "ConfigError", "--tensor-parallel-size=3"),
        (("--prompt", "x", "-pp", "2", "--pp-partition", "3,2"), "ConfigError", "3,2"),
        (("--prompt", "x", "--hf-overrides", "{"), "ConfigError", "not valid JSON"),
        (("--prompt", "x", "--hf-overrides", _BAD_ACTIVATION), "ConfigError", "hidden_act"),
        (("--prompt", "x", "--config", "/no/such"), "ConfigError", "--config=/no/such: "),
        (("--prompt", "x", "--max-model-len", "600"), "ConfigError", "--max-model-len=600"),
        (("--prompt", "x", "--kv-cache-memory-bytes", "9"), "CapacityError", "9 bytes"),
        (("--prompt", ""), "RequestError", "prompt: must hold at least one token"),
        (("--prompt", "x", "--temperature", "nan"), "RequestError", "temperature: "),
        (("--prompt", "x", "--max-tokens", "0"), "RequestError", "max_tokens: "),
        (("--prompt", "x", "--stop-token-id", "512"), "RequestError", "stop_token_ids: "),
    ],
)
def test_an_error_is_one_line_and_status_1(
    stagecoach: Stagecoach, folder: Path, arguments: tuple[str, ...], name: str, text: str
) -> None:
    model = () if "--model" in arguments else ("--model", folder)
    run = stagecoach("generate", *model, *FAST, *arguments)
    assert run.status == 1
    assert run.stdout == ""
    [line] = run.stderr.splitlines()
    assert line.startswith(f"stagecoach: {name}: ")
    assert text in line


def test_an_unknown_model_is_named(
    stagecoach: Stagecoach,
) -> None:
    run = stagecoach("generate", "--model", "tinny", "--prompt", "x")
    assert run.status == 1
    assert "--model=tinny" in run.stderr and "demo or tiny" in run.stderr


def test_support_prints_features_and_refusals(stagecoach: Stagecoach) -> None:
    run = stagecoach("support")
    assert run.status == 0 and run.stderr == ""
    text = " ".join(run.stdout.replace("│", " ").split())
    for rule in rules.TABLE:
        assert rule.name in text
    assert "…" not in text


def test_support_in_markdown_is_the_table_of_the_readme(stagecoach: Stagecoach) -> None:
    run = stagecoach("support", "--markdown")
    assert run.stdout == support_table.render_markdown()


def test_eval_prints_a_score_for_each_task(stagecoach: Stagecoach, folder: Path) -> None:
    families = list(FAMILIES)[:2]
    run = stagecoach(
        "eval", folder, *FAST, "--json", "--limit", 1, "--max-tokens", 2,
        *(argument for family in families for argument in ("--task", family)),
        *_LONGER,
    )  # fmt: skip
    assert run.status == 0, run.stderr
    report = json.loads(run.stdout)
    assert list(report["tasks"]) == families
    assert all(0 <= score <= 1 for score in report["tasks"].values())
    assert report["speculation"] is None and report["temperature"] == 0


def test_eval_reports_tokens_of_a_round_by_task_and_acceptance_by_place(
    stagecoach: Stagecoach, folder: Path, draft: Path
) -> None:
    families = list(FAMILIES)[:2]
    arguments = (
        "eval", folder, *FAST, *_LONGER, "--limit", 1, "--max-tokens", 9,
        *(argument for family in families for argument in ("--task", family)),
        *always_drafting(draft, 3, synthetic_acceptance_length=3),
    )  # fmt: skip
    run = stagecoach(*arguments, "--json")
    assert run.status == 0, run.stderr
    report = json.loads(run.stdout)["speculation"]
    counts = report["counts"]
    assert counts["num_windows"] > 0
    assert report["tokens_per_round"] == 1 + counts["num_accepted_tokens"] / counts["num_windows"]
    assert list(report["tokens_per_round_by_task"]) == families
    assert report["acceptance_per_position"] == [
        accepted / drafted
        for accepted, drafted in zip(
            counts["accepted_per_position"], counts["drafted_per_position"], strict=True
        )
    ]
    run = stagecoach(*arguments)
    assert "tokens a round" in run.stdout
    assert f"{counts['num_windows']} rounds" in " ".join(run.stdout.split())


def test_eval_shows_solved_examples_before_each_question(
    stagecoach: Stagecoach, folder: Path
) -> None:
    def report(*arguments: object) -> dict[str, Any]:
        run = stagecoach(
            "eval", folder, *FAST, *_LONGER, "--json", "--limit", 2, "--max-tokens", 2,
            "--task", "lists_dates", *arguments,
        )  # fmt: skip
        assert run.status == 0, run.stderr
        return json.loads(run.stdout)  # type: ignore[no-any-return]

    plain, shown = report(), report("--num-fewshot", 2)
    assert (plain["num_fewshot"], shown["num_fewshot"]) == (0, 2)
    assert shown["num_prompt_tokens"] > 2 * plain["num_prompt_tokens"]
    # One question after the other, so that the last finds the first's tokens.
    shared = report("--num-fewshot", 2, "--max-num-seqs", 1, "--limit", 4)
    assert 0 < shared["cached_share"] < 1
    uncached = report("--num-fewshot", 2, "--no-enable-prefix-caching")
    assert uncached["cached_share"] is None


def test_eval_names_answers_that_ended_with_an_error(
    stagecoach: Stagecoach, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_first_request(monkeypatch, start=0)
    run = stagecoach(
        "eval", folder, *FAST, *_LONGER, "--json", "--limit", 2, "--max-tokens", 2,
        "--task", "arithmetic",
    )  # fmt: skip
    assert run.status == 1
    [line] = run.stderr.splitlines()
    assert line.startswith("stagecoach: NonFiniteError: ")
    assert line.endswith(" (task arithmetic, example 0)")
    failed, other = json.loads(run.stdout)["wrong"]
    assert failed["error"].startswith("NonFiniteError: ") and failed["answer"] == ""
    assert other["error"] is None


def test_eval_draws_answers_with_the_seed(stagecoach: Stagecoach, folder: Path) -> None:
    def wrong(*arguments: object) -> list[dict[str, Any]]:
        run = stagecoach(
            "eval", folder, *FAST, *_LONGER, "--json", "--limit", 1, "--task", "arithmetic",
            "--max-tokens", 8, *arguments,
        )  # fmt: skip
        assert run.status == 0, run.stderr
        return json.loads(run.stdout)["wrong"]

    drawn = wrong("--temperature", 1, "--seed", 3)
    assert drawn == wrong("--temperature", 1, "--seed", 3)
    assert drawn != wrong("--temperature", 1, "--seed", 4)
    assert drawn != wrong()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--task", "juggling"), "--task=juggling: must be one of"),
        (("--limit", "0"), "--limit=0: must be at least 1"),
        (("--num-fewshot", "-1"), "--num-fewshot=-1: must not be negative"),
        (("--max-tokens", "0"), "max_tokens: "),
    ],
)
def test_eval_refuses_what_it_cannot_do(
    stagecoach: Stagecoach, folder: Path, arguments: tuple[str, ...], text: str
) -> None:
    run = stagecoach("eval", folder, *FAST, *_LONGER, *arguments)
    assert run.status == 1
    assert text in run.stderr.splitlines()[-1]
    assert run.stderr.splitlines()[-1].startswith("stagecoach: ")


@pytest.fixture
def _small_demo(folder: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model and its draft in place of the bundled ones."""
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "checkpoint").symlink_to(folder)
    (tmp_path / "demo" / "draft_checkpoint").symlink_to(draft)
    monkeypatch.setattr("stagecoach.checkpoint_folder._PACKAGE", tmp_path)


@pytest.mark.usefixtures("_small_demo")
def test_demo_answers_and_prints_its_layout(stagecoach: Stagecoach) -> None:
    run = stagecoach(
        "demo", *FAST, "--max-model-len", 80, "--prompt", "hi", "--prompt", "ho", "--no-speculation"
    )
    assert run.status == 0, run.stderr
    assert run.stdout.count("[yours]") == 2
    assert "user: hi" in run.stdout and "assistant: " in run.stdout
    assert "a second" in run.stdout and "accepted" not in run.stdout
    assert "2 stages (2 + 2 layers) x 2 tensor-parallel ranks" in " ".join(run.stderr.split())
    assert "drafts" not in run.stdout + run.stderr
    # Both prompts are as long; the first is asked again.
    cached, prefill = run.stdout.splitlines()[-2:]
    num_tokens = int(re.findall(r"\[yours\] (\d+) prompt tokens", run.stdout)[0])
    assert cached.startswith(f"yours once more: {num_tokens - 1} of {num_tokens} prompt tokens")
    assert re.fullmatch(r"prefill \d+ ms instead of \d+ ms", prefill)


@pytest.mark.usefixtures("_small_demo")
def test_demo_without_a_cache_asks_nothing_again(stagecoach: Stagecoach) -> None:
    run = stagecoach(
        "demo", *FAST, "--max-model-len", 80, "--prompt", "hi", "--no-enable-prefix-caching"
    )
    assert run.status == 0, run.stderr
    assert "once more" not in run.stdout


@pytest.mark.usefixtures("_small_demo")
def test_demo_drafts_and_shows_acceptance_in_80_columns(stagecoach: Stagecoach) -> None:
    run = stagecoach("demo", *FAST, "--max-model-len", 80, "--prompt", "hi")
    assert run.status == 0, run.stderr
    assert "up to 7 drafts" in " ".join(run.stderr.split())
    assert "accepted" in run.stdout and "a round" in run.stdout
    table = run.stdout[run.stdout.index("┏") :]
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.usefixtures("_small_demo")
def test_demo_takes_another_draft_but_not_with_speculation_off(
    stagecoach: Stagecoach, draft: Path
) -> None:
    flag = always_drafting(draft, 2)
    run = stagecoach("demo", *FAST, "--max-model-len", 80, "--prompt", "hi", *flag)
    assert run.status == 0, run.stderr
    assert "up to 2 drafts" in " ".join(run.stderr.split())
    run = stagecoach("demo", *FAST, "--prompt", "hi", *flag, "--no-speculation")
    assert run.status == 1
    assert "--no-speculation and --speculative-config" in run.stderr


def test_ctrl_c_has_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stagecoach.cli.generate.LLM", interrupted)
    monkeypatch.setattr(sys, "argv", ["stagecoach", "generate", "--prompt", "x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")
