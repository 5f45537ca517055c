"""Random schemas beside free text: every token obeys, and drafts change none of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagecoach import CompletionOutput, SamplingParams, StructuredOutputsParams
from stagecoach.engine.compiling import Compiler, load_compiler
from tests.cpu.engine.scripted_drafter import Script, mostly_right, use_script
from tests.cpu.grammar.random_schemas import SCHEMAS
from tests.small_engine import (
    assert_idle,
    thread_engine,
    token_ids,
    write_small_draft,
    write_small_model,
)

NUM_DRAFTS = 4
# What ends a string, a list or an object, and the text.
CLOSERS = dict.fromkeys((*b'"]}:,', 257, 258), 12.0)
# The beginning of every prompt, a page and more.
PROMPT = list(range(1, 12))

parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 30.0]),
        "max_tokens": st.sampled_from([1, 15, 50]),
        "seed": st.integers(0, 99),
        "logit_bias": st.sampled_from([{}, CLOSERS, dict.fromkeys(range(32, 128), -100.0)]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 0.1, 20.0]),
    },
    optional={
        "min_p": st.just(1.0),
        "top_k": st.just(1),
        "top_p": st.just(1e-6),
        "stop_token_ids": st.just(tuple(b"e0")),
        "n": st.just(2),
    },
)


class Pair:
    """Two engines, of which one drafts what the other has answered."""

    def __init__(self, folder: Path, draft: Path) -> None:
        self.answers: list[tuple[int, ...]] = []
        self.plain = thread_engine(folder)
        with pytest.MonkeyPatch.context() as patch:
            # A list that grows with what the plain engine says.
            answers: Any = self.answers
            use_script(patch, Script(answers, NUM_DRAFTS, mostly_right, ord("{")))
            self.drafting = thread_engine(
                folder,
                pipeline_parallel_size=2,
                max_num_batched_tokens=17,
                speculative_config={
                    "model": str(draft),
                    "num_speculative_tokens": NUM_DRAFTS,
                    "confidence_schedule": False,
                    "watchdog": False,
                },
            )
        self.compiler: Compiler = load_compiler(self.plain.config)

    def close(self) -> None:
        self.plain.close()
        self.drafting.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("models")
    engines = Pair(write_small_model(folder / "target"), write_small_draft(folder / "draft"))
    yield engines
    engines.close()


def assert_obeys(pair: Pair, schema: dict[str, Any], answer: CompletionOutput) -> None:
    constraint = pair.compiler.compile(StructuredOutputsParams(json=schema))
    constraint.advance(tuple(answer.token_ids))
    assert constraint.error is None and answer.finish_reason != "error"
    if constraint.is_finished:
        assert answer.finish_reason == "stop"
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(asked=st.lists(st.tuples(st.none() | SCHEMAS, parameters), min_size=1, max_size=6))
def test_every_token_obeys_and_drafts_change_none(
    pair: Pair, asked: list[tuple[dict[str, Any] | None, dict[str, Any]]]
) -> None:
    prompts = [[*PROMPT, number] for number in range(len(asked))]
    params = [
        SamplingParams(
            structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
            **fields,
        )
        for schema, fields in asked
    ]
    expected = pair.plain.generate(prompts, params, use_tqdm=False)
    for (schema, _), prompt, output in zip(asked, prompts, expected, strict=True):
        for answer in output.outputs:
            if schema is not None:
                assert_obeys(pair, schema, answer)
            pair.answers.append((*prompt, *answer.token_ids))
    got = pair.drafting.generate(prompts, params, use_tqdm=False)
    assert token_ids(got) == token_ids(expected)
    for engine in (pair.plain, pair.drafting):
        assert_idle(engine)
