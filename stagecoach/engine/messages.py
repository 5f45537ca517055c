"""All that crosses a process boundary, as frozen msgspec structs.

    client --Submit, Abort, ...--> engine loop --StepPlan, Allocate, ...--> workers
    client <--Outputs, ...-------- engine loop <--StepResult, StepEcho, ...- workers

A StepPlan and a StepResult are defined in `schedule/step_plan.py`; here they only travel.
"""

import msgspec

from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.cache.memory_plan import MemoryNeeds, MemoryPlan
from stagecoach.request import SamplingParams
from stagecoach.schedule.commit import Progress
from stagecoach.schedule.speculation_stats import SpeculationStats
from stagecoach.schedule.step_plan import StepResult


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of everything on the wire."""


# client -> engine loop


class Hello(Message):
    """A client introduces itself; the loop answers EngineReady once it serves."""


class Submit(Message):
    """One completion. `request_id` is unique among all clients of the engine."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    cache_salt: str | None = None  # only requests with the same salt share cached prefixes
    # Prompt tokens after which a checkpoint is worth most; None: all but the last.
    checkpoint_position: int | None = None


class Abort(Message):
    """Forget these requests, wherever they are; unknown ids are ignored."""

    request_ids: tuple[int, ...]


class GetStats(Message):
    """Ask for EngineStats."""

    query_id: int


class ResetPrefixCache(Message):
    """Forget all cached prefixes; running requests go on."""


class Shutdown(Message):
    """End the engine loop or a worker in order."""


# engine loop -> client


class LoadProgress(Message):
    """Bytes of weights that one worker has loaded; travels worker -> loop -> client."""

    worker: str
    done_bytes: int
    total_bytes: int


class EngineReady(Message):
    """The engine serves."""

    num_pages: int
    num_slots: int
    load_seconds: float


class Outputs(Message):
    """What the last step gave the client's requests."""

    items: tuple[Progress, ...]


class RequestRefused(Message):
    """A submitted request can never run; nothing was kept of it."""

    request_id: int
    field: str
    reason: str


class EngineStats(Message):
    """Counts since start and the present state of queues and pools."""

    query_id: int
    num_steps: int
    num_waiting: int
    num_running: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_pages: int
    num_free_pages: int
    num_slots: int
    num_free_slots: int
    loop_seconds: float  # the loop spent planning, encoding and committing
    forward_seconds: float  # inside the last stage's layers
    step_seconds: float  # from a plan's arrival at the last stage to its result
    stage_busy_seconds: tuple[float, ...]  # rank 0 of each stage, not waiting for its input
    speculation: SpeculationStats | None  # None where nothing is ever drafted
    prefix_cache: PrefixCacheStats | None = None  # None with --no-enable-prefix-caching


class EngineFailed(Message):
    """The engine ends; `kind` is the class in `errors.py` to raise."""

    kind: str
    reason: str


# engine loop -> worker


class Allocate(Message):
    """Reserve this much memory for pages and state slots."""

    memory: MemoryPlan


class RunPlan(Message):
    """A step plan, encoded once for all workers."""

    encoded_plan: bytes


# worker -> engine loop


class WorkerReady(Message):
    """Weights are loaded; what memory this worker needs and has."""

    worker: str
    needs: MemoryNeeds


class WorkerAllocated(Message):
    worker: str


class StepEcho(Message):
    """A worker that does not sample finished a plan; the digest proves which one."""

    worker: str
    step: int
    digest: bytes
    busy_seconds: float  # not waiting for the stage before
    differences: tuple[float, ...] = ()  # as in StepResult


class PlanDone(Message):
    """The sampling worker finished a plan."""

    worker: str
    result: StepResult


class WorkerFailed(Message):
    """A worker raised an error of class `kind`; it ends after sending this."""

    worker: str
    kind: str
    reason: str


ToEngine = Hello | Submit | Abort | GetStats | ResetPrefixCache | Shutdown
ToClient = LoadProgress | EngineReady | Outputs | RequestRefused | EngineStats | EngineFailed
ToWorker = Allocate | RunPlan | Shutdown
FromWorker = LoadProgress | WorkerReady | WorkerAllocated | StepEcho | PlanDone | WorkerFailed

_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE = msgspec.msgpack.Decoder(ToEngine)
_TO_CLIENT = msgspec.msgpack.Decoder(ToClient)
_TO_WORKER = msgspec.msgpack.Decoder(ToWorker)
_FROM_WORKER = msgspec.msgpack.Decoder(FromWorker)

encode = _ENCODER.encode
decode_to_engine = _TO_ENGINE.decode
decode_to_client = _TO_CLIENT.decode
decode_to_worker = _TO_WORKER.decode
decode_from_worker = _FROM_WORKER.decode
