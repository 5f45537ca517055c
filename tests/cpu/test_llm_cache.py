"""The prefix cache as callers see it: what is saved, what is kept apart, and what it says."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagecoach import LLM, RequestOutput, SamplingParams
from stagecoach.errors import RequestError
from tests.small_engine import assert_idle, thread_engine, token_ids

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# Two pages and a half of eight tokens.
PROMPT = [(7 * place) % 250 for place in range(20)]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LLM]:
    with thread_engine(folder, state_checkpoint_interval=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    """The same without a cache."""
    with thread_engine(folder, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    engine.reset_prefix_cache()
    yield engine
    assert_idle(engine)


def ask(
    llm: LLM, prompt: Any = PROMPT, params: SamplingParams = GREEDY, **options: Any
) -> RequestOutput:
    [output] = llm.generate(prompt, params, use_tqdm=False, **options)
    return output


def test_a_prompt_is_computed_once(llm: LLM, plain: LLM) -> None:
    first, second = ask(llm), ask(llm)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(PROMPT) - 1)
    assert token_ids([first]) == token_ids([second]) == token_ids([ask(plain)])


def test_a_conversation_goes_on_behind_its_last_answer(llm: LLM, plain: LLM) -> None:
    first = ask(llm)
    prompt = [*PROMPT, *first.outputs[0].token_ids, 65, 66, 67]
    second = ask(llm, prompt)
    # The newest token of an answer is never forwarded.
    assert second.num_cached_tokens == len(PROMPT) + 8 - 1
    assert token_ids([second]) == token_ids([ask(plain, prompt)])


def test_the_next_turn_of_a_chat_repeats_what_the_messages_say(folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    options: dict[str, Any] = {"tool_choice": "none"}
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    answers = []
    for is_enabled in (True, False):
        with thread_engine(folder, max_model_len=512, enable_prefix_caching=is_enabled) as llm:
            llm.chat(messages, params, **options)
            shared = llm.render_chat(messages, add_generation_prompt=False)
            # What the model wrote is not what the next turn says that it wrote.
            said = {"role": "assistant", "content": "yo"}
            turn = [*messages, said, {"role": "user", "content": "and?"}]
            second = llm.chat(turn, params, **options)
        assert second.request.num_cached_tokens == (len(shared) if is_enabled else 0)
        answers.append(second.messages)
    assert answers[0] == answers[1]


def test_a_prompt_of_one_token_has_nothing_to_share(llm: LLM) -> None:
    assert [ask(llm, [5]).num_cached_tokens for _ in range(2)] == [0, 0]


def test_salts_keep_prompts_apart(llm: LLM) -> None:
    cached = [ask(llm, cache_salt=salt).num_cached_tokens for salt in ("a", "b", None, "b", "a")]
    assert cached == [0, 0, 0, len(PROMPT) - 1, len(PROMPT) - 1]


def test_each_prompt_may_have_its_own_salt(llm: LLM) -> None:
    llm.generate([PROMPT, PROMPT], GREEDY, cache_salt=["a", None], use_tqdm=False)
    outputs = llm.generate([PROMPT] * 3, GREEDY, cache_salt=["b", "a", None], use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 19, 19]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_streams_and_chats_take_a_salt(llm: LLM) -> None:
    async def collect(salt: str | None) -> int:
        async for output in llm.generate_async(PROMPT, GREEDY, cache_salt=salt):
            last = output
        return last.num_cached_tokens

    *_, first = llm.stream(PROMPT, GREEDY, cache_salt="a")
    *_, second = llm.stream(PROMPT, GREEDY, cache_salt="a")
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 19)
    assert asyncio.run(collect("b")) == 0 and asyncio.run(collect("a")) == 19
    messages = [{"role": "user", "content": "hi"}]
    chats = [llm.chat(messages, GREEDY, cache_salt=salt) for salt in ("a", "b", "a")]
    cached = [chat.request.num_cached_tokens for chat in chats]
    assert cached[:2] == [0, 0] and cached[2] > 0


@pytest.mark.parametrize(
    ("salt", "text"),
    [
        ("", "not empty"),
        (5, "not empty"),
        (["a", 5], "not empty"),
        ("\ud800", "surrogates"),
        (["a"], "1 given for 2 prompts"),
        ([], "0 given for 2 prompts"),
    ],
)
def test_a_salt_that_is_none_is_refused(llm: LLM, salt: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        llm.generate([PROMPT, PROMPT], GREEDY, cache_salt=salt)
    assert caught.value.field == "cache_salt"


def test_a_reset_forgets_all_prefixes(llm: LLM) -> None:
    ask(llm)
    llm.reset_prefix_cache()
    assert ask(llm).num_cached_tokens == 0
    assert ask(llm).num_cached_tokens == len(PROMPT) - 1


def test_a_reset_lets_running_requests_finish(llm: LLM, plain: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    ask(llm)
    stream = llm.stream(PROMPT, params)
    next(stream)
    llm.reset_prefix_cache()
    *_, output = stream
    assert output.num_cached_tokens == len(PROMPT) - 1
    assert token_ids([output]) == token_ids([ask(plain, params=params)])


def test_a_request_may_refuse_to_read_but_is_cached(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=8, ignore_eos=True, skip_reading_prefix_cache=True
    )
    assert [ask(llm, params=params).num_cached_tokens for _ in range(2)] == [0, 0]
    assert ask(llm).num_cached_tokens == len(PROMPT) - 1


def test_completions_of_one_prompt_share_its_work(llm: LLM, plain: LLM) -> None:
    params = SamplingParams(
        temperature=1.0, seed=4, n=3, max_tokens=6, ignore_eos=True, prompt_logprobs=0, logprobs=1
    )
    before = llm.stats().prefix_cache
    output = ask(llm, params=params)
    after = llm.stats().prefix_cache
    assert before is not None and after is not None
    assert output.num_cached_tokens == 0, "the first computed it"
    assert after.num_queries - before.num_queries == 3
    assert after.num_hits - before.num_hits == 2
    assert after.num_hit_tokens - before.num_hit_tokens == 2 * (len(PROMPT) - 1)
    expected = ask(plain, params=params)
    assert token_ids([output]) == token_ids([expected])
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)


def test_seeds_of_completions_do_not_depend_on_the_cache(folder: Path) -> None:
    """Those without a seed of their own get one from the order of their requests."""
    params = SamplingParams(temperature=1.0, n=2, max_tokens=4, ignore_eos=True)
    prompts = [PROMPT, PROMPT[:9], PROMPT[:3]]
    tokens = []
    for is_enabled in (True, False):
        with thread_engine(folder, enable_prefix_caching=is_enabled) as llm:
            tokens.append(token_ids(llm.generate(prompts, params, use_tqdm=False)))
    assert tokens[0] == tokens[1]


def test_prompt_logprobs_are_computed_even_where_the_prompt_is_cached(llm: LLM, plain: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    ask(llm)
    output = ask(llm, params=params)
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None and None not in output.prompt_logprobs[1:]
    assert token_ids([output]) == token_ids([ask(plain, params=params)])


def test_statistics_add_up(llm: LLM) -> None:
    before = llm.stats().prefix_cache
    outputs = [ask(llm), ask(llm), ask(llm, PROMPT[:12])]
    after = llm.stats().prefix_cache
    assert before is not None and after is not None
    assert after.num_queries - before.num_queries == 3
    assert after.num_query_tokens - before.num_query_tokens == 2 * len(PROMPT) + 12
    assert after.num_hit_tokens - before.num_hit_tokens == sum(
        output.num_cached_tokens for output in outputs
    )
    assert after.num_checkpoints > 0 and after.num_cached_pages > 0
    assert after.hit_rate == after.num_hit_tokens / after.num_query_tokens
    # A page and a slot weigh the same each time.
    assert after.device_bytes > 0 and (after.host_bytes, after.num_host_pages) == (0, 0)
    llm.reset_prefix_cache()
    empty = llm.stats().prefix_cache
    assert empty is not None
    assert (empty.num_checkpoints, empty.num_cached_pages, empty.device_bytes) == (0, 0, 0)


def test_pages_and_states_of_a_host_tier_come_back(folder: Path, plain: LLM) -> None:
    """Four prompts that do not fit the device side by side."""
    prompts = [[number * 20 + place for place in range(20)] for number in range(4)]
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 1 + 6,
        "max_model_len": 40,
        "max_num_seqs": 1,
        "max_state_checkpoints": 1,
        "kv_offloading_size": 0.001,
    }
    with thread_engine(folder, **options) as llm:
        for _ in range(2):
            outputs = [ask(llm, prompt) for prompt in prompts]
        stats = llm.stats().prefix_cache
        assert_idle(llm)
    assert stats is not None
    assert [output.num_cached_tokens for output in outputs] == [19] * 4
    assert token_ids(outputs) == token_ids([ask(plain, prompt) for prompt in prompts])
    assert stats.num_stored > 0 and stats.num_loaded > 0
    assert stats.host_bytes > 0 and stats.num_host_checkpoints > 0


def test_verified_hits_are_counted(folder: Path) -> None:
    with thread_engine(folder, verify_cache=1.0) as llm:
        outputs = [ask(llm) for _ in range(3)]
        # A verification is done when its own sample is; this waits for it.
        ask(llm, PROMPT[::-1], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        stats = llm.stats().prefix_cache
    assert stats is not None
    assert [output.num_cached_tokens for output in outputs] == [0, 19, 19]
    assert stats.num_verified + stats.num_unverified == 2 and stats.num_verified >= 1
    assert stats.num_mismatches == 0


def test_without_a_cache_nothing_is_cached_or_told(plain: LLM) -> None:
    assert [ask(plain, cache_salt="a").num_cached_tokens for _ in range(2)] == [0, 0]
    assert plain.stats().prefix_cache is None
    plain.reset_prefix_cache()
    assert ask(plain).num_cached_tokens == 0
