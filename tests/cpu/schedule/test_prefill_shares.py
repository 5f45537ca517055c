"""How prompts are divided into plans, and how busy that keeps the stages of a pipeline."""

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.cache.prefix_cache import PrefixCache
from stagecoach.request import Request, SamplingParams
from stagecoach.schedule.prefill_shares import PrefillShares
from stagecoach.schedule.scheduler import Scheduler
from stagecoach.schedule.step_plan import RowResult, StepPlan, StepResult

pytestmark = pytest.mark.cpu

BLOCK_SIZE = 64


def shares(num_stages: int = 2, budget: int = 8192, **options: float) -> PrefillShares:
    defaults: dict[str, float] = {"balance": math.inf, "least_tokens": 256}
    return PrefillShares(num_stages=num_stages, budget=budget, **(defaults | options))  # type: ignore[arg-type]


@given(st.integers(0, 10**6), st.integers(1, 20_000), st.floats(1, 1e7))
def test_length_is_the_inverse_of_cost(start: int, num_tokens: int, balance: float) -> None:
    divided = shares(balance=balance)
    cost = divided.cost(start, start + num_tokens)
    assert abs(divided.length(start, cost) - num_tokens) <= 1e-6 * num_tokens
    assert divided.length(start, math.inf) > 10**9


def test_cost_is_that_of_every_token_by_itself() -> None:
    tokens = [1 + (position + 0.5) / 1000 for position in range(300, 1000)]
    assert shares(balance=1000.0).cost(300, 1000) == pytest.approx(sum(tokens))
    assert shares().cost(300, 1000) == 700


def test_one_stage_takes_what_it_is_given() -> None:
    share = shares(num_stages=1).begin_plan([(0, 10**6)], ())
    assert share.cut(0, 8192) == 8192
    share.take(0, 8192)
    assert not share.is_used_up and share.cut(8192, 100) == 100


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_prompt_that_fits_one_plan_is_divided_over_all_stages(num_stages: int) -> None:
    divided = shares(num_stages, budget=12 * 1024)
    costs, start, end = [], 0, 12 * 1024
    while start < end:
        share = divided.begin_plan([(start, end)], costs)
        length = share.cut(start, end - start)
        share.take(start, start + length)
        costs.append(share.taken)
        start += length
    assert costs == [end / num_stages] * num_stages


def test_short_prompts_are_spread_but_not_below_what_a_step_costs_anyway() -> None:
    divided = shares(num_stages=4)
    prompts = [(0, 200)] * 6
    share = divided.begin_plan(prompts, ())
    served = 0
    while not share.is_used_up and served < len(prompts):
        length = share.cut(0, 200)
        share.take(0, length)
        served += 1
    # A quarter of them is 300 tokens: one prompt, and of the next what is whole chunks.
    assert served == 2 and share.taken == 264
    few = divided.begin_plan(prompts[:2], ())
    assert few.cut(0, 200) == 200
    few.take(0, 200)
    assert not few.is_used_up  # the least share is 256 tokens


def test_what_is_in_flight_counts_so_that_shares_do_not_shrink() -> None:
    divided = shares(num_stages=2)
    first = divided.begin_plan([(0, 4096)], ())
    assert first.cut(0, 4096) == 2048
    second = divided.begin_plan([(2048, 4096)], (2048.0,))
    assert second.cut(2048, 2048) == 2048


def test_a_rest_that_is_hardly_longer_goes_with_the_share() -> None:
    divided = shares(num_stages=2, budget=1024)
    share = divided.begin_plan([(0, 4 * 1024)], ())
    assert share.cut(0, 1100) == 1100 and not share.is_used_up
    share = divided.begin_plan([(0, 4 * 1024)], ())
    assert share.cut(0, 1200) == 1024 and share.is_used_up


def test_a_cut_ends_where_the_kernels_chunks_do() -> None:
    share = shares(num_stages=2, budget=1000).begin_plan([(0, 10**5)], ())
    assert share.cut(30, 1500) == 994  # [30, 1024)
    share = shares(num_stages=2, budget=20, least_tokens=20).begin_plan([(0, 10**5)], ())
    assert share.cut(30, 1500) == 20


def test_later_chunks_are_shorter_and_cost_the_same() -> None:
    divided = shares(num_stages=2, budget=8192, balance=40_000.0)
    lengths, costs, start, end = [], [0.0, 0.0], 0, 128 * 1024
    while start < end:
        share = divided.begin_plan([(start, end)], costs[-2:])
        length = share.cut(start, min(8192, end - start))
        share.take(start, start + length)
        lengths.append(length)
        costs.append(share.taken)
        start += length
    assert lengths[0] > 2 * lengths[-2]
    assert lengths[:-1] == sorted(lengths[:-1], reverse=True)
    # Without, the last 8192 tokens would cost nearly four times as much as the first.
    assert divided.cost(end - 8192, end) > 3.7 * divided.cost(0, 8192)
    assert max(costs[2:-1]) < 1.2 * min(costs[2:-1])


class Pipeline(NamedTuple):
    """What became of a prompt on simulated stages."""

    busy_share: float
    plan_costs: list[float]


def run_prompts(
    num_prompts: int, num_tokens: int, num_stages: int, prefill: PrefillShares | None
) -> Pipeline:
    """A scheduler whose stages take `cost` for each chunk token; first samples end requests.

    A result arrives when the last stage is done; the next plan leaves at that time.
    """
    price = shares(num_stages, balance=40_000.0)
    pages = num_prompts * -(-(num_tokens + 1) // BLOCK_SIZE)
    scheduler = Scheduler(
        num_stages=num_stages,
        max_num_seqs=num_prompts,
        max_num_batched_tokens=8192,
        block_size=BLOCK_SIZE,
        max_model_len=num_tokens + 1,
        cache=PrefixCache(
            num_pages=1 + pages,
            num_slots=1 + num_prompts,
            block_size=BLOCK_SIZE,
            is_enabled=False,
        ),
        cache_root=b"",
        state_checkpoint_interval=0,
        eos_token_ids=(),
        vocab_size=9,
        prefill=prefill,
    )
    for number in range(num_prompts):
        scheduler.add(
            Request(
                request_id=number,
                prompt_token_ids=(1,) * num_tokens,
                params=SamplingParams(max_tokens=1),
                seed=0,
                max_tokens=1,
            )
        )
    stage_free, busy, now = [0.0] * num_stages, 0.0, 0.0
    in_flight: list[tuple[float, StepPlan]] = []
    costs = []
    while scheduler.has_work:
        while (plan := scheduler.plan()) is not None:
            cost = sum(price.cost(segment.start, segment.end) for segment in plan.segments)
            costs.append(cost)
            ready = now
            for stage in range(num_stages):
                stage_free[stage] = ready = max(ready, stage_free[stage]) + cost / num_stages
            busy += cost
            in_flight.append((ready, plan))
        now, plan = in_flight.pop(0)
        rows = tuple(
            RowResult(
                request_id=segment.request_id,
                epoch=segment.epoch,
                token_ids=() if segment.sampling_row is None else (5,),
            )
            for segment in plan.segments
        )
        digest = scheduler.plan_in_flight(plan.step).digest
        scheduler.commit(StepResult(step=plan.step, digest=digest, rows=rows))
    return Pipeline(busy / (now * num_stages), costs)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("num_tokens", [8192, 64 * 1024])
def test_one_prompt_keeps_the_stages_busy_as_long_as_its_number_of_plans_allows(
    num_stages: int, num_tokens: int
) -> None:
    """n / (n + p - 1) of the time, less a few percent for chunks that are not quite level."""
    divided = run_prompts(1, num_tokens, num_stages, shares(num_stages, balance=40_000.0))
    num_plans = len(divided.plan_costs)
    assert num_plans >= num_stages
    assert divided.busy_share > 0.94 * num_plans / (num_plans + num_stages - 1)
    assert divided.busy_share > run_prompts(1, num_tokens, num_stages, None).busy_share + 0.02


@pytest.mark.parametrize("num_stages", [2, 4])
def test_short_prompts_keep_all_stages_busy(num_stages: int) -> None:
    """16 prompts that one plan could take: without shares, one stage works at a time."""
    divided = run_prompts(16, 512, num_stages, shares(num_stages))
    packed = run_prompts(16, 512, num_stages, None)
    assert packed.busy_share == pytest.approx(1 / num_stages)
    num_plans = len(divided.plan_costs)
    assert num_plans == num_stages
    assert divided.busy_share == pytest.approx(num_plans / (num_plans + num_stages - 1), rel=0.02)
