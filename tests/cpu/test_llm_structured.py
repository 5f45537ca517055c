"""Structured output end to end, with real grammars, on engines in this process."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stagecoach import LLM, CompletionOutput, SamplingParams, StructuredOutputsParams
from stagecoach.errors import RequestError
from tests.small_engine import (
    assert_idle,
    thread_engine,
    write_small_draft,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["color", "count", "tags"],
    "additionalProperties": False,
}
# JSON may have any number of them.
NO_BLANKS = dict.fromkeys(map(ord, " \t\r\n"), -50.0)
ENDS = (257, 258, 265)  # [EOS], <|end_of_msg|>, [EOT]
PHONE = r"[0-9]{3}-[0-9]{4}"
PROMPTS = ["one", "a longer prompt than a page", "3", "and some more of them", "five", "six!"]


def params(grammar: StructuredOutputsParams | None, **fields: Any) -> SamplingParams:
    defaults: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 80,
        "logit_bias": NO_BLANKS,
    }
    return SamplingParams(structured_outputs=grammar, **(defaults | fields))


MIXED = [
    params(StructuredOutputsParams(json=SCHEMA)),
    params(StructuredOutputsParams(regex=PHONE), temperature=0.0),
    params(None, max_tokens=12),
    params(StructuredOutputsParams(choice=("yes", "no", "perhaps")), logprobs=2),
    params(StructuredOutputsParams(json=json.dumps(SCHEMA)), seed=8, presence_penalty=0.5),
    params(StructuredOutputsParams(grammar='start: "<" /[a-c]{2,4}/ ">"'), top_p=0.9),
]


def run(llm: LLM, wanted: list[SamplingParams] = MIXED) -> list[CompletionOutput]:
    outputs = llm.generate(PROMPTS[: len(wanted)], wanted, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def assert_obeyed(answers: list[CompletionOutput]) -> None:
    for answer in (answers[0], answers[4]):
        value = json.loads(answer.text)
        assert list(value) == ["color", "count", "tags"]
        assert value["color"] in ("red", "green", "blue") and 0 <= value["count"] <= 999
        assert len(value["tags"]) <= 3 and all(type(tag) is bool for tag in value["tags"])
    assert re.fullmatch(PHONE, answers[1].text)
    assert answers[3].text in ("yes", "no", "perhaps")
    assert re.fullmatch("<[a-c]{2,4}>", answers[5].text)
    for number, answer in enumerate(answers):
        if number != 2:
            assert answer.finish_reason == "stop" and answer.token_ids[-1] in ENDS


@pytest.fixture(scope="module")
def expected(engine: LLM) -> list[CompletionOutput]:
    return run(engine)


def test_texts_obey_and_end(expected: list[CompletionOutput]) -> None:
    assert_obeyed(expected)
    assert len(expected[2].token_ids) == 12


@pytest.mark.parametrize(
    ("stages", "ranks", "has_drafts"), [(2, 1, False), (1, 2, True), (2, 2, True)]
)
def test_layout_and_drafts_change_nothing(
    stages: int,
    ranks: int,
    has_drafts: bool,
    folder: Path,
    expected: list[CompletionOutput],
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {}
    if has_drafts:
        options["speculative_config"] = {
            "model": str(write_small_draft(tmp_path)),
            "num_speculative_tokens": 4,
        }
    with thread_engine(
        folder, pipeline_parallel_size=stages, tensor_parallel_size=ranks, **options
    ) as llm:
        got = run(llm)
        assert [answer.token_ids for answer in got] == [answer.token_ids for answer in expected]
        assert_idle(llm)


def test_judged_by_probabilities_texts_obey_too(folder: Path, tmp_path: Path) -> None:
    draft = {
        "model": str(write_small_draft(tmp_path)),
        "num_speculative_tokens": 4,
        "acceptance": "rejection",
        "watchdog": False,
    }
    with thread_engine(folder, speculative_config=draft) as llm:
        assert_obeyed(run(llm))
        assert_idle(llm)


def test_each_of_several_completions_obeys(llm: LLM) -> None:
    wanted = params(StructuredOutputsParams(json=SCHEMA), n=4)
    [output] = llm.generate("many", wanted, use_tqdm=False)
    values = [json.loads(item.text) for item in output.outputs]
    assert len({json.dumps(value) for value in values}) > 1


def test_a_length_cuts_a_text_like_any_other(llm: LLM, expected: list[CompletionOutput]) -> None:
    whole = expected[0].token_ids
    [short] = run(llm, [params(StructuredOutputsParams(json=SCHEMA), max_tokens=7)])
    assert short.token_ids == whole[:7] and short.finish_reason == "length"


def test_a_stream_and_its_abort(llm: LLM) -> None:
    stream = llm.stream("one", params(StructuredOutputsParams(json=SCHEMA)))
    for output in stream:
        if len(output.outputs[0].token_ids) > 8:
            break
    assert output.outputs[0].text.startswith('{"color"')
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (StructuredOutputsParams(regex="(a"), "regex"),
        (StructuredOutputsParams(json='{"type": '), "json"),
        (StructuredOutputsParams(json={"type": "no such type"}), "type"),
        (StructuredOutputsParams(grammar="start: missing_rule"), "missing_rule"),
        (StructuredOutputsParams(regex="a", json={}), "exactly one"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    llm: LLM, grammar: StructuredOutputsParams, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        llm.generate("one", params(grammar), use_tqdm=False)
    assert caught.value.field == "structured_outputs"
