"""Random schedules on simulated memory: every one gives the tokens of a request alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.request import SamplingParams
from tests.cpu.schedule.fake_executor import VOCAB_SIZE, Harness, Limits

BLOCK_SIZE = 4


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    budget = draw(st.sampled_from([1, 3, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 16, 64]))
    max_num_seqs = draw(st.integers(1, 5))
    max_model_len = 24
    pages_of_one = max_model_len // BLOCK_SIZE
    return Limits(
        num_stages=draw(st.integers(1, 4)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        num_pages=1 + draw(st.integers(pages_of_one, pages_of_one * 4)),
        num_slots=1 + draw(st.integers(1, max_num_seqs)),
    )


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[list[int], SamplingParams]:
    prompt = draw(st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=20))
    min_tokens = draw(st.sampled_from([0, 0, 3]))
    penalty = draw(st.sampled_from([0.0, 0.5]))
    params = SamplingParams(
        max_tokens=draw(st.sampled_from([3, 6, 20, None])),
        min_tokens=min_tokens,
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (4,), (5, 6)])),
        presence_penalty=penalty,
        logprobs=draw(st.sampled_from([None, 0])),
        prompt_logprobs=draw(st.sampled_from([None, 0])),
    )
    return prompt, params


@settings(max_examples=300, deadline=None)
@given(
    sizes=limits(),
    requests=st.lists(arrivals(), min_size=1, max_size=6),
    events=st.lists(st.tuples(st.sampled_from("aaxllllsssscc"), st.integers(0, 5)), max_size=80),
    debug_poison=st.booleans(),
)
def test_every_schedule_gives_the_tokens_of_the_request_alone(
    sizes: Limits,
    requests: list[tuple[list[int], SamplingParams]],
    events: list[tuple[str, int]],
    *,
    debug_poison: bool,
) -> None:
    """Arrivals, aborts, launches, stages and commits in any order (I6-I11, I29, I30, I82, I83)."""
    harness = Harness(sizes, debug_poison=debug_poison)
    pending = list(enumerate(requests))
    added = []
    for event, number in events:
        if event == "a" and pending:
            seed, (prompt, params) = pending.pop(0)
            added.append(harness.add(prompt, params, seed))
        elif event == "x" and added:
            harness.abort(added[number % len(added)])
        elif event == "l":
            harness.launch()
        elif event == "s":
            stage = number % sizes.num_stages
            if harness.executor.can_advance(stage):
                harness.executor.advance(stage)
        elif event == "c" and harness.executor.results:
            harness.commit()
    for seed, (prompt, params) in pending:
        harness.add(prompt, params, seed)
    harness.finish()
    harness.check_outcomes()
