"""lm-eval asks the bundled model through the server, as people run it, and gets its numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stagecoach import LLM, SamplingParams
from tests.e2e import lm_eval_runs
from tests.e2e.server_process import ServerProcess

TASKS = Path(__file__).parent / "lm_eval_task"
TOLERANCE = 1e-4  # float32, in batches of other shapes


@pytest.fixture(scope="module")
def answers(
    demo_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What was asked and answered, by run and task."""
    home = tmp_path_factory.mktemp("lm_eval")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, lm_eval_runs.__file__, demo_server.url],
        cwd=TASKS,
        env={**os.environ, **offline, "TMPDIR": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("run", ["token ids", "text"])
def test_loglikelihoods_are_those_of_the_engine(
    answers: dict[str, Any], demo_llm: LLM, run: str
) -> None:
    told = answers[run]["small_choice"]
    assert len(told) == 11
    prompts = [demo_llm.tokenizer.encode("".join(item["asked"])) for item in told]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    outputs = demo_llm.generate(list(prompts), params, use_tqdm=False)
    for item, output in zip(told, outputs, strict=True):
        num_context = len(demo_llm.tokenizer.encode(item["asked"][0]))
        assert output.prompt_logprobs is not None
        entries = [entry for entry in output.prompt_logprobs[num_context:] if entry is not None]
        assert entries
        likelihood, is_greedy = item["got"]
        assert likelihood == pytest.approx(sum(e.logprob for e in entries), abs=TOLERANCE)
        assert is_greedy == all(entry.rank == 1 for entry in entries)


def test_texts_are_those_of_the_engine(answers: dict[str, Any], demo_llm: LLM) -> None:
    told = answers["token ids"]["small_answer"]
    params = SamplingParams(temperature=0, max_tokens=24, stop=("\n\n",))
    prompts = [item["asked"][0] for item in told]
    outputs = demo_llm.generate(prompts, params, use_tqdm=False)
    assert [item["got"] for item in told] == [output.outputs[0].text for output in outputs]


def test_chats_are_those_of_the_engine(answers: dict[str, Any], demo_llm: LLM) -> None:
    told = answers["chat"]["small_answer"]
    params = SamplingParams(temperature=0, max_tokens=24, stop=("\n\n",))
    for item in told:
        messages = [{"role": "user", "content": json.loads(item["asked"][0][0])[0]["content"]}]
        [said] = demo_llm.chat(messages, params).messages
        assert item["got"] == said.content


def test_scores_come_out(answers: dict[str, Any]) -> None:
    scores = answers["token ids"]["scores"]["small_choice"]
    assert 0 < scores["acc,none"] <= 1
    assert scores["acc,none"] == answers["text"]["scores"]["small_choice"]["acc,none"]
