"""What the tests of pipeline, runner and engine stand on: threads, configs, a scripted port.

`ScriptedPort` is a LoopPort without threads or sockets: the loop runs in the test's own
thread, and each time it would block, the next event of the script happens. A loop that blocks
after the last event fails the test, so that nothing here can hang.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from stagecoach.cache.memory_plan import MemoryNeeds
from stagecoach.config.engine import EngineConfig, ResolvedConfig
from stagecoach.config.model import parse_model_config
from stagecoach.engine import messages
from stagecoach.engine.loop import EngineLoop
from stagecoach.engine.messages import (
    Allocate,
    FromWorker,
    Hello,
    Meet,
    Outputs,
    Part,
    PlanDone,
    RespawnWorkers,
    RunPlan,
    Shutdown,
    StepEcho,
    Submit,
    ToClient,
    ToEngine,
    ToWorker,
    WorkerAllocated,
    WorkerApart,
    WorkerReady,
    WorkersEnded,
)
from stagecoach.model.tiny import TinyShape, kimi_k3_config
from stagecoach.pipeline.partition import estimate_layer_costs, partition
from stagecoach.pipeline.topology import Topology
from stagecoach.request import FinishReason, SamplingParams
from stagecoach.schedule.step_plan import RowResult, Segment, StepPlan, StepResult, plan_digest

TIMEOUT_SECONDS = 30.0

T = TypeVar("T")
M = TypeVar("M", bound=messages.Message)


def in_threads(
    calls: Sequence[Callable[[], T]], timeout_seconds: float = TIMEOUT_SECONDS
) -> list[T]:
    """Run all calls at once, each in a thread; their results, or the error that came first."""
    done: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()

    def run(index: int, call: Callable[[], T]) -> None:
        try:
            done.put((index, call(), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            done.put((index, None, error))

    for index, call in enumerate(calls):
        threading.Thread(target=run, args=(index, call), daemon=True).start()
    results: dict[int, T] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(results) < len(calls):
        try:
            index, result, error = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            hanging = sorted(set(range(len(calls))) - results.keys())
            raise AssertionError(f"calls {hanging} hang") from None
        if error is not None:
            raise error
        results[index] = cast(T, result)
    return [results[index] for index in range(len(calls))]


def resolved(
    shape: TinyShape | None = None, checkpoint: Path | None = None, **options: Any
) -> ResolvedConfig:
    """A resolved config of a small Kimi-K3; without `checkpoint`, of one that is nowhere."""
    model = parse_model_config(kimi_k3_config(shape or TinyShape()))
    options = {"num_threads": 1, "block_size": 4, "max_num_seqs": 4, **options}
    engine = EngineConfig(model=str(checkpoint or "nowhere"), **options)
    return ResolvedConfig(
        engine=engine,
        model=model,
        checkpoint=checkpoint or Path("nowhere"),
        dtype="float64" if engine.dtype == "auto" else engine.dtype,
        max_model_len=engine.max_model_len or 64,
        partition=partition(
            estimate_layer_costs(model), engine.pipeline_parallel_size, engine.pp_partition
        ),
    )


def submit(request_id: int, num_prompt_tokens: int = 3, **params: Any) -> Submit:
    """A greedy request for two tokens."""
    return Submit(
        request_id=request_id,
        prompt_token_ids=tuple(range(1, 1 + num_prompt_tokens)),
        params=SamplingParams(**{"temperature": 0.0, "max_tokens": 2, **params}),
        seed=0,
    )


def token_after(segment: Segment) -> int:
    """The token that the fake workers sample: never the end of a sequence."""
    return (7 * segment.request_id + segment.end) % 200


class ScriptedPort:
    """A LoopPort whose clients and workers are a script.

    Attributes:
        events: what happens when the loop blocks, one each time.
        to_clients: all that clients were sent, with the client's index.
        to_workers: all that workers were sent, in order.
        to_one_worker: what was for one of them, with its rank.
        num_wakes: how often another thread has woken the loop.
        plans: launched and not answered, oldest first.
        most_in_flight: the greatest length of `plans` so far.
        answers_allocate: workers answer Allocate at once.
        gone: ranks whose processes have ended; the others part, and meet, when they are told to.
        respawned: ranks that were started anew, all at once, in order.
        answers_respawn: those load at once.
        answers_meet: workers that are not gone answer Meet at once.
    """

    def __init__(self, config: ResolvedConfig, *events: Callable[[], object]) -> None:
        engine = config.engine
        self.topology = Topology(
            num_stages=engine.pipeline_parallel_size, tp_size=engine.tensor_parallel_size
        )
        self.events = deque(events)
        self.to_clients: list[tuple[int, ToClient]] = []
        self.to_workers: list[ToWorker] = []
        self.plans: deque[StepPlan] = deque()
        self.encoded: dict[int, bytes] = {}
        self.most_in_flight = 0
        self.answers_allocate = True
        self.gone: set[int] = set()
        self.respawned: list[tuple[int, ...]] = []
        self.generations: dict[int, int] = {}  # of respawned ranks
        self.answers_respawn = self.answers_meet = True
        self.next_step: int | None = None  # what the next plan must be
        self.to_one_worker: list[tuple[int, ToWorker]] = []
        self.num_wakes = 0
        self._from_clients: deque[tuple[int, ToEngine]] = deque()
        self._from_workers: deque[tuple[int, FromWorker]] = deque()

    # What tests do.

    def then(self, *events: Callable[[], object]) -> None:
        self.events.extend(events)

    def say(self, message: ToEngine, client: int = 0) -> None:
        self._from_clients.append((client, messages.decode_to_engine(messages.encode(message))))

    def reply(self, message: FromWorker, rank: int = 0) -> None:
        self._from_workers.append((rank, messages.decode_from_worker(messages.encode(message))))

    def ready(self, ranks: Sequence[int] | None = None, **available_bytes: int) -> None:
        """Workers have loaded, by default all of them; the last of them comes first.

        Args:
            available_bytes: by `rank_0` and so on, where a worker has not plenty.
        """
        for rank in reversed(range(self.topology.num_workers) if ranks is None else ranks):
            needs = MemoryNeeds(
                bytes_per_page=64,
                bytes_per_slot=128,
                available_bytes=available_bytes.get(f"rank_{rank}", 1 << 20),
            )
            self.reply(WorkerReady(worker=self.topology.worker(rank).name, needs=needs), rank)

    def lose(self, *ranks: int, reason: str = "") -> None:
        """The owner tells of the ends of these workers."""
        self.gone.update(ranks)
        names = ", ".join(self.topology.worker(rank).name for rank in ranks)
        self.say(
            WorkersEnded(
                ranks=ranks,
                generations=tuple(self.generations.get(rank, 0) for rank in ranks),
                reason=reason or f"{names} was killed by SIGKILL",
            )
        )

    def apart(self, ranks: Sequence[int], generation: int) -> None:
        """Those that live have let go of all but their weights."""
        for rank in ranks:
            if rank not in self.gone:
                worker = self.topology.worker(rank).name
                self.reply(WorkerApart(worker=worker, generation=generation), rank)

    def echo(self, plan: StepPlan, rank: int, digest: bytes | None = None) -> None:
        if digest is None:
            digest = plan_digest(self.encoded[plan.step])
        name = self.topology.worker(rank).name
        self.reply(StepEcho(worker=name, step=plan.step, digest=digest, busy_seconds=0.25), rank)

    def result(self, plan: StepPlan, digest: bytes | None = None) -> None:
        """The sampling worker answers a plan; others still owe their echo."""
        if digest is None:
            digest = plan_digest(self.encoded[plan.step])
        rows = tuple(
            RowResult(
                request_id=segment.request_id,
                epoch=segment.epoch,
                token_ids=() if segment.sampling_row is None else (token_after(segment),),
            )
            for segment in plan.segments
        )
        result = StepResult(
            step=plan.step,
            digest=digest,
            rows=rows,
            forward_seconds=0.5,
            step_seconds=2.0,
            busy_seconds=1.0,
        )
        rank = self.topology.sampler_rank
        self.reply(PlanDone(worker=self.topology.worker(rank).name, result=result), rank)

    def finish_plan(self) -> None:
        """All workers have executed the oldest plan."""
        plan = self.plans.popleft()
        for worker in self.topology.workers:
            if worker.rank != self.topology.sampler_rank:
                self.echo(plan, worker.rank)
        self.result(plan)

    def finish_all(self) -> None:
        """Execute plans, one each time the loop blocks, until none is left; then shut down."""
        if self.plans:
            self.finish_plan()
            self.events.appendleft(self.finish_all)
        else:
            self.say(Shutdown())

    def sent(self, kind: type[M], client: int | None = None) -> list[M]:
        """What clients were sent of one kind, in order."""
        return [
            message
            for index, message in self.to_clients
            if isinstance(message, kind) and client in (None, index)
        ]

    # What the loop does.

    def wait(self, timeout_seconds: float | None) -> None:
        if not self._from_clients and not self._from_workers:
            assert self.events, "the loop waits for what never comes"
            self.events.popleft()()

    def receive_clients(self) -> list[tuple[int, ToEngine]]:
        received = list(self._from_clients)
        self._from_clients.clear()
        return received

    def receive_worker(self) -> tuple[int, FromWorker] | None:
        return self._from_workers.popleft() if self._from_workers else None

    def send_workers(self, message: ToWorker) -> None:
        self.to_workers.append(messages.decode_to_worker(messages.encode(message)))
        match message:
            case Allocate() if self.answers_allocate:
                for worker in self.topology.workers:
                    self.reply(WorkerAllocated(worker=worker.name), worker.rank)
            case Part(generation=generation):
                self.plans.clear()
                self.apart(range(self.topology.num_workers), generation)
            case Meet(first_step=first_step):
                self.next_step = first_step
                if self.answers_meet:
                    ranks = range(self.topology.num_workers)
                    self.ready([rank for rank in ranks if rank not in self.gone])
            case RunPlan(encoded_plan=encoded):
                plan = StepPlan.decode(encoded)
                assert self.next_step in (None, plan.step), f"not step {self.next_step}:\n{plan}"
                self.next_step = plan.step + 1
                self.encoded[plan.step] = encoded
                self.plans.append(plan)
                self.most_in_flight = max(self.most_in_flight, len(self.plans))

    def send_worker(self, rank: int, message: ToWorker) -> None:
        sent = messages.decode_to_worker(messages.encode(message))
        self.to_workers.append(sent)
        self.to_one_worker.append((rank, sent))

    def wake(self) -> None:
        self.num_wakes += 1

    def send_client(self, client: int, message: ToClient) -> None:
        self.to_clients.append((client, messages.decode_to_client(messages.encode(message))))
        if isinstance(message, RespawnWorkers):
            assert client == 0, "the owner is the first client"
            self.respawned.append(message.ranks)
            self.generations |= dict.fromkeys(message.ranks, message.generation)
            self.plans.clear()
            if self.answers_respawn:
                self.gone.difference_update(message.ranks)
                self.apart(message.ranks, message.generation)

    def close(self) -> None: ...


class LoopRun:
    """An EngineLoop that one client greeted and whose workers have loaded."""

    def __init__(self, **options: Any) -> None:
        self.config = resolved(debug_poison=True, **options)
        self.port = ScriptedPort(self.config)
        self.port.say(Hello())
        self.port.ready()
        self.loop = EngineLoop(self.config, self.port)

    def run(self) -> ScriptedPort:
        self.loop.run()
        return self.port


def outputs(port: ScriptedPort, request_id: int) -> list[int]:
    """The tokens that clients were told of, in order."""
    return [
        token_id
        for message in port.sent(Outputs)
        for progress in message.items
        if progress.request_id == request_id
        for token_id in progress.token_ids
    ]


def endings(port: ScriptedPort) -> dict[int, FinishReason]:
    """Why each finished request ended, by its id."""
    return {
        progress.request_id: progress.finish_reason
        for message in port.sent(Outputs)
        for progress in message.items
        if progress.finish_reason is not None
    }


def expected_tokens(message: Submit) -> list[int]:
    """What a request returns that is neither aborted nor refused, as `token_after` says."""
    num_prompt = len(message.prompt_token_ids)
    assert message.params.max_tokens is not None
    ends = range(num_prompt, num_prompt + message.params.max_tokens)
    return [(7 * message.request_id + end) % 200 for end in ends]
