"""Every check of a request names its field; progress is plain numbers."""

import math
from typing import Any

import msgspec
import pytest

from stagecoach.errors import RequestError
from stagecoach.request import (
    MAX_LOGPROBS,
    MAX_SEED,
    FinishReason,
    Request,
    SamplingParams,
    StructuredOutputsParams,
    check_prompt,
)

LIMITS = {"vocab_size": 100, "max_model_len": 50}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -math.inf),
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 51),
        ("max_tokens", 10**30),
        ("max_tokens", 1.0),
        ("min_tokens", -1),
        ("min_tokens", 17),  # above the default max_tokens
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("seed", 0.5),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (5, -1)),
        ("stop_token_ids", ("a",)),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {5: 101.0}),
        ("stop", ("",)),
        ("stop", ("fine", "")),
        ("stop", ("x" * 2048, "y" * 2049)),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^{field}: ") as error:
        SamplingParams(**{field: value}).check(**LIMITS)
    assert error.value.field == field
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 10**9},
        {"min_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 100.0},
        {"n": 128},
        {"max_tokens": None, "min_tokens": 50},
        {"max_tokens": 50, "min_tokens": 50},
        {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
        {"seed": MAX_SEED},
        {"stop_token_ids": (0, 99)},
        {"logit_bias": {0: -100.0, 99: 100}},
        {"stop": ("x", "\n")},
    ],
)
def test_the_bounds_themselves_are_accepted(changes: dict[str, Any]) -> None:
    SamplingParams(**changes).check(**LIMITS)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "prompt: must hold at least one token"),
        ([1] * 11, "prompt is too long: 11 tokens > 10 maximum; .* context length is 11 tokens"),
        ([1, 100], r"prompt: token id 100 is not in 0\.\.99"),
        ([-1, 200], r"prompt: token id -1 is not in 0\.\.99"),
    ],
)
def test_a_wrong_prompt_is_refused_with_the_numbers(token_ids: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        check_prompt(token_ids, vocab_size=100, limit=10)
    assert error.value.field == "prompt"


@pytest.mark.parametrize("token_ids", [[0], [99] * 10, (5, 6)])
def test_a_right_prompt_is_accepted(token_ids: list[int]) -> None:
    check_prompt(token_ids, vocab_size=100, limit=10)


@pytest.mark.parametrize(
    ("changes", "is_greedy", "has_penalties"),
    [
        ({}, False, False),
        ({"temperature": 0.0}, True, False),
        ({"temperature": 0}, True, False),
        ({"presence_penalty": 0.1}, False, True),
        ({"frequency_penalty": -0.1}, False, True),
        ({"repetition_penalty": 1.1}, False, True),
    ],
)
def test_kinds_of_sampling(
    changes: dict[str, Any], *, is_greedy: bool, has_penalties: bool
) -> None:
    params = SamplingParams(**changes)
    assert (params.is_greedy, params.has_penalties) == (is_greedy, has_penalties)


def make_request(num_computed: int, outputs: list[int]) -> Request:
    return Request(
        request_id=1,
        prompt_token_ids=(10, 11, 12),
        params=SamplingParams(),
        seed=0,
        max_tokens=16,
        num_computed=num_computed,
        output_token_ids=outputs,
    )


def test_token_ids_of_any_span_cross_from_prompt_to_output() -> None:
    request = make_request(0, [20, 21, 22])
    all_tokens = (10, 11, 12, 20, 21, 22)
    for start in range(7):
        for end in range(start, 7):
            assert request.token_ids(start, end) == all_tokens[start:end], (start, end)


def test_requests_do_not_share_what_they_own() -> None:
    first, second = make_request(0, []), make_request(0, [])
    first.page_ids.append(3)
    first.prompt_logprobs.append(None)  # type: ignore[arg-type]
    assert not second.page_ids and not second.prompt_logprobs
    assert first != second, "requests are told apart by identity"


def test_finish_reasons_are_spelt_as_openai_does_where_it_has_a_word() -> None:
    assert [FinishReason.STOP.value, FinishReason.LENGTH.value] == ["stop", "length"]


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="\n").stop_strings == ("\n",)
    assert SamplingParams(stop=("a", "b")).stop_strings == ("a", "b")
    assert SamplingParams(stop=None).stop_strings == SamplingParams().stop_strings == ()


GRAMMARS: list[dict[str, Any]] = [
    {"json": {"type": "object"}},
    {"json": '{"type": "object"}'},
    {"json_object": True},
    {"regex": "[ab]+"},
    {"choice": ("yes", "no")},
    {"grammar": 'start: "a"'},
    {"structural_tag": {"type": "structural_tag"}},
]


@pytest.mark.parametrize("fields", GRAMMARS, ids=str)
def test_one_grammar_is_accepted(fields: dict[str, Any]) -> None:
    wanted = StructuredOutputsParams(**fields)
    SamplingParams(structured_outputs=wanted).check(**LIMITS)
    # Over the wire and back it is the same.
    params = SamplingParams(structured_outputs=wanted)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("fields", "others", "reason"),
    [
        ({}, {}, "exactly one of json, json_object, regex"),
        ({"json_object": False}, {}, "exactly one"),
        ({"regex": "a", "choice": ("b",)}, {}, "not regex and choice"),
        ({"json": {}, "structural_tag": "{}", "grammar": "x"}, {}, "json and grammar and struct"),
        ({"choice": ()}, {}, "choice"),
        ({"choice": ("a", "")}, {}, "choice"),
        ({"choice": "yes"}, {}, "choice"),
        ({"regex": 5}, {}, "regex"),
        ({"json": [1]}, {}, "json"),
        ({"json_object": "yes"}, {}, "json_object"),
        ({"regex": "a"}, {"ignore_eos": True}, "ignore_eos=true"),
        ({"regex": "a"}, {"min_tokens": 2}, "min_tokens=2"),
    ],
)
def test_what_no_grammar_is_or_none_could_be_obeyed_with(
    fields: dict[str, Any], others: dict[str, Any], reason: str
) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields), **others)
    with pytest.raises(RequestError, match=reason) as caught:
        params.check(**LIMITS)
    assert caught.value.field == "structured_outputs"
