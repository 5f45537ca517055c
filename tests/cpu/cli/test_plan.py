"""`stagecoach plan`: tables, JSON, names of published models and drafts, exit status."""

import json
from typing import Any

import pytest

from tests.cpu.cli.command_run import Stagecoach

pytestmark = pytest.mark.cpu

_LINEAR = ("plan", "kimi-linear-48b", "--max-model-len", "32768")


def planned(stagecoach: Stagecoach, *arguments: str) -> dict[str, Any]:
    run = stagecoach("plan", *arguments, "--json")
    assert run.status == 0, run.stderr
    made: dict[str, Any] = json.loads(run.stdout)
    return made


def test_tables_of_a_plan(stagecoach: Stagecoach) -> None:
    run = stagecoach(*_LINEAR, "-pp", "2")
    assert run.status == 0 and run.stderr == ""
    text = " ".join(run.stdout.split())
    for said in ("kimi-linear-48b", "weights", "Requests by length", "Estimated times"):
        assert said in text
    assert "Partitions" in text and "rates measured" in text


def test_json_has_a_report_of_each_stage(stagecoach: Stagecoach) -> None:
    made = planned(stagecoach, "kimi-k3", "-pp", "8", "-tp", "8", "--max-model-len", "131072")
    assert made["fits"] and made["model"] == "kimi-k3" and made["gpu"] == "h200"
    assert [stage["num_layers"] for stage in made["stages"]] == made["partition"]
    assert sum(made["partition"]) == 93


def test_a_published_draft_is_called_by_its_name(stagecoach: Stagecoach) -> None:
    speculation = json.dumps({"model": "kimi-k3-dspark"})
    made = planned(
        stagecoach, "kimi-k3", "-pp", "4", "-tp", "8", "--speculative-config", speculation
    )
    assert made["num_draft_tokens"] == 7
    assert made["stages"][-1]["drafter_bytes"] > 0


def test_a_larger_gpu_of_a_given_size(stagecoach: Stagecoach) -> None:
    made = planned(stagecoach, *_LINEAR[1:], "--gpu", "h100", "--gpu-memory", str(200 * 2**30))
    assert made["gpu_bytes"] == 200 * 2**30 and not made["is_measured"]


def test_on_a_cpu_there_are_bytes_and_no_times(stagecoach: Stagecoach) -> None:
    made = planned(stagecoach, "demo", "--device", "cpu", "-pp", "2")
    assert made["gpu"] is None and made["decode"] == [] and made["num_pages"] > 1


def test_what_does_not_fit_is_an_exit_status_and_a_reason(stagecoach: Stagecoach) -> None:
    run = stagecoach("plan", "kimi-linear-48b", "--gpu", "h100")
    assert run.status == 1
    text = " ".join(run.stdout.split())
    assert "stage 0 does not fit: " in text and "It would fit with --" in text
    assert "Estimated times" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "abacus"), "--gpu=abacus"),
        (("--gpu-memory", "0"), "--gpu-memory=0"),
        (("--context", "0"), "--context=0"),
        (("--context", "32768"), "--context=32768: must be below --max-model-len=32768"),
        (("--speculative-config", '{"model": "nowhere"}'), "published are kimi-k3-dspark, "),
        (("-tp", "3"), "tensor-parallel-size=3"),
    ],
)
def test_refusals_name_the_option(
    stagecoach: Stagecoach, arguments: tuple[str, ...], said: str
) -> None:
    run = stagecoach(*_LINEAR, *arguments)
    assert run.status == 1 and said in run.stderr and run.stdout == ""


def test_a_name_that_is_not_known_is_told_those_that_are(stagecoach: Stagecoach) -> None:
    run = stagecoach("plan", "kimi-k4")
    assert run.status == 1 and run.stdout == ""
    assert "--model=kimi-k4" in run.stderr and "kimi-k3, kimi-linear-48b" in run.stderr


@pytest.mark.parametrize(
    "others",
    [(), ("--speculative-config", '{"model": "kimi-k3-dspark"}', "--kv-offloading-size", "64")],
)
def test_narrow_terminals_cut_and_break_no_number(
    stagecoach: Stagecoach, monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    options = ("kimi-k3", "-pp", "2", "-tp", "8", "--max-model-len", "131072", *others)
    run = stagecoach("plan", *options)
    made = planned(stagecoach, *options)
    assert run.status == 0 and "\N{HORIZONTAL ELLIPSIS}" not in run.stdout
    for stage in made["stages"]:
        for name in ("weight_bytes", "page_bytes", "total_bytes", "spare_bytes", "host_bytes"):
            assert not stage[name] or f" {stage[name] / 2**30:.2f} " in run.stdout
        assert f"{stage['boundary_bytes_per_chunk']:,}" in run.stdout


def test_longer_contexts_make_longer_steps(stagecoach: Stagecoach) -> None:
    short, long = (
        planned(stagecoach, *_LINEAR[1:], "--context", context)["decode"][-1]
        for context in ("1000", "30000")
    )
    assert short["step_seconds"] < long["step_seconds"]
    assert (short["context"], long["context"]) == (1000, 30000)
