"""What `scripts/gpu` is asked for and leaves: phases, parts, headline figures."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.h200 import summary
from bench.h200.parts import read_parts, write_part
from bench.kernels.timing import Report, run_command

_ROOT = Path(__file__).parents[3]
_SCRIPT = _ROOT / "scripts/gpu"


# Stands for an interpreter on a machine with one GPU; a check of `mla` ends before its first line.
_INTERPRETER = """#!/bin/sh
case "$*" in
    -c*) echo 1 ;;
    *mla\\ check) exit 1 ;;
    *\\ check) echo "PASS  a case" ;;
    *) echo "ran $*" ;;
esac
"""


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(_SCRIPT), *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def _time(report: Report) -> None:
    report.time("  small", 20.0, 10.0)
    report.time("without a limit", 3.0)
    report.figure("verify_speedup_vs_fla", 4.5)


def _interrupted(report: Report) -> None:
    report.time("first", 8.0, 2.0)
    raise KeyboardInterrupt


def _fail(report: Report) -> None:
    report.check("case", 1.0, 0.5)


def _command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kernel", *arguments])
    actions = {"check": _fail, "time": _time, "stop": _interrupted}
    return run_command("kda_window", "A kernel.", actions)


def test_what_is_timed_becomes_a_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMMIT", "abc1234")
    assert _command(monkeypatch, "time", "--out", str(tmp_path)) == 0
    part = read_parts(tmp_path)["kernels-kda_window"]
    assert part["environment"]["commit"] == "abc1234"
    assert part["results"] == {
        "verify_speedup_vs_fla": 4.5,
        "rows": [
            {"name": "small", "us": 20.0, "limit us": 10.0, "fraction": 0.5},
            {"name": "without a limit", "us": 3.0, "limit us": None, "fraction": None},
        ],
    }


def test_what_was_timed_before_an_interruption_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        _command(monkeypatch, "stop", "--out", str(tmp_path))
    [row] = read_parts(tmp_path)["kernels-kda_window"]["results"]["rows"]
    assert row["fraction"] == 0.25


def test_a_failed_check_is_the_exit_status_and_leaves_no_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert _command(monkeypatch, "check", "--out", str(tmp_path)) == 1
    assert read_parts(tmp_path) == {}


def _engine(num_stages: int, step_ms: float, tokens_per_second: float) -> dict[str, Any]:
    point = {"concurrency": 1, "step_ms": step_ms, "fraction_of_limit": 0.7, "request_ms": 9.0}
    point |= {"output_tokens_per_second": 100.0, "loop_ms_per_step": 0.1, "stage_busy_share": [0.5]}
    prefill = {"length": 8192, "seconds": 0.1, "tokens_per_second": tokens_per_second}
    return {
        **{"shape": "kimi-linear", "pp": num_stages, "tp": 1, "has_graphs": True},
        **{"decode": [point], "prefill": [{**prefill, "stage_busy_share": [0.5]}]},
        "start_seconds": 20.0,
    }


def test_headline_figures_come_from_their_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMMIT", "abc1234")
    monkeypatch.setattr(summary, "make_tables", lambda parts: "")
    write_part(tmp_path, "kimi-linear-pp1-tp1", _engine(1, 3.79 / 2, 40_000.0))
    write_part(tmp_path, "kimi-linear-pp2-tp1", _engine(2, 37.0 / 8, 60_000.0))
    write_part(tmp_path, "kernels-kda_window", {"verify_speedup_vs_fla": 4.5, "rows": []})
    monkeypatch.setattr(sys, "argv", ["summary", str(tmp_path)])
    summary.main()
    figures = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    values = {name: figure["value"] for name, figure in figures.items()}
    assert {figure["commit"] for figure in figures.values()} == {"abc1234", None}
    assert values == {
        "graphs_under_pp": True,
        "kda_verify_speedup_vs_fla": 4.5,
        "kda_verify_bandwidth_fraction": None,
        "mla_decode_bandwidth_fraction": None,
        "pp2_vs_vllm_min_ratio": pytest.approx(8.0),
        "pp1_vs_vllm_min_ratio": pytest.approx(2.0),
        "tp2_vs_vllm_min_ratio": None,
        "decode_fraction_of_limit_c1": 0.7,
        "decode_fraction_of_limit_c64": None,
        "prefill_pp2_scaling": 1.5,
        "acceptance_pp2_over_pp1": None,
    }
    # A second run reads the parts and not what the first one wrote.
    summary.main()
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == figures


def test_every_part_has_a_table() -> None:
    environment = {"gpus": ["H200"], "cores": 2, "python": "3", "versions": {}, "cuda": "13"}
    results = {
        "kimi-linear-pp1-tp1": _engine(1, 3.0, 40_000.0),
        "kernels-mla": {"rows": [{"name": "decode", "us": 2.0, "limit us": None}]},
        "cache": {"512": {"computed_seconds": 0.5, "hit_seconds": 0.1, "ratio": 5.0}},
        "profile-pp1-tp1": {
            "decode at 1": {
                **{"num_steps": 9, "step_us": 50.0, "between_us": 5.0},
                "kernels": [{"kernel": "experts", "calls": 26.0, "us": 40.0}],
            }
        },
        "profile-pp1-tp2": {
            "decode at 64": {
                **{"num_steps": 9, "step_us": 30.0, "between_us": 4.0},
                "kernels": [{"kernel": "experts", "calls": 26.0, "us": 20.0}],
                "exchanges": {"itself_us_a_step": 7.4, "wait_us_a_step": [0.6, 2.2]},
            }
        },
        "memory-kimi-linear": {
            "options": {"shape": "kimi-linear"},
            "bytes": {
                "weights": {"planned": 2_000, "measured": 1_000},
                "first context": {"planned": 0, "measured": 0},
            },
        },
        "other": {"anything": 5.0},
    }
    parts = {
        name: {"environment": {**environment, "commit": "abc1234"}, "results": item}
        for name, item in results.items()
    }
    text = summary.make_tables(parts)
    assert "| 1 | 3.00 |  | 0.70 | 9.00 | 100 | 1.26 | 0.10 | 50% |" in text
    assert "| 8192 | 0.100 | 40000 | 45155 | 50% |" in text
    assert "| decode | 2.00 |  |" in text and '"anything": 5.0' in text
    assert "| every 512 tokens | 500.0 | 100.0 | 5.0 |" in text
    assert "| decode at 1 | 50 | 5 | experts 40 |" in text
    assert "| weights | 2,000 | 1,000 | 2.00 |" in text and "| first context | 0 | 0 |  |" in text
    assert "| decode at 64 | 30 | 4 | experts 20; exchanges 7, waits 1 and 2 |" in text


def test_narrower_weights_are_not_compared_with_the_peer() -> None:
    environment = {"gpus": ["H200"], "cores": 2, "python": "3", "versions": {}, "cuda": "13"}
    results = _engine(1, 3.0, 40_000.0) | {"online_quantization": "ptpc_fp8"}
    part = {"environment": {**environment, "commit": "abc1234"}, "results": results}
    text = summary.make_tables({"kimi-linear-pp1-ptpc_fp8": part})
    assert "| 1 | 3.00 |  | 0.70 | 9.00 | 100 |  | 0.10 | 50% |" in text
    assert "| 8192 | 0.100 | 40000 |  | 50% |" in text


def test_a_phase_that_is_none_is_refused_with_those_that_are() -> None:
    done = _run("kernels", "everything")
    assert done.returncode == 2 and not done.stdout
    assert "no phase 'everything'; there are: kernels " in done.stderr


def test_a_check_that_breaks_off_is_the_exit_status_and_the_rest_runs(tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(_INTERPRETER, encoding="utf-8")
    interpreter.chmod(0o755)
    variables = {"PYTHON": str(interpreter), "OUT": str(tmp_path), "COMMIT": "abc1234"}
    done = _run("kernels", "cache", **variables)
    assert done.returncode == 1
    assert "mla.check: exit 1" in done.stdout and "== mla: 0 passed, 0 failed" in done.stdout
    assert "== moe: 1 passed, 0 failed" in done.stdout
    assert f"ran -m bench.h200.cache --out {tmp_path}" in done.stdout
    assert done.stdout.endswith(f"ran -m bench.h200.summary {tmp_path}\n")
    assert _run("cache", **variables).returncode == 0


def test_help_and_refusal_name_every_phase() -> None:
    phases = re.findall(r"^phase_(\w+)\(\)", _SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    text = _run("--help").stdout
    assert re.findall(r"^  (\w+) {2,}\w", text, re.MULTILINE)[: len(phases)] == phases
    assert set(_run("?").stderr.split("there are: ")[1].split()) == set(phases)


def test_every_kernel_of_the_benchmarks_is_run() -> None:
    [names] = re.findall(r'^kernels="(.*)"$', _SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    modules = (_ROOT / "bench/kernels").glob("*.py")
    commands = {
        path.stem: re.findall(r'run_command\("(\w+)"', path.read_text(encoding="utf-8"))
        for path in modules
        if path.stem != "timing"
    }
    assert {name: [name] for name in names.split()} == {
        name: found for name, found in commands.items() if found
    }
