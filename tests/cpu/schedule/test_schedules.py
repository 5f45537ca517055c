"""Random schedules on simulated memory: every one gives the tokens of a request alone."""

from collections import Counter
from random import Random

from hypothesis import event, given, settings
from hypothesis import strategies as st

from stagecoach.request import Request, SamplingParams
from tests.cpu.schedule.fake_drafter import FakeDrafter, FakePolicy
from tests.cpu.schedule.fake_executor import Harness, Limits
from tests.cpu.schedule.fake_stage import BAD, VOCAB_SIZE

BLOCK_SIZE = 4
MAX_MODEL_LEN = 24
PAGES_OF_ONE = MAX_MODEL_LEN // BLOCK_SIZE


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    max_num_seqs = draw(st.sampled_from([4, 6, 3, 2, 1]))
    num_stages = draw(st.integers(1, 4))
    num_draft_tokens = draw(st.sampled_from([3, 7, 1, 0]))
    can_chain = num_stages == 1 and not num_draft_tokens
    return Limits(
        num_stages=num_stages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(
            st.sampled_from([1, 3, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 16, 64])
        ),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        num_pages=1 + PAGES_OF_ONE + draw(st.sampled_from([0, 1, 2, 3, 30])),
        num_live_slots=max_num_seqs - draw(st.integers(0, max_num_seqs // 3)),
        num_draft_tokens=num_draft_tokens,
        has_prefix_cache=draw(st.sampled_from([True, True, True, False])),
        state_checkpoint_interval=draw(st.sampled_from([BLOCK_SIZE, 2 * BLOCK_SIZE, 0, 1])),
        num_checkpoint_slots=draw(st.sampled_from([0, 1, 2, 3, 8])),
        num_host_pages=draw(st.sampled_from([0, 0, 1, 2, 3, 20])),
        num_host_slots=draw(st.sampled_from([0, 1, 3, 8])),
        is_chaining=can_chain and draw(st.booleans()),
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


class Traffic:
    """Prompts that share beginnings, go on from answers, or stand alone."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._stems = [self._tokens(random.choice([3, 4, 8, 9, 15])) for _ in range(2)]
        self._past: list[Request] = []
        self._salts: list[str | None] = random.choice([[None], [None, "a"], [None, "a", "b", ""]])

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1, VOCAB_SIZE) for _ in range(count)]

    def add_to(self, harness: Harness) -> Request:
        """Submit one more."""
        random = self._random
        prompt = self._tokens(random.randint(1, random.choice([4, 16])))
        kind = random.choice(["alone", "stem", "stem", "stem", "turn", "turn", "again"])
        if kind == "stem":
            stem = random.choice(self._stems)
            prompt = stem[: random.randint(1, len(stem))] + prompt[: random.choice([0, 1, 3, 16])]
        elif kind in ("turn", "again") and self._past:
            past = random.choice(self._past)
            prompt = list(past.prompt_token_ids)
            if kind == "turn":
                prompt += past.output_token_ids + self._tokens(random.choice([1, 3]))
        prompt = prompt[: MAX_MODEL_LEN - 2]
        if random.random() < 0.03:
            prompt[random.randrange(len(prompt))] = BAD
        params = SamplingParams(
            max_tokens=random.choice([1, 3, 12, 20, None]),
            min_tokens=random.choice([0, 1]),
            ignore_eos=random.random() < 0.8,
            stop_token_ids=random.choice([(), (), (), (4,)]),
            presence_penalty=random.choice([0.0, 0.5]),
            logprobs=random.choice([None, 0]),
            prompt_logprobs=random.choice([None, None, None, 0]),
            skip_reading_prefix_cache=random.random() < 0.05,
        )
        request = harness.add(
            prompt,
            params,
            seed=random.randrange(2),
            cache_salt=random.choice(self._salts),
            checkpoint_position=random.choice([None, None, random.randint(0, len(prompt))]),
        )
        self._past.append(request)
        return request


def play(
    harness: Harness,
    random: Random,
    num_requests: int,
    abort_rate: float,
    loss_rate: float = 0.0,
) -> None:
    """Arrivals, aborts, launches, stages and commits in any order; then all the rest.

    Args:
        loss_rate: how often all that the workers have is lost.
    """
    traffic = Traffic(random)
    added: list[Request] = []
    patience = random.choice([2, 10, 50])
    while len(added) < num_requests:
        if random.random() < abort_rate and added:
            harness.abort(random.choice(added))
        if random.random() < abort_rate / 20:
            harness.scheduler.reset_prefix_cache()
        if loss_rate and random.random() < loss_rate:
            harness.lose_workers()
        action = random.choice(["add", "launch", "advance", "advance", "commit"])
        if action == "add" and random.randrange(patience) < 2:
            added.append(traffic.add_to(harness))
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
    num_requests=st.sampled_from([5, 8, 12, 3, 1]),
    abort_rate=st.sampled_from([0.0, 0.0, 0.02, 0.1]),
    break_rate=st.sampled_from([0.0, 0.0, 0.02]),
    debug_poison=st.booleans(),
)
def test_every_schedule_gives_the_tokens_of_the_request_alone(
    sizes: Limits,
    seed: int,
    num_requests: int,
    abort_rate: float,
    break_rate: float,
    *,
    debug_poison: bool,
) -> None:
    """I6-I11, I17, I27-I30, I32, I36 and I83 on every plan; conservation always; no livelock.

    Whatever is drafted, accepted, cut or lost: what a segment replays is exactly what the slot
    lacks, and the tokens are those of plain decoding.
    """
    harness = make_harness(sizes, seed, debug_poison=debug_poison)
    random = Random(seed)
    harness.executor.break_rows = lambda segment: random.random() < break_rate
    play(harness, random, num_requests, abort_rate)
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
        play(harness, Random(seed), num_requests=8, abort_rate=0.02)
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
    assert len(ragged) > 12, ragged


def test_the_random_schedules_reach_every_kind_of_hit() -> None:
    """Hits with and without a record, copies, loads, saves in windows, evictions: all of them."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        sizes = Limits(
            num_stages=1 + seed % 4,
            max_num_batched_tokens=(5, 9, 64)[seed % 3],
            max_model_len=MAX_MODEL_LEN,
            num_pages=1 + PAGES_OF_ONE + (2, 6, 30)[seed % 3],
            num_draft_tokens=(3, 0)[seed % 5 == 0],
            has_prefix_cache=True,
            state_checkpoint_interval=BLOCK_SIZE,
            num_checkpoint_slots=2 + seed % 4,
            num_host_pages=12 * (seed % 2),
            num_host_slots=6 * (seed % 2),
        )
        harness = make_harness(sizes, seed)
        play(harness, Random(seed), num_requests=14, abort_rate=0.02)
        harness.check_outcomes()
        seen.update(_kinds(harness))
    rare = {kind: seen[kind] for kind in KINDS if seen[kind] < 5}
    assert not rare, (rare, seen)


KINDS = (
    "hit",
    "hit with record",
    "copy",
    "page load",
    "slot load",
    "store",
    "save in chunk",
    "save in window",
    "save of replayed row",
    "resumed",
    "lost",
    "error",
    "evicted for room",
    "evicted with page",
    "not finite",
)


def _kinds(harness: Harness) -> Counter[str]:
    seen: Counter[str] = Counter()
    for plan in harness.plans:
        seen["copy"] += len(plan.moves.copies)
        seen["page load"] += len(plan.moves.load_pages)
        seen["slot load"] += len(plan.moves.load_slots)
        seen["store"] += len(plan.moves.store_pages) + len(plan.moves.store_slots)
        for segment in plan.segments:
            is_hit = segment.read_slot not in (0, segment.write_slot)
            seen["hit"] += is_hit
            seen["hit with record"] += is_hit and segment.replay > 0
            for save in segment.saves:
                seen["save in window" if segment.is_window else "save in chunk"] += 1
                seen["save of replayed row"] += save.position <= segment.start
    stats = harness.scheduler.prefix_cache_stats
    seen["resumed"] += stats.num_resumed_tokens > 0
    seen["lost"] += stats.num_lost_tokens > 0
    seen["error"] += sum(bool(request.error) for request in harness.requests.values())
    seen["evicted for room"] += stats.evictions["room"]
    seen["evicted with page"] += stats.evictions["page"]
    seen["not finite"] += stats.evictions["not_finite"]
    return seen
