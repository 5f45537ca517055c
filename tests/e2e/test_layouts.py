"""Engines of real processes say what an engine in this process says, on every layout."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stagecoach import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from tests.small_engine import (
    assert_idle,
    assert_same_completions,
    assert_same_logprobs,
    process_engine,
    thread_engine,
)

PROMPTS = [
    "hello",
    [9] * 33,
    "a prompt that is cut into several chunks",
    [7],
    [1, 2, 3] * 20,
    "what obeys",
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=9, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.2, seed=2, max_tokens=10, n=3, top_p=0.9),
    SamplingParams(temperature=1.0, seed=3, max_tokens=15, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_tokens=8, min_tokens=4, stop=("a", "e")),
    SamplingParams(
        temperature=1.0,
        seed=4,
        max_tokens=20,
        n=2,
        logprobs=1,
        structured_outputs=StructuredOutputsParams(regex="([a-c]{2,4}-)+[0-9]!"),
    ),
]


class Layout(NamedTuple):
    num_stages: int
    num_ranks: int
    budget: int
    partition: tuple[int, ...] | None = None
    num_drafts: int = 0
    async_scheduling: bool | None = None

    def options(self, draft_folder: Path) -> dict[str, Any]:
        """With windows of fixed length, where there are drafts."""
        speculation = {
            "model": str(draft_folder),
            "num_speculative_tokens": self.num_drafts,
            "confidence_schedule": False,
            "watchdog": False,
        }
        return {
            "pipeline_parallel_size": self.num_stages,
            "tensor_parallel_size": self.num_ranks,
            "max_num_batched_tokens": self.budget,
            "pp_partition": self.partition,
            "async_scheduling": self.async_scheduling,
            "speculative_config": speculation if self.num_drafts else None,
        }


LAYOUTS = [
    Layout(2, 2, 7),
    Layout(3, 1, 24, (1, 2, 1)),
    Layout(1, 4, 9, async_scheduling=True),
    Layout(2, 2, 24, num_drafts=3),
    Layout(3, 1, 11, (1, 2, 1), num_drafts=7),
]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[RequestOutput]:
    with thread_engine(folder, max_num_batched_tokens=256) as llm:
        return [
            llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def engine(request: pytest.FixtureRequest, folder: Path, draft_folder: Path) -> Iterator[LLM]:
    with process_engine(folder, **request.param.options(draft_folder)) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    yield engine
    assert_idle(engine)


def test_a_batch_equals_requests_alone_on_one_stage(
    llm: LLM, expected: list[RequestOutput]
) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    for output, other in zip(outputs, expected, strict=True):
        assert_same_completions(output.outputs, other.outputs)
        assert_same_logprobs(output.prompt_logprobs, other.prompt_logprobs)
    speculation = llm.stats().speculation
    assert (speculation is None) == (llm.config.num_draft_tokens == 0)
    assert speculation is None or speculation.num_draft_tokens > 0


def test_streams_of_several_threads_with_aborts_between(
    llm: LLM, expected: list[RequestOutput]
) -> None:
    long = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)

    def run(number: int) -> None:
        if number % 2:
            stream = llm.stream([number] * 30, long)
            next(stream)
            stream.close()
            return
        index = number // 2
        *_, output = llm.stream(PROMPTS[index], PARAMS[index])
        assert_same_completions(output.outputs, expected[index].outputs)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(2 * len(PROMPTS))))


def test_every_worker_is_a_process_of_its_own(llm: LLM) -> None:
    engine = llm.config.engine
    names = {
        f"worker[{stage},{rank}]"
        for stage in range(engine.pipeline_parallel_size)
        for rank in range(engine.tensor_parallel_size)
    }
    process_ids = llm.client.engine.process_ids
    assert set(process_ids) == names | {"engine loop"}
    assert len(set(process_ids.values())) == len(names) + 1
