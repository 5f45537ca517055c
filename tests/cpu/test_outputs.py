"""From an engine's progress to a RequestOutput: the same however the progress was split."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.model.tiny import write_byte_tokenizer
from stagecoach.outputs import RequestAssembler, RequestOutput
from stagecoach.request import FinishReason, SamplingParams, TokenLogprobs
from stagecoach.schedule.commit import Progress
from stagecoach.text.tokenizer import Tokenizer, load_tokenizer
from tests.small_engine import EOS

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return load_tokenizer(folder)


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.5, 2, (token_id,), (-1.0,))


def progress(
    token_ids: Sequence[int],
    finish_reason: FinishReason | None = None,
    *,
    prompt_logprobs: Sequence[int] = (),
    stop_reason: int | None = None,
    error: str | None = None,
    steps: int = 1,
    preemptions: int = 0,
    num_cached_tokens: int = 0,
    windows: tuple[int, int, int] = (0, 0, 0),
) -> Progress:
    return Progress(
        request_id=1,
        token_ids=tuple(token_ids),
        logprobs=tuple(map(logprob, token_ids)),
        prompt_logprobs=tuple(map(logprob, prompt_logprobs)),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        error=error,
        steps=steps,
        preemptions=preemptions,
        num_cached_tokens=num_cached_tokens,
        num_windows=windows[0],
        num_draft_tokens=windows[1],
        num_accepted_tokens=windows[2],
    )


def assembler(tokenizer: Tokenizer, **fields: object) -> RequestAssembler:
    return RequestAssembler(tokenizer, "abc", PROMPT, SamplingParams(**fields))  # type: ignore[arg-type]


def test_a_fresh_output_is_empty_and_unfinished(tokenizer: Tokenizer) -> None:
    output = assembler(tokenizer, n=2).output
    assert (output.prompt, output.prompt_token_ids) == ("abc", PROMPT)
    assert [completion.index for completion in output.outputs] == [0, 1]
    assert not output.is_finished
    assert output.prompt_logprobs is None and output.outputs[0].logprobs is None
    assert output.timings.first_token_seconds is None


def test_text_arrives_as_it_becomes_certain(tokenizer: Tokenizer) -> None:
    one = assembler(tokenizer)
    assert one.absorb(0, progress(b"a\xe2\x82")) == "a"
    assert one.absorb(0, progress(b"\xac")) == "€"
    assert one.absorb(0, progress(b"\xe2", FinishReason.LENGTH)) == "�"
    [completion] = one.output.outputs
    assert completion.text == "a€�"
    assert completion.token_ids == list(b"a\xe2\x82\xac\xe2")
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert one.output.is_finished


def test_a_stop_token_is_reported_and_kept(tokenizer: Tokenizer) -> None:
    one = assembler(tokenizer)
    one.absorb(0, progress(b"ab", FinishReason.STOP, stop_reason=ord("b")))
    [completion] = one.output.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ord("b"))
    assert completion.text == "ab"


def test_a_stop_string_cuts_tokens_logprobs_and_all_that_comes_later(tokenizer: Tokenizer) -> None:
    one = assembler(tokenizer, stop=("cd",), logprobs=1)
    assert one.absorb(0, progress(b"abc")) == "ab"
    assert one.absorb(0, progress(b"def")) == ""
    assert one.output.is_finished
    # What was in flight when the engine heard of it.
    assert one.absorb(0, progress(b"ghi", FinishReason.LENGTH)) == ""
    [completion] = one.output.outputs
    assert (completion.text, completion.token_ids) == ("ab", list(b"abcd"))
    assert completion.logprobs == list(map(logprob, b"abcd"))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "cd")


def test_a_stop_string_in_the_last_tokens_beats_the_length(tokenizer: Tokenizer) -> None:
    one = assembler(tokenizer, stop=("cd",))
    one.absorb(0, progress(b"abcd", FinishReason.LENGTH))
    assert one.output.outputs[0].finish_reason == "stop"


def test_held_back_text_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    one = assembler(tokenizer, stop=("cde",))
    assert one.absorb(0, progress(b"abcd")) == "ab"
    assert one.absorb(0, progress([EOS], FinishReason.STOP)) == "cd"
    assert one.output.outputs[0].text == "abcd"


def test_completions_finish_one_by_one(tokenizer: Tokenizer) -> None:
    two = assembler(tokenizer, n=2)
    two.absorb(1, progress(b"x", FinishReason.LENGTH))
    assert not two.output.is_finished
    two.absorb(0, progress(b"y", FinishReason.STOP))
    assert two.output.is_finished
    assert [completion.text for completion in two.output.outputs] == ["y", "x"]


def test_prompt_logprobs_come_from_one_completion_with_none_first(tokenizer: Tokenizer) -> None:
    two = assembler(tokenizer, n=2, prompt_logprobs=1)
    two.absorb(1, progress((), prompt_logprobs=[2]))
    two.absorb(0, progress((), prompt_logprobs=[2]))
    two.absorb(0, progress(b"a", prompt_logprobs=[3]))
    two.absorb(1, progress(b"b", prompt_logprobs=[3]))
    assert two.output.prompt_logprobs == [None, logprob(2), logprob(3)]


def test_counts_are_summed_over_the_completions(tokenizer: Tokenizer) -> None:
    two = assembler(tokenizer, n=2)
    two.absorb(0, progress(b"a", steps=2, preemptions=1))
    two.absorb(1, progress(b"a", steps=3))
    two.absorb(0, progress(b"a", steps=5, preemptions=1))
    timings = two.output.timings
    assert (timings.num_steps, timings.num_preemptions) == (8, 1)
    assert timings.first_token_seconds is not None
    assert timings.first_token_seconds <= timings.total_seconds


def test_the_first_completion_says_how_much_of_the_prompt_was_cached(tokenizer: Tokenizer) -> None:
    two = assembler(tokenizer, n=2)
    two.absorb(0, progress(b"a", num_cached_tokens=2))
    two.absorb(1, progress(b"a", num_cached_tokens=3))
    assert two.output.num_cached_tokens == 2


def test_an_error_ends_one_completion_and_is_told(tokenizer: Tokenizer) -> None:
    two = assembler(tokenizer, n=2)
    two.absorb(0, progress(b"a"))
    text = "NonFiniteError: the logits behind token 4 are not finite"
    two.absorb(0, progress(b"", FinishReason.ERROR, error=text))
    two.absorb(1, progress(b"bc", FinishReason.LENGTH))
    failed, other = two.output.outputs
    assert (failed.finish_reason, failed.error, failed.text) == ("error", text, "a")
    assert (other.finish_reason, other.error, other.text) == ("length", None, "bc")
    assert two.output.is_finished


def test_verify_rounds_are_summed_over_the_completions(tokenizer: Tokenizer) -> None:
    two = assembler(tokenizer, n=2)
    two.absorb(0, progress(b"a"))
    assert two.output.timings.mean_acceptance_length is None
    two.absorb(0, progress(b"abc", windows=(1, 7, 2)))
    two.absorb(1, progress(b"ab", windows=(1, 3, 1)))
    two.absorb(0, progress(b"a", windows=(2, 14, 2)))
    timings = two.output.timings
    assert timings.num_windows == 3
    assert (timings.num_draft_tokens, timings.num_accepted_tokens) == (17, 3)
    assert timings.mean_acceptance_length == 2.0


def assemble(
    tokenizer: Tokenizer,
    params: SamplingParams,
    token_ids: Sequence[Sequence[int]],
    order: Sequence[tuple[int, int]],
) -> RequestOutput:
    """Feed (completion, number of tokens) by (completion, number of tokens), then the rest."""
    one = RequestAssembler(tokenizer, None, PROMPT, params)
    done = [0] * params.n
    rest = [(index, len(tokens)) for index, tokens in enumerate(token_ids)]
    for index, count in [*order, *rest]:
        total = len(token_ids[index])
        if done[index] == total:
            continue
        end = min(total, done[index] + count)
        reason = FinishReason.LENGTH if end == total else None
        before = one.output.outputs[index].text
        delta = one.absorb(index, progress(token_ids[index][done[index] : end], reason))
        assert one.output.outputs[index].text == before + delta
        done[index] = end
    assert one.output.is_finished
    return one.output


BYTES = st.sampled_from([*b"abcd", *"€é😀".encode(), 0xFF, EOS])


@settings(max_examples=200, deadline=None)
@given(
    token_ids=st.lists(st.lists(BYTES, min_size=1, max_size=20), min_size=1, max_size=3),
    stop=st.lists(st.sampled_from(["ab", "cda", "€", "b€", "😀", "d"]), max_size=2, unique=True),
    order=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=30),
    is_stop_kept=st.booleans(),
    are_specials_skipped=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_any_split_gives_the_same_output(
    tokenizer: Tokenizer,
    token_ids: list[list[int]],
    stop: list[str],
    order: list[tuple[int, int]],
    is_stop_kept: bool,
    are_specials_skipped: bool,
    min_tokens: int,
) -> None:
    params = SamplingParams(
        n=len(token_ids),
        stop=tuple(stop),
        include_stop_str_in_output=is_stop_kept,
        skip_special_tokens=are_specials_skipped,
        min_tokens=min_tokens,
        logprobs=1,
    )
    order = [(index % len(token_ids), count) for index, count in order]
    split = assemble(tokenizer, params, token_ids, order)
    whole = assemble(tokenizer, params, token_ids, [])
    assert split.outputs == whole.outputs
    for completion in whole.outputs:
        assert completion.logprobs == list(map(logprob, completion.token_ids))
        if not stop:
            special = b"<|end_of_msg|>" if not are_specials_skipped else b""
            pieces = [special if token == EOS else bytes([token]) for token in completion.token_ids]
            assert completion.text == b"".join(pieces).decode("utf-8", "replace")
