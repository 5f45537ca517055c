"""How much time of the loop's process does the scheduler take, with and without prefix caching?

Plans and commits steps of 64 decoding requests without a worker; every row has one token. CPU
seconds of this process, the fastest of some rounds, in which the kinds take turns.

    scripts/bench scheduler
"""

import argparse
import sys
import time
from typing import NamedTuple

from bench.report import machine_line
from stagecoach.cache.prefix_cache import PrefixCache
from stagecoach.request import Request, SamplingParams
from stagecoach.schedule.scheduler import Scheduler
from stagecoach.schedule.step_plan import RowResult, StepPlan, StepResult, plan_digest

NUM_REQUESTS = 64
BLOCK_SIZE = 64
NUM_STEPS = 150
NUM_OUTPUTS = 2 * NUM_STEPS
KINDS = {"off": None, "interval 512": 512, "interval 64": 64}
PROMPT_TOKENS = (128, 2048, 16384)


class Cost(NamedTuple):
    """Milliseconds: of the plan with all prompts, and of a step of 64 decodes."""

    prompts: float
    plan: float
    commit: float


def make_scheduler(num_prompt_tokens: int, interval: int | None) -> Scheduler:
    """All requests waiting, with memory for each."""
    pages = -(-(num_prompt_tokens + NUM_OUTPUTS) // BLOCK_SIZE)
    scheduler = Scheduler(
        num_stages=1,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=NUM_REQUESTS * num_prompt_tokens,
        block_size=BLOCK_SIZE,
        max_model_len=num_prompt_tokens + NUM_OUTPUTS,
        cache=PrefixCache(
            num_pages=1 + NUM_REQUESTS * pages,
            num_slots=1 + 3 * NUM_REQUESTS,
            block_size=BLOCK_SIZE,
            is_enabled=interval is not None,
        ),
        cache_root=b"bench",
        state_checkpoint_interval=interval or 0,
        eos_token_ids=(0,),
        vocab_size=1000,
    )
    for number in range(NUM_REQUESTS):
        prompt = tuple(1 + (number * 7 + place) % 900 for place in range(num_prompt_tokens))
        scheduler.add(
            Request(
                request_id=number,
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=NUM_OUTPUTS, ignore_eos=True),
                seed=0,
                max_tokens=NUM_OUTPUTS,
            )
        )
    return scheduler


def answer(scheduler: Scheduler, plan: StepPlan) -> StepResult:
    """One token a segment."""
    return StepResult(
        step=plan.step,
        digest=plan_digest(scheduler.plan_in_flight(plan.step).encoded),
        rows=tuple(
            RowResult(request_id=segment.request_id, epoch=segment.epoch, token_ids=(5,))
            for segment in plan.segments
        ),
    )


def measure(num_prompt_tokens: int, interval: int | None) -> Cost:
    """One run of all requests."""
    scheduler = make_scheduler(num_prompt_tokens, interval)
    plans, commits = [], []
    for _ in range(NUM_STEPS):
        began = time.process_time()
        plan = scheduler.plan()
        plans.append(time.process_time() - began)
        assert plan is not None and len(plan.segments) == NUM_REQUESTS, f"not one plan: {plan}"
        result = answer(scheduler, plan)
        began = time.process_time()
        scheduler.commit(result)
        commits.append(time.process_time() - began)
    num_decodes = NUM_STEPS - 1
    return Cost(
        1e3 * plans[0], 1e3 * sum(plans[1:]) / num_decodes, 1e3 * sum(commits[1:]) / num_decodes
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    lines = [
        machine_line(["msgspec"]),
        "",
        "| prompt tokens | prefix caching | plan of prompts, ms | plan of 64 decodes | commit |",
        "| --: | --- | --: | --: | --: |",
    ]
    for num_prompt_tokens in PROMPT_TOKENS:
        costs: dict[str, list[Cost]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind, interval in KINDS.items():
                costs[kind].append(measure(num_prompt_tokens, interval))
        for kind, runs in costs.items():
            best = Cost(*map(min, zip(*runs, strict=True)))
            lines.append(
                f"| {num_prompt_tokens} | {kind} | {best.prompts:.1f} | {best.plan:.2f} | "
                f"{best.commit:.2f} |"
            )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
