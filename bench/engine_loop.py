"""How much of a step does the engine loop take, and how much of it lies between result and plan?

A loop over scripted workers that answer a plan at once with random tokens; messages are encoded
and decoded as between processes. All requests decode: each step is one window of every request.
Per step, from the medians of a run:

    critical   from the arrival of the encoded result to the encoded plan's departure
    loop       all that the loop does, with outputs, statistics and the encoding of both
    worker     decoding the plan, on the other side

    scripts/bench engine-loop [--profile]
"""

import argparse
import cProfile
import pstats
import random
import statistics
import sys
import time
from collections import deque
from typing import NamedTuple

from bench.report import machine_line
from stagecoach.cache.memory_plan import MemoryNeeds
from stagecoach.config.engine import EngineConfig, ResolvedConfig, SpeculativeConfig
from stagecoach.engine import messages
from stagecoach.engine.loop import EngineLoop
from stagecoach.engine.messages import (
    Allocate,
    FromWorker,
    Hello,
    PlanDone,
    RunPlan,
    StepEcho,
    Submit,
    ToClient,
    ToEngine,
    ToWorker,
    WorkerAllocated,
    WorkerReady,
)
from stagecoach.pipeline.topology import Topology
from stagecoach.request import SamplingParams
from stagecoach.resolve import resolve
from stagecoach.schedule.step_plan import RowResult, Segment, StepPlan, StepResult, plan_digest

NUM_REQUESTS = (1, 64, 256)
NUM_PROMPT_TOKENS = 1024
NUM_STEPS = 120
NUM_DRAFTS = 7
STEP_MS = 20.0  # of a GPU at 256 requests, what the loop is held against


class StepTimes(NamedTuple):
    """Milliseconds a step, medians."""

    critical: float
    loop: float
    worker: float


class ScriptedPort:
    """A LoopPort over workers that have answered when `send_workers` returns.

    Attributes:
        critical_seconds: of each step from its result's arrival to the next plan's departure.
        worker_seconds: of each plan's decoding.
        outside_seconds: so long the loop was kept by what stands for others, in all.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.critical_seconds: list[float] = []
        self.worker_seconds: list[float] = []
        self.outside_seconds = 0.0
        self._topology = Topology.of(config.engine)
        self._num_drafts = config.num_draft_tokens
        self._random = random.Random(0)
        self._from_clients: deque[tuple[int, ToEngine]] = deque([(0, Hello())])
        self._from_workers: deque[tuple[int, bytes]] = deque()
        self._received: float | None = None
        for worker in self._topology.workers:
            needs = MemoryNeeds(bytes_per_page=1, bytes_per_slot=1, available_bytes=1 << 40)
            self._reply(worker.rank, WorkerReady(worker=worker.name, needs=needs))

    def say(self, message: ToEngine) -> None:
        self._from_clients.append((0, message))

    def wait(self, timeout_seconds: float | None) -> None:
        raise AssertionError("the loop waits although everybody has answered")

    def wake(self) -> None:
        return

    def receive_clients(self) -> list[tuple[int, ToEngine]]:
        received = list(self._from_clients)
        self._from_clients.clear()
        return received

    def receive_worker(self) -> tuple[int, FromWorker] | None:
        if not self._from_workers:
            return None
        rank, data = self._from_workers.popleft()
        began = time.perf_counter()
        message = messages.decode_from_worker(data)
        if isinstance(message, PlanDone):
            self._received = began
        return rank, message

    def send_workers(self, message: ToWorker) -> None:
        data = messages.encode(message)
        if isinstance(message, Allocate):
            for worker in self._topology.workers:
                self._reply(worker.rank, WorkerAllocated(worker=worker.name))
        if not isinstance(message, RunPlan):
            return
        sent = time.perf_counter()
        if self._received is not None:
            self.critical_seconds.append(sent - self._received)
            self._received = None
        received = messages.decode_to_worker(data)
        assert isinstance(received, RunPlan)
        plan = StepPlan.decode(received.encoded_plan)
        digest = plan_digest(received.encoded_plan)
        self.worker_seconds.append(time.perf_counter() - sent)
        self._answer(plan, digest)
        self.outside_seconds += time.perf_counter() - sent

    def send_worker(self, rank: int, message: ToWorker) -> None:
        raise AssertionError(f"nobody has a grammar: {message}")

    def send_client(self, client: int, message: ToClient) -> None:
        messages.encode(message)

    def close(self) -> None:
        return

    def _reply(self, rank: int, message: FromWorker) -> None:
        self._from_workers.append((rank, messages.encode(message)))

    def _answer(self, plan: StepPlan, digest: bytes) -> None:
        rows = tuple(self._row(segment) for segment in plan.segments)
        for worker in self._topology.workers:
            if worker.rank != self._topology.sampler_rank:
                echo = StepEcho(
                    worker=worker.name, step=plan.step, digest=digest, busy_seconds=0.01
                )
                self._reply(worker.rank, echo)
        result = StepResult(step=plan.step, digest=digest, rows=rows, busy_seconds=0.01)
        name = self._topology.worker(self._topology.sampler_rank).name
        self._reply(self._topology.sampler_rank, PlanDone(worker=name, result=result))

    def _row(self, segment: Segment) -> RowResult:
        """Half of the drafts are accepted, as many as there may be are proposed."""
        token_ids: tuple[int, ...] = ()
        if segment.sampling_row is not None:
            num_accepted = segment.num_draft_tokens // 2
            start = segment.num_tokens - segment.num_draft_tokens
            accepted = segment.token_ids[start : start + num_accepted]
            token_ids = (*accepted, self._random.randrange(3, 200))
        num_proposed = self._num_drafts if segment.proposes else 0
        return RowResult(
            request_id=segment.request_id,
            epoch=segment.epoch,
            token_ids=token_ids,
            draft_token_ids=tuple(self._random.randrange(3, 200) for _ in range(num_proposed)),
            confidences=(0.9,) * num_proposed,
        )


def make_config(num_requests: int, num_stages: int, num_drafts: int) -> ResolvedConfig:
    """The demo's config, with room for all requests."""
    speculation = None
    if num_drafts:
        speculation = SpeculativeConfig(
            model="demo-draft",
            num_speculative_tokens=num_drafts,
            synthetic_acceptance_length=1 + num_drafts / 2,
        )
    return resolve(
        EngineConfig(
            model="demo",
            hf_overrides={"max_position_embeddings": 4 * NUM_PROMPT_TOKENS},
            max_model_len=4 * NUM_PROMPT_TOKENS,
            max_num_seqs=num_requests,
            max_num_batched_tokens=8192,
            pipeline_parallel_size=num_stages,
            speculative_config=speculation,
            num_gpu_blocks_override=num_requests * 64 + 64,
            log_level="warning",
        )
    )


def measure(
    num_requests: int, num_stages: int, num_drafts: int, profile: cProfile.Profile | None
) -> StepTimes:
    """One run: all prompts, then `NUM_STEPS` steps a stage of nothing but decoding."""
    config = make_config(num_requests, num_stages, num_drafts)
    port = ScriptedPort(config)
    loop = EngineLoop(config, port)
    loop.start()
    generator = random.Random(1)
    for number in range(1, 1 + num_requests):
        port.say(
            Submit(
                request_id=number,
                prompt_token_ids=tuple(
                    generator.randrange(3, 200) for _ in range(NUM_PROMPT_TOKENS)
                ),
                params=SamplingParams(
                    temperature=0.0, max_tokens=2 * NUM_PROMPT_TOKENS, ignore_eos=True
                ),
                seed=0,
            )
        )
    while loop.scheduler.num_running < num_requests or loop.scheduler.num_waiting:
        loop.step()
    for _ in range(4 * num_stages):
        loop.step()
    port.critical_seconds.clear()
    port.worker_seconds.clear()
    turns = []
    if profile is not None:
        profile.enable()
    for _ in range(NUM_STEPS * num_stages):
        began = time.perf_counter() - port.outside_seconds
        loop.step()
        turns.append(time.perf_counter() - port.outside_seconds - began)
    if profile is not None:
        profile.disable()
    return StepTimes(
        *(1e3 * statistics.median(x) for x in (port.critical_seconds, turns, port.worker_seconds))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="where the time goes at 256")
    options = parser.parse_args()
    if options.profile:
        for num_drafts in (0, NUM_DRAFTS):
            profile = cProfile.Profile()
            measure(NUM_REQUESTS[-1], 1, num_drafts, profile)
            pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(35)
        return 0
    lines = [
        machine_line(["msgspec"]),
        "",
        f"Milliseconds a step, the fastest of {options.rounds} runs; the share is that of `loop` "
        f"in a step of {STEP_MS:.0f} ms.",
        "",
        "| requests | stages | drafts | critical | loop | share | worker |",
        "| --: | --: | --: | --: | --: | --: | --: |",
    ]
    for num_requests in NUM_REQUESTS:
        for num_stages, num_drafts in ((1, 0), (1, NUM_DRAFTS), (2, 0)):
            runs = [
                measure(num_requests, num_stages, num_drafts, None) for _ in range(options.rounds)
            ]
            best = StepTimes(*map(min, zip(*runs, strict=True)))
            lines.append(
                f"| {num_requests} | {num_stages} | {num_drafts} | {best.critical:.2f} | "
                f"{best.loop:.2f} | {best.loop / STEP_MS:.0%} | {best.worker:.2f} |"
            )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
