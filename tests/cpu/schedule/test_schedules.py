"""Random schedules on simulated memory: every one gives the tokens of a request alone."""

from random import Random

from hypothesis import event, given, settings
from hypothesis import strategies as st

from stagecoach.request import SamplingParams
from tests.cpu.schedule.fake_drafter import FakeDrafter, FakePolicy
from tests.cpu.schedule.fake_executor import VOCAB_SIZE, Harness, Limits

BLOCK_SIZE = 4
MAX_MODEL_LEN = 24
PAGES_OF_ONE = MAX_MODEL_LEN // BLOCK_SIZE


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    max_num_seqs = draw(st.sampled_from([4, 6, 3, 2, 1]))
    return Limits(
        num_stages=draw(st.integers(1, 4)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(
            st.sampled_from([1, 3, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 16, 64])
        ),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        num_pages=1 + PAGES_OF_ONE + draw(st.sampled_from([0, 1, 2, 3, 30])),
        num_slots=1 + max_num_seqs - draw(st.integers(0, max_num_seqs // 3)),
        num_draft_tokens=draw(st.sampled_from([3, 7, 1, 0])),
    )


def make_harness(sizes: Limits, seed: int, *, debug_poison: bool = True) -> Harness:
    """Windows of random lengths, drafts that are right, wrong or partly right."""
    if not sizes.num_draft_tokens:
        return Harness(sizes, debug_poison=debug_poison)
    return Harness(
        sizes,
        debug_poison=debug_poison,
        policy=FakePolicy(seed),
        drafter=FakeDrafter(sizes.num_draft_tokens, seed=seed, has_confidences=seed % 3 > 0),
    )


def random_request(random: Random) -> tuple[list[int], SamplingParams]:
    prompt = [
        random.randrange(1, VOCAB_SIZE) for _ in range(random.randint(1, random.choice([4, 16])))
    ]
    params = SamplingParams(
        max_tokens=random.choice([3, 12, 20, None]),
        min_tokens=random.choice([0, 3]),
        ignore_eos=random.random() < 0.8,
        stop_token_ids=random.choice([(), (), (), (4,)]),
        presence_penalty=random.choice([0.0, 0.5]),
        logprobs=random.choice([None, 0]),
        prompt_logprobs=random.choice([None, 0]),
    )
    return prompt, params


def play(harness: Harness, random: Random, num_requests: int, abort_rate: float) -> None:
    """Arrivals, aborts, launches, stages and commits in any order; then all the rest."""
    pending = [random_request(random) for _ in range(num_requests)]
    added = []
    patience = random.choice([2, 10, 50])
    while pending:
        if random.random() < abort_rate and added:
            harness.abort(random.choice(added))
        action = random.choice(["add", "launch", "advance", "advance", "commit"])
        if action == "add" and random.randrange(patience) < 2:
            prompt, params = pending.pop()
            added.append(harness.add(prompt, params, seed=len(added)))
        elif action == "launch":
            harness.launch()
        elif action == "advance":
            stage = random.randrange(harness.limits.num_stages)
            if harness.executor.can_advance(stage):
                harness.executor.advance(stage)
        elif action == "commit" and harness.executor.results:
            harness.commit()
    harness.finish()


@settings(max_examples=250, deadline=None)
@given(
    sizes=limits(),
    seed=st.integers(0, 2**32 - 1),
    num_requests=st.sampled_from([5, 8, 3, 2, 1]),
    abort_rate=st.sampled_from([0.0, 0.0, 0.02, 0.1]),
    debug_poison=st.booleans(),
)
def test_every_schedule_gives_the_tokens_of_the_request_alone(
    sizes: Limits, seed: int, num_requests: int, abort_rate: float, *, debug_poison: bool
) -> None:
    """I6-I11, I17, I27-I30, I32, I36 and I83 on every plan; conservation always; no livelock.

    Whatever is drafted, accepted, cut or lost: what a segment replays is exactly what the slot
    lacks, and the tokens are those of plain decoding.
    """
    harness = make_harness(sizes, seed, debug_poison=debug_poison)
    play(harness, Random(seed), num_requests, abort_rate)
    harness.check_outcomes()
    event(f"preempted: {harness.scheduler.num_preemptions > 0}")
    event(f"aborted: {any(r.finish_reason.value == 'abort' for r in harness.requests.values())}")


def test_the_random_schedules_reach_what_they_are_for() -> None:
    """Preemptions, late rows and every acceptance do occur, so that the test above means it."""
    num_preemptions = num_late_rows = num_middle_chunks = num_lost_drafts = num_mixed_plans = 0
    acceptances: set[tuple[int, int]] = set()
    ragged: set[tuple[int, ...]] = set()
    for seed in range(40):
        sizes = Limits(
            num_stages=1 + seed % 4,
            max_num_batched_tokens=(3, 9, 64)[seed % 3],
            max_model_len=MAX_MODEL_LEN,
            num_pages=1 + PAGES_OF_ONE + seed % 3,
            num_draft_tokens=(3, 0)[seed % 5 == 0],
        )
        harness = make_harness(sizes, seed)
        play(harness, Random(seed), num_requests=5, abort_rate=0.02)
        harness.check_outcomes()
        num_preemptions += harness.scheduler.num_preemptions
        segments = [segment for plan in harness.plans for segment in plan.segments]
        num_middle_chunks += sum(segment.sampling_row is None for segment in segments)
        num_late_rows += len(segments) - sum(r.num_steps for r in harness.requests.values())
        if harness.policy is None:
            continue
        acceptances |= {window[1:] for window in harness.policy.windows}
        verified = sum(num_drafts for _, num_drafts, _ in harness.policy.windows)
        proposed = sum(num_drafts for _, num_drafts in harness.policy.proposals)
        num_lost_drafts += proposed - verified
        for plan in harness.plans:
            ragged.add(tuple(s.num_draft_tokens for s in plan.segments if s.is_window))
            kinds = {(s.is_window, s.num_draft_tokens > 0) for s in plan.segments}
            num_mixed_plans += kinds >= {(True, True), (False, False)}
    assert num_preemptions > 20 and num_late_rows > 10 and num_middle_chunks > 100, (
        num_preemptions,
        num_late_rows,
        num_middle_chunks,
    )
    assert num_lost_drafts > 100 and num_mixed_plans > 3, (num_lost_drafts, num_mixed_plans)
    assert acceptances == {(most, m) for most in (1, 2, 3) for m in range(most + 1)}
    assert len(ragged) > 20, ragged
