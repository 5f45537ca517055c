"""LLM on an engine in this process: batches, streams, aborts, threads, closing."""

import asyncio
import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stagecoach import LLM, SamplingParams, SpeculativeConfig
from stagecoach.errors import EngineDeadError
from stagecoach.model.tiny import kimi_linear_config, write_tiny_model
from stagecoach.text.chat import parse_answer
from tests.small_engine import (
    EOS,
    MAX_MODEL_LEN,
    ONLY_LETTERS,
    SHAPE,
    assert_idle,
    assert_same_completions,
    thread_engine,
    token_ids,
    write_small_draft,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["hello", [7, 8, 9], "a longer prompt that needs more than one chunk", [EOS], "hello"]


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    together = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert token_ids(together) == token_ids(alone)
    for prompt, output in zip(PROMPTS, together, strict=True):
        assert output.prompt == (prompt if isinstance(prompt, str) else None)
        expected = list(prompt.encode()) if isinstance(prompt, str) else prompt
        assert output.prompt_token_ids == expected
    assert together[0].outputs[0].token_ids == together[4].outputs[0].token_ids


def test_prompts_may_be_one_or_many_of_any_iterable(llm: LLM) -> None:
    expected = token_ids(llm.generate([[5, 6], [7]], GREEDY))
    assert token_ids(llm.generate(([5, 6], [7]), GREEDY)) == expected
    assert token_ids(llm.generate((prompt for prompt in [[5, 6], [7]]), GREEDY)) == expected
    assert token_ids(llm.generate([5, 6], GREEDY)) == expected[:1]
    assert token_ids(llm.generate((5, 6), GREEDY)) == expected[:1]
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = llm.generate(["abc"] * 3, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    assert outputs[1].outputs[0].token_ids[:3] == outputs[2].outputs[0].token_ids


def test_more_prompts_than_the_engine_can_run_at_once(llm: LLM) -> None:
    prompts = [[number, number + 1] for number in range(25)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    assert token_ids(outputs[20:21]) == token_ids(llm.generate(prompts[20], GREEDY))


def test_numbers_agree_with_the_tokens(llm: LLM) -> None:
    before = llm.stats()
    outputs = llm.generate(PROMPTS, GREEDY)
    after = llm.stats()
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    assert after.num_prompt_tokens - before.num_prompt_tokens == num_prompt
    assert after.num_generated_tokens - before.num_generated_tokens == len(PROMPTS) * 12
    for output in outputs:
        timings = output.timings
        # A step a chunk of 24 tokens at most, or of what a plan had left, then one a token.
        num_computed = len(output.prompt_token_ids) - output.num_cached_tokens
        assert num_computed >= 1
        assert timings.num_steps >= 11 + math.ceil(num_computed / 24)
        assert timings.first_token_seconds is not None
        assert 0 < timings.first_token_seconds <= timings.total_seconds
        assert output.outputs[0].logprobs is None and output.prompt_logprobs is None


@pytest.mark.parametrize("max_tokens", [100, MAX_MODEL_LEN, None])
def test_an_output_ends_at_the_length_of_the_model(llm: LLM, max_tokens: int | None) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    [output] = llm.generate([3] * (MAX_MODEL_LEN - 8), params)
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].finish_reason == "length"


def test_the_longest_prompt_has_room_for_one_token(llm: LLM) -> None:
    [output] = llm.generate([3] * (MAX_MODEL_LEN - 1), GREEDY)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_a_stream_grows_and_ends_as_generate_does(llm: LLM) -> None:
    params = SamplingParams(
        temperature=1.0, seed=4, max_tokens=20, n=2, logit_bias=ONLY_LETTERS, logprobs=1
    )
    texts, counts = ["", ""], [0, 0]
    num_news = 0
    for output in llm.stream("stream me", params):
        num_news += 1
        for index, completion in enumerate(output.outputs):
            assert completion.text.startswith(texts[index])
            assert len(completion.token_ids) >= counts[index]
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids)
            texts[index], counts[index] = completion.text, len(completion.token_ids)
    assert num_news == 40
    [expected] = llm.generate("stream me", params)
    assert_same_completions(output.outputs, expected.outputs)
    assert output.is_finished


def test_an_asynchronous_stream_ends_as_generate_does(llm: LLM) -> None:
    async def collect(prompt: Any) -> list[int]:
        texts = [""]
        async for output in llm.generate_async(prompt, GREEDY):
            assert output.outputs[0].text.startswith(texts[-1])
            texts.append(output.outputs[0].text)
        return output.outputs[0].token_ids

    async def collect_all() -> list[list[int]]:
        return await asyncio.gather(*(collect(prompt) for prompt in PROMPTS))

    expected = [[tokens] for tokens in asyncio.run(collect_all())]
    assert expected == token_ids(llm.generate(PROMPTS, GREEDY))


def test_leaving_a_stream_ends_its_request(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, n=3)
    before = llm.stats().num_generated_tokens
    for _ in llm.stream("leave me", params):
        break
    assert_idle(llm)
    assert llm.stats().num_generated_tokens - before < 100


def test_a_stream_may_end_in_the_middle_of_another_call_of_its_thread(llm: LLM) -> None:
    """As when the garbage collector finds it."""
    stream = llm.stream("leave me", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)

    def leave() -> None:
        with llm.client._lock:
            stream.close()

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive()


def test_leaving_an_asynchronous_stream_ends_its_request(llm: LLM) -> None:
    async def leave(num_news: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        stream = llm.generate_async("leave me", params)
        for _ in range(num_news):
            await anext(stream)
        await stream.aclose()

    async def leave_all() -> None:
        await asyncio.gather(*(leave(number) for number in range(8)))

    asyncio.run(leave_all())
    assert_idle(llm)


def test_a_cancelled_task_ends_its_request(llm: LLM) -> None:
    async def cancel() -> None:
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        has_begun = asyncio.Event()

        async def consume() -> None:
            async for _ in llm.generate_async("cancel me", params):
                has_begun.set()

        task = asyncio.create_task(consume())
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert_idle(llm)


def test_an_event_loop_that_was_closed_early_does_not_stop_the_engine(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    loop = asyncio.new_event_loop()
    stream = llm.generate_async("left alone", params)
    loop.run_until_complete(anext(stream))
    # What the loop would do at its orderly end is just what must not be needed.
    loop.close()
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 12
    other = asyncio.new_event_loop()
    other.run_until_complete(stream.aclose())
    other.close()


def test_a_storm_of_aborts_leaves_nothing(llm: LLM) -> None:
    expected = token_ids(llm.generate("calm", GREEDY))
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, n=2)

    def storm(number: int) -> int:
        seen = 0
        stream = llm.stream([number] * (1 + 9 * (number % 9)), params)
        for _ in itertools.islice(stream, number % 4):
            seen += 1
        stream.close()
        return seen

    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(storm, range(40)))
    assert seen == [number % 4 for number in range(40)]
    assert_idle(llm)
    assert token_ids(llm.generate("calm", GREEDY)) == expected


def test_several_threads_generate_at_once(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=10) for seed in range(12)]
    alone = [llm.generate("together", item)[0].outputs[0] for item in params]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda item: llm.generate("together", item)[0], params))
    assert [output.outputs[0] for output in together] == alone


def test_a_chat_is_a_generate_of_its_rendering(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = llm.chat(messages, GREEDY)
    output = answer.request
    assert output.prompt_token_ids == llm.render_chat(messages)
    assert token_ids([output]) == token_ids(llm.generate(llm.render_chat(messages), GREEDY))
    expected = parse_answer(
        "kimi_k3",
        llm.tokenizer,
        output.outputs[0].token_ids,
        prompt_token_ids=output.prompt_token_ids,
    )
    assert answer.messages == [expected]


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_begins_in_the_channel_that_the_prompt_opens(llm: LLM, thinking: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logit_bias=ONLY_LETTERS)
    [said] = llm.chat([{"role": "user", "content": "hi"}], params, thinking=thinking).messages
    written, empty = (said.reasoning, said.content)[:: 1 if thinking else -1]
    assert (len(written), empty) == (4, "")


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_stop_string_ends_the_message_too(llm: LLM, is_kept: bool) -> None:
    messages = [{"role": "user", "content": "hi"}]
    params = {"temperature": 0.0, "max_tokens": 12, "logit_bias": ONLY_LETTERS}
    [whole] = llm.chat(messages, SamplingParams(**params)).messages
    stop = whole.reasoning[5:7]
    stopping = SamplingParams(**params, stop=stop, include_stop_str_in_output=is_kept)
    answer = llm.chat(messages, stopping)
    end = whole.reasoning.index(stop) + (len(stop) if is_kept else 0)
    assert answer.messages[0].reasoning == whole.reasoning[:end]
    assert answer.request.outputs[0].text == whole.reasoning[:end]


def test_a_model_that_is_no_k3_chats_by_its_template(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, kimi_linear_config(SHAPE), seed=3)
    template = "{% for message in messages %}{{ message.content }}<|end_of_msg|>{% endfor %}A:"
    (tmp_path / "chat_template.jinja").write_text(template)
    with thread_engine(tmp_path) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, logit_bias=ONLY_LETTERS)
        answer = llm.chat([{"role": "user", "content": "hi <|end_of_msg|>"}], params)
        words = [*b"hi <|end_of_msg|>"]
        assert answer.request.prompt_token_ids == [*words, EOS, *b"A:"]
        [message] = answer.messages
        assert message.content == answer.request.outputs[0].text
        assert (len(message.content), message.reasoning) == (6, "")


def test_a_closed_engine_says_so(folder: Path) -> None:
    llm = thread_engine(folder)
    llm.generate("hello", GREEDY)
    llm.close()
    llm.close()
    for call in (lambda: llm.generate("hello", GREEDY), llm.stats):
        with pytest.raises(EngineDeadError, match="closed"):
            call()


def test_closing_ends_the_requests_that_wait(folder: Path) -> None:
    llm = thread_engine(folder)
    stream = llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        list(stream)


def test_two_engines_in_one_process(llm: LLM, folder: Path) -> None:
    expected = token_ids(llm.generate(PROMPTS, GREEDY))
    with thread_engine(folder, pipeline_parallel_size=2) as other:
        assert token_ids(other.generate(PROMPTS, GREEDY)) == expected
        assert token_ids(llm.generate(PROMPTS, GREEDY)) == expected


def test_a_draft_changes_no_token_and_its_counts_are_told(
    llm: LLM, folder: Path, tmp_path: Path
) -> None:
    draft = write_small_draft(tmp_path)
    keys: dict[str, Any] = {
        "model": str(draft),
        "num_speculative_tokens": 3,
        "confidence_schedule": False,
        "watchdog": False,
    }
    expected = token_ids(llm.generate(PROMPTS, GREEDY))
    assert llm.stats().speculation is None
    for config in (keys, SpeculativeConfig(**keys)):
        with thread_engine(folder, speculative_config=config) as speculating:
            outputs = speculating.generate(PROMPTS, GREEDY)
            assert token_ids(outputs) == expected
            stats = speculating.stats().speculation
            assert_idle(speculating)
        assert stats is not None
        timings = [output.timings for output in outputs]
        assert all(item.num_windows >= 1 for item in timings)
        assert stats.num_windows == sum(item.num_windows for item in timings)
        assert stats.num_draft_tokens == sum(item.num_draft_tokens for item in timings)
        assert stats.num_accepted_tokens == sum(item.num_accepted_tokens for item in timings)
