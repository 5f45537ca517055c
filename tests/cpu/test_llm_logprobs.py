"""Log-probabilities of an engine against logits of the model alone, however it was chunked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from stagecoach import RequestOutput, SamplingParams
from stagecoach.request import TokenLogprobs
from tests.cpu.model.model_runs import Grid
from tests.small_engine import (
    LOGPROB_TOLERANCE,
    assert_idle,
    assert_same_completions,
    assert_same_logprobs,
    thread_engine,
)

PROMPT = [(7 * number + 3) % 256 for number in range(41)]
PARAMS = SamplingParams(
    temperature=0.9, seed=5, max_tokens=9, logprobs=3, prompt_logprobs=2, ignore_eos=True
)


class Case(NamedTuple):
    budget: int
    options: dict[str, Any]


# Pages hold 8 tokens.
CASES = [
    Case(1, {}),
    Case(3, {}),
    Case(7, {}),
    Case(8, {"pipeline_parallel_size": 2}),
    Case(9, {"tensor_parallel_size": 2}),
    Case(16, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    Case(40, {}),
    Case(64, {}),
]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[RequestOutput]:
    with thread_engine(folder, max_num_batched_tokens=256) as llm:
        [output] = llm.generate(PROMPT, PARAMS)
        yield output


@pytest.fixture(scope="module")
def logprobs_TV(folder: Path, expected: RequestOutput) -> Tensor:
    """After each token of prompt and output, from one pass over all of them."""
    grid = Grid(folder, torch.float64)
    tokens = [*PROMPT, *expected.outputs[0].token_ids]
    return grid.prefill(grid.row(len(tokens)), tokens).log_softmax(-1)


def check(entry: TokenLogprobs, token_id: int, logprobs_V: Tensor, num_top: int) -> None:
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(float(logprobs_V[token_id]), abs=LOGPROB_TOLERANCE)
    assert entry.rank == 1 + int((logprobs_V > logprobs_V[token_id]).sum())
    values, token_ids = logprobs_V.sort(descending=True, stable=True)
    assert entry.top_ids == tuple(token_ids[:num_top].tolist())
    assert entry.top_logprobs == pytest.approx(values[:num_top].tolist(), abs=LOGPROB_TOLERANCE)


def test_output_logprobs_are_those_of_the_unprocessed_logits(
    expected: RequestOutput, logprobs_TV: Tensor
) -> None:
    [completion] = expected.outputs
    assert completion.logprobs is not None and len(completion.logprobs) == 9
    for index, (token_id, entry) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True)
    ):
        check(entry, token_id, logprobs_TV[len(PROMPT) - 1 + index], num_top=3)


def test_prompt_logprobs_are_those_of_the_tokens_before(
    expected: RequestOutput, logprobs_TV: Tensor
) -> None:
    assert expected.prompt_logprobs is not None
    first, *others = expected.prompt_logprobs
    assert first is None
    assert len(others) == len(PROMPT) - 1
    for index, entry in enumerate(others):
        assert entry is not None
        check(entry, PROMPT[index + 1], logprobs_TV[index], num_top=2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_they_are_the_same_however_the_prompt_was_cut(
    folder: Path, expected: RequestOutput, case: Case
) -> None:
    with thread_engine(folder, max_num_batched_tokens=case.budget, **case.options) as llm:
        noise = SamplingParams(temperature=1.0, max_tokens=12, prompt_logprobs=0, logprobs=0)
        outputs = llm.generate([[9] * 17, PROMPT, [8] * 5], [noise, PARAMS, noise])
        assert_idle(llm)
    assert_same_completions(outputs[1].outputs, expected.outputs)
    assert_same_logprobs(outputs[1].prompt_logprobs, expected.prompt_logprobs)
    for output, length in ((outputs[0], 17), (outputs[2], 5)):
        assert len(output.prompt_logprobs or ()) == length


def test_a_preempted_request_reports_each_position_once(
    folder: Path, expected: RequestOutput
) -> None:
    options = {"max_model_len": None, "num_gpu_blocks_override": 10, "max_num_batched_tokens": 9}
    with thread_engine(folder, **options) as llm:
        long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        outputs = llm.generate([[1] * 17, PROMPT], [long, PARAMS])
        assert outputs[1].timings.num_preemptions == llm.stats().num_preemptions > 0
        assert_idle(llm)
    assert_same_logprobs(outputs[1].prompt_logprobs, expected.prompt_logprobs)
    assert_same_completions(outputs[1].outputs, expected.outputs)


def test_all_completions_share_the_logprobs_of_the_prompt(
    folder: Path, expected: RequestOutput
) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=3, prompt_logprobs=2)
    with thread_engine(folder) as llm:
        [output] = llm.generate(PROMPT, params)
    assert_same_logprobs(output.prompt_logprobs, expected.prompt_logprobs)


def test_a_prompt_of_one_token_has_no_logprob(folder: Path) -> None:
    with thread_engine(folder) as llm:
        [output] = llm.generate([5], SamplingParams(max_tokens=1, prompt_logprobs=3))
    assert output.prompt_logprobs == [None]
