"""An engine that is driven turn by turn: what happens when is the caller's alone.

Owns the port between an EngineLoop and workers that answer at once. One turn commits one
result, so a schedule of arrivals and aborts by turns runs the same each time.
"""

from collections import deque
from collections.abc import Callable

from stagecoach.config.engine import ResolvedConfig
from stagecoach.draft.drafter import Drafter
from stagecoach.engine.loop import EngineLoop
from stagecoach.engine.messages import (
    EngineStats,
    FromWorker,
    GetStats,
    Outputs,
    PlanDone,
    RequestRefused,
    RunPlan,
    ToClient,
    ToEngine,
    ToWorker,
)
from stagecoach.fuzz.workers import Layouts, WorkerSet
from stagecoach.schedule.commit import Progress
from stagecoach.schedule.draft_policy import DraftPolicy
from stagecoach.schedule.shadow import Verdict
from stagecoach.schedule.step_plan import StepPlan


class TurnEngine:
    """A started engine; `send` what its loop shall find in the next `turn`."""

    def __init__(
        self,
        config: ResolvedConfig,
        layouts: Layouts,
        drafter: Drafter | None = None,
        make_policy: Callable[..., DraftPolicy] = DraftPolicy,
    ) -> None:
        self._port = _TurnPort()
        self._port.workers = layouts.start(config, self._port.reply, drafter)
        # A grammar is compiled in the turn that asks for it.
        self._loop = EngineLoop(
            config, self._port, make_policy, _refuse_wrong, start_compile=lambda job: job()
        )
        self._loop.start()

    @property
    def has_work(self) -> bool:
        return self._loop.scheduler.has_work

    def send(self, message: ToEngine) -> None:
        self._port.to_engine.append(message)

    def turn(self) -> list[Progress | RequestRefused]:
        """One turn of the loop; returns what its client is told of requests."""
        self._loop.step()
        self._loop.tell()
        news: list[Progress | RequestRefused] = []
        for message in self._port.take_answers():
            if isinstance(message, Outputs):
                news += message.items
            elif isinstance(message, RequestRefused):
                news.append(message)
        return news

    def stats(self) -> EngineStats:
        """Counts of the engine, whose work is done."""
        assert not self.has_work, "a turn for the answer would commit a result"
        # The last plan's echoes are still to be read.
        self._loop.step()
        self.send(GetStats(query_id=1))
        self._loop.step()
        [stats] = [item for item in self._port.take_answers() if isinstance(item, EngineStats)]
        return stats


def _refuse_wrong(verdict: Verdict) -> None:
    assert verdict.is_equal, (
        f"a hit at {verdict.position} of {len(verdict.token_ids)} tokens of request "
        f"{verdict.request_id - 1} is wrong: the state differs by {verdict.state_difference:.3g}, "
        f"the logits by {verdict.logit_difference:.3g}"
    )


def waits_for_masks(message: RunPlan) -> bool:
    """Whether TokenMasks come behind the plan."""
    plan = StepPlan.decode(message.encoded_plan)
    return any(segment.is_constrained for segment in plan.segments)


class _TurnPort:
    """LoopPort over workers that have answered when `send_workers` returns."""

    def __init__(self) -> None:
        self.workers: WorkerSet | None = None
        self.to_engine: deque[ToEngine] = deque()
        self._replies: deque[tuple[int, FromWorker]] = deque()
        self._answers: list[ToClient] = []
        # A plan that is executed when its masks are here.
        self._unmasked: RunPlan | None = None

    def wait(self, timeout_seconds: float | None) -> None:
        """Nothing ever comes later."""

    def wake(self) -> None:
        """Nobody sleeps."""

    def receive_clients(self) -> list[tuple[int, ToEngine]]:
        received = [(0, message) for message in self.to_engine]
        self.to_engine.clear()
        return received

    def receive_worker(self) -> tuple[int, FromWorker] | None:
        return self._replies.popleft() if self._replies else None

    def send_workers(self, message: ToWorker) -> None:
        assert self.workers is not None
        if isinstance(message, RunPlan) and waits_for_masks(message):
            self._unmasked = message
        else:
            self.workers.send(message)

    def send_worker(self, rank: int, message: ToWorker) -> None:
        assert self.workers is not None and self._unmasked is not None, f"unasked: {message}"
        self.workers.hand_over(rank, message)
        plan, self._unmasked = self._unmasked, None
        self.workers.send(plan)

    def send_client(self, client: int, message: ToClient) -> None:
        assert client == 0, f"one client, not {client}"
        self._answers.append(message)

    def take_answers(self) -> list[ToClient]:
        taken = self._answers
        self._answers = []
        return taken

    def reply(self, rank: int, message: FromWorker) -> None:
        if isinstance(message, PlanDone):
            # The engine would compute the request again and answer as if nothing had been.
            bad = [row.request_id - 1 for row in message.result.rows if not row.is_finite]
            assert not bad, f"step {message.result.step}: not finite in requests {bad}"
        self._replies.append((rank, message))

    def close(self) -> None:
        return
