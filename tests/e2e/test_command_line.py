"""The program in a shell: pipes, Ctrl-C, and scripts that are not written with care."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.small_engine import OPTIONS, write_small_draft

_ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "stagecoach"]
GENERATE = [*COMMAND, "generate", "--num-threads", "1", "--log-level", "warning", "--ignore-eos"]


@pytest.fixture
def environment(temporary_folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(temporary_folder), "PYTHONPATH": str(_ROOT)}


def test_generate_with_two_stages_and_two_ranks(folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*GENERATE, "--model", folder, "--prompt", "hello", "--max-tokens", "5", "--json",
         "-pp", "2", "-tp", "2", "--dtype", "float64"],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert len(answer["outputs"][0]["token_ids"]) == 5
    assert answer["stats"]["num_steps"] == 5


def test_generate_with_a_draft_prints_the_same_text_and_tells_how_it_went(
    folder: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    draft = {
        "model": str(write_small_draft(tmp_path / "draft")),
        "num_speculative_tokens": 3,
        "confidence_schedule": False,
        "watchdog": False,
    }
    plain, drafted = (
        subprocess.run(
            [*GENERATE, "--model", folder, "--prompt", "hello", "--max-tokens", "12",
             "-pp", "2", "-tp", "2", "--dtype", "float64", *flags],
            env=environment, capture_output=True, text=True, timeout=60, check=True,
        )
        for flags in ((), ("--speculative-config", json.dumps(draft)))
    )  # fmt: skip
    assert drafted.stdout == plain.stdout
    assert plain.stderr == ""
    [line] = drafted.stderr.splitlines()
    assert line.endswith(" tokens a round") and " verify rounds accepted " in line


def test_a_reader_that_leaves_early_is_no_noise(folder: Path, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [*GENERATE, "--model", folder, "--prompt", "hello", "--max-tokens", "400"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as program:  # fmt: skip
        assert program.stdout is not None and program.stderr is not None
        assert program.stdout.read(1)
        program.stdout.close()
        assert program.stderr.read() == b""
        assert program.wait(timeout=30) == 1


def test_ctrl_c_ends_everything_in_silence(folder: Path, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [*GENERATE, "--model", folder, "--prompt", "hello", "--max-tokens", "500", "-n", "8",
         "--prompt", "ho", "-pp", "2", "-tp", "2", "--log-level", "info"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        text=True,
    ) as program:  # fmt: skip
        assert program.stdout is not None and program.stderr is not None
        # The workers' first words: all processes are there.
        lines = [program.stderr.readline()]
        family = psutil.Process(program.pid).children(recursive=True)
        assert len(family) >= 5
        # As a terminal does: to everybody.
        os.killpg(program.pid, signal.SIGINT)
        lines += program.stderr.readlines()
        assert program.wait(timeout=30) == 130
        assert program.stdout.read() == ""
    assert not [line for line in lines if " info " not in line]
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


SCRIPT = """
import sys
from stagecoach import LLM, SamplingParams
print("runs", flush=True)
llm = LLM(sys.argv[1], **{options!r})
[output] = llm.generate("hello", SamplingParams(max_tokens=4, ignore_eos=True))
print(len(output.outputs[0].token_ids), flush=True)
"""


def test_a_script_needs_neither_a_guard_nor_a_close(
    folder: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(options={**OPTIONS, "pipeline_parallel_size": 2}))
    done = subprocess.run(
        [sys.executable, script, folder],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "runs\n4\n", "")
