"""How tokens are chosen and where they stop, end to end on an engine in this process."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach import LLM, CompletionOutput, SamplingParams
from tests.small_engine import (
    EOS,
    LETTERS,
    ONLY_LETTERS,
    assert_idle,
    assert_same_completions,
    thread_engine,
    token_ids,
    write_small_model,
)

PROMPT = "sampling"


def complete(llm: LLM, prompt: Any = PROMPT, **fields: Any) -> CompletionOutput:
    params = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | fields))
    [output] = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0]


MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.8, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.8, "logit_bias": {65: 3.0, 66: -5.0}},
    {"temperature": 1.0, "min_tokens": 6, "ignore_eos": False},
    {"temperature": 1.0, "logprobs": 2, "prompt_logprobs": 1},
]


def test_the_same_seed_gives_the_same_output_in_any_company(llm: LLM) -> None:
    params = [
        SamplingParams(**({"seed": 100 + number, "max_tokens": 10, "ignore_eos": True} | fields))
        for number, fields in enumerate(MIXED)
    ]
    prompts = [f"prompt {number * 'x'}" for number in range(len(params))]
    pairs = list(zip(prompts, params, strict=True))
    alone = [llm.generate(prompt, item)[0].outputs for prompt, item in pairs]
    batch = [output.outputs for output in llm.generate(prompts, params)]
    reverse = [output.outputs for output in llm.generate(prompts[::-1], params[::-1])]
    for number, completions in enumerate(alone):
        assert_same_completions(batch[number], completions)
        assert_same_completions(reverse[-1 - number], completions)
    # The seed matters wherever there is a choice.
    others = [
        llm.generate(prompt, SamplingParams(temperature=1.3, seed=seed, max_tokens=10))
        for prompt, seed in ((prompts[2], 102), (prompts[2], 103))
    ]
    assert token_ids(others[0]) != token_ids(others[1])


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_n_completions_are_n_requests_with_the_next_seeds(llm: LLM, temperature: float) -> None:
    fields = {"temperature": temperature, "max_tokens": 10, "ignore_eos": True}
    [output] = llm.generate(PROMPT, SamplingParams(n=4, seed=7, **fields))
    separate = [complete(llm, seed=7 + index, **fields).token_ids for index in range(4)]
    completions = [completion.token_ids for completion in output.outputs]
    assert completions == separate
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(tokens) for tokens in completions}) == 4


def test_without_a_seed_outputs_differ_and_a_fresh_engine_repeats_them(
    llm: LLM, tmp_path: Path
) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, n=3, ignore_eos=True)

    def run(**options: Any) -> list[list[list[int]]]:
        with thread_engine(write_small_model(tmp_path / "model"), **options) as fresh:
            first = token_ids(fresh.generate([PROMPT, PROMPT], params))
            fresh.stats()
            return first + token_ids(fresh.generate(PROMPT, params))

    outputs = run()
    assert len({tuple(tokens) for completions in outputs for tokens in completions}) == 9
    assert run() == outputs
    assert run(seed=1) != outputs


def test_logit_bias_forces_and_forbids_a_token(llm: LLM) -> None:
    assert complete(llm, logit_bias={65: 100.0}, max_tokens=5).token_ids == [65] * 5
    assert complete(llm, logit_bias={65: 100.0}, max_tokens=5, temperature=1.0).text == "AAAAA"
    [first] = complete(llm, max_tokens=1).token_ids
    without = complete(llm, logit_bias={first: -100.0}, max_tokens=30, temperature=0.7, seed=1)
    assert first not in without.token_ids


def test_top_k_of_one_is_greedy(llm: LLM) -> None:
    greedy = complete(llm, max_tokens=12).token_ids
    for fields in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert complete(llm, max_tokens=12, temperature=1.3, seed=3, **fields).token_ids == greedy


def test_penalties_forbid_repetition(llm: LLM) -> None:
    bias = {65: 60.0, 66: 59.5, 67: 59.0}
    assert complete(llm, logit_bias=bias, max_tokens=6).text != "ABC"
    penalised = complete(llm, logit_bias=bias, max_tokens=3, repetition_penalty=100.0)
    assert sorted(penalised.token_ids) == [65, 66, 67]
    # Repetition counts the prompt too, the others do not.
    after_a = complete(llm, "A", logit_bias=bias, max_tokens=2, repetition_penalty=100.0)
    assert sorted(after_a.token_ids) == [66, 67]


def test_eos_ends_unless_it_is_ignored_or_too_early(llm: LLM) -> None:
    bias = {EOS: 100.0, 65: 50.0}
    ended = complete(llm, logit_bias=bias, ignore_eos=False)
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([EOS], "stop", None)
    assert ended.text == ""
    ignored = complete(llm, logit_bias=bias, max_tokens=4)
    assert (ignored.token_ids, ignored.finish_reason) == ([EOS] * 4, "length")
    late = complete(llm, logit_bias=bias, ignore_eos=False, min_tokens=3)
    assert late.token_ids == [65, 65, 65, EOS]
    assert (late.text, late.finish_reason) == ("AAA", "stop")


def test_every_end_token_of_the_tokenizer_ends_too(llm: LLM) -> None:
    for name in ("[EOS]", "[EOT]"):
        token_id = llm.tokenizer.special_id(name)
        bias = {token_id: 100.0, 65: 50.0}
        ended = complete(llm, logit_bias=bias, ignore_eos=False, min_tokens=1)
        assert (ended.token_ids, ended.finish_reason) == ([65, token_id], "stop")


def test_special_tokens_are_shown_on_demand(llm: LLM) -> None:
    bias = {EOS: 100.0}
    shown = complete(llm, logit_bias=bias, ignore_eos=False, skip_special_tokens=False)
    assert shown.text == "<|end_of_msg|>"


def test_a_stop_token_ends_and_is_named(llm: LLM) -> None:
    bias = {65: 100.0, 66: 50.0}
    ended = complete(llm, logit_bias=bias, stop_token_ids=(7, 65))
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([65], "stop", 65)
    late = complete(llm, logit_bias=bias, stop_token_ids=(65,), min_tokens=2)
    assert (late.token_ids, late.stop_reason) == ([66, 66, 65], 65)
    as_list = complete(llm, logit_bias=bias, stop_token_ids=[65])
    assert as_list.stop_reason == 65


@pytest.fixture(scope="module")
def letters(engine: LLM) -> str:
    """A greedy output of 32 letters, one a token."""
    output = complete(engine, max_tokens=32, logit_bias=ONLY_LETTERS)
    assert set(output.token_ids) <= set(LETTERS)
    assert output.text == bytes(output.token_ids).decode()
    return output.text


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("span", [(0, 1), (4, 9), (20, 32), (31, 32)])
def test_a_stop_string_is_found_across_tokens(
    llm: LLM, letters: str, span: tuple[int, int], is_kept: bool
) -> None:
    stop = letters[slice(*span)]
    begin = letters.find(stop)
    end = begin + len(stop)
    output = complete(
        llm,
        max_tokens=32,
        logit_bias=ONLY_LETTERS,
        stop=("not there", stop),
        include_stop_str_in_output=is_kept,
    )
    assert output.text == letters[: end if is_kept else begin]
    assert bytes(output.token_ids).decode() == letters[:end]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_a_stop_string_counts_only_after_min_tokens(llm: LLM, letters: str) -> None:
    stop = letters[2:4]
    for min_tokens in (4, 5, 32):
        output = complete(
            llm, max_tokens=32, logit_bias=ONLY_LETTERS, stop=[stop], min_tokens=min_tokens
        )
        ends = [end for end in range(min_tokens, 33) if letters[:end].endswith(stop)]
        if ends:
            assert output.text == letters[: ends[0] - len(stop)]
            assert output.stop_reason == stop
        else:
            assert output.text == letters
            assert (output.finish_reason, output.stop_reason) == ("length", None)


def test_streams_never_show_any_of_a_stop_string(llm: LLM, letters: str) -> None:
    stop = letters[10:16]
    end = letters.find(stop)
    params = SamplingParams(
        temperature=0.0, max_tokens=32, ignore_eos=True, logit_bias=ONLY_LETTERS, stop=(stop,)
    )
    for output in llm.stream(PROMPT, params):
        assert letters[:end].startswith(output.outputs[0].text)
    assert output.outputs[0].text == letters[:end]


def test_a_stop_string_in_one_completion_leaves_the_others_running(llm: LLM) -> None:
    fields: dict[str, Any] = {
        "temperature": 1.0,
        "max_tokens": 20,
        "logit_bias": ONLY_LETTERS,
        "ignore_eos": True,
        "n": 4,
        "seed": 1,
    }
    [free] = llm.generate(PROMPT, SamplingParams(**fields))
    # Only in one of the four.
    stop = next(
        text[3:6]
        for text in [completion.text for completion in free.outputs]
        if sum(text[3:6] in other.text for other in free.outputs) == 1
    )
    [stopped] = llm.generate(PROMPT, SamplingParams(**fields, stop=(stop,)))
    for before, after in zip(free.outputs, stopped.outputs, strict=True):
        expected = "stop" if stop in before.text else "length"
        assert after.finish_reason == expected
        assert after.text == before.text.partition(stop)[0]


# Only bytes above 127 and a few letters, so that characters of two to four bytes come up.
TEXT_BIAS = dict.fromkeys((*range(0x80, 0x100), 97, 98), 60.0)


def test_text_is_what_the_tokens_decode_to(llm: LLM) -> None:
    for seed in range(4):
        output = complete(llm, temperature=1.2, seed=seed, max_tokens=40, logit_bias=TEXT_BIAS)
        assert output.text == bytes(output.token_ids).decode("utf-8", "replace")


def test_a_character_is_streamed_whole(llm: LLM) -> None:
    params = SamplingParams(
        temperature=1.2, seed=1, max_tokens=60, logit_bias=TEXT_BIAS, ignore_eos=True
    )
    [whole] = llm.generate(PROMPT, params)
    for output in llm.stream(PROMPT, params):
        # What is shown is never taken back, though the last token may end inside a character.
        assert whole.outputs[0].text.startswith(output.outputs[0].text)
        num_shown = len(output.outputs[0].text.encode())
        assert output.is_finished or num_shown >= len(output.outputs[0].token_ids) - 3


@settings(max_examples=20, deadline=None)
@given(
    fields=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 1.3]),
            "top_k": st.sampled_from([0, 1, 3, 600]),
            "top_p": st.sampled_from([1.0, 0.5]),
            "min_p": st.sampled_from([0.0, 0.2]),
            "presence_penalty": st.sampled_from([0.0, 1.0]),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
            "logprobs": st.sampled_from([None, 2]),
            "min_tokens": st.sampled_from([0, 3]),
            "seed": st.integers(0, 2**63 - 1),
        }
    ),
    length=st.integers(1, 60),
    others=st.integers(0, 4),
)
def test_any_parameters_give_the_same_alone_and_in_a_batch(
    engine: LLM, fields: dict[str, Any], length: int, others: int
) -> None:
    params = SamplingParams(max_tokens=6, **fields)
    prompt = [token % 256 for token in range(7, 7 + length)]
    [alone] = engine.generate(prompt, params, use_tqdm=False)
    neighbours = [[number] * 20 for number in range(others)]
    noise = SamplingParams(max_tokens=9, temperature=1.0, frequency_penalty=0.5, ignore_eos=True)
    batch = engine.generate([*neighbours, prompt], [noise] * others + [params], use_tqdm=False)
    assert_same_completions(batch[-1].outputs, alone.outputs)
    assert_idle(engine)
