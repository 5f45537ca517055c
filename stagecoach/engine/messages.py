"""All that crosses a process boundary, as frozen msgspec structs.

    client --Submit, Abort, ...--> engine loop --StepPlan, Allocate, ...--> workers
    client <--Outputs, ...-------- engine loop <--StepResult, StepEcho, ...- workers

A StepPlan and a StepResult are defined in `schedule/step_plan.py`; here they only travel.
"""

import msgspec

from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.cache.memory_plan import MemoryNeeds, MemoryPlan
from stagecoach.observe.histogram import Histogram
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


class ForgetClient(Message):
    """The process of a client has ended: forget its requests, and what it may still send."""

    client: int


class GetStats(Message):
    """Ask for EngineStats."""

    query_id: int


class ResetPrefixCache(Message):
    """Forget all cached prefixes; running requests go on."""


class GetTimeline(Message):
    """Ask for the Timeline of the plans from `first_step` on."""

    query_id: int
    first_step: int


class StartProfile(Message):
    """Record what the workers execute until StopProfile; client -> loop -> workers."""

    query_id: int
    folder: str  # where the files will be; it is made


class StopProfile(Message):
    """Write down what was recorded; client -> loop -> workers."""

    query_id: int


class WorkersEnded(Message):
    """Processes of workers ended unasked; from the owner, who will start them anew when asked."""

    ranks: tuple[int, ...]
    generations: tuple[int, ...]  # that each was started for: 0, or that of its RespawnWorkers
    reason: str  # who, and how


class Shutdown(Message):
    """End the engine loop or a worker in order."""


# engine loop -> client


class LoadProgress(Message):
    """Bytes of weights that one worker has loaded; travels worker -> loop -> client."""

    worker: str
    done_bytes: int
    total_bytes: int


class CaptureProgress(Message):
    """Kinds of steps that one worker has captured as CUDA graphs; on the same way."""

    worker: str
    num_captured: int
    num_graphs: int


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
    uptime_seconds: float  # since the engine serves
    stage_busy_seconds: tuple[float, ...]  # rank 0 of each stage, not waiting for its input
    stage_hop_seconds: tuple[float, ...]  # it has a plan and waits for the stage before
    stage_idle_seconds: tuple[float, ...]  # neither busy nor in a hop; never shrinks
    num_plans_in_flight: int
    num_recoveries: int  # times that lost workers were brought back
    recovery_seconds: float  # that passed meanwhile
    iteration_tokens: Histogram  # tokens of each plan
    num_windows: int  # windows planned so far
    num_window_tokens: int  # anchors and drafts in them
    speculation: SpeculationStats | None  # None where nothing is ever drafted
    prefix_cache: PrefixCacheStats | None  # None with --no-enable-prefix-caching


class StageSpan(msgspec.Struct, frozen=True, array_like=True):
    """One plan on rank 0 of one stage; seconds of the machine's monotonic clock."""

    arrived: float  # the plan is there and the worker begins with it
    ended: float  # its result, or what it hands on, is on its way
    hop_seconds: float  # in between, waiting for the stage before


class PlanTrace(msgspec.Struct, frozen=True, array_like=True):
    """One plan on its way through the stages."""

    step: int
    launched: float  # monotonic seconds
    committed: float | None  # None: still in flight
    num_windows: int
    num_chunks: int
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    spans: tuple[StageSpan | None, ...]  # by stage; None: no word yet


class RequestTrace(msgspec.Struct, frozen=True, array_like=True):
    """One request as the scheduler has it."""

    request_id: int
    state: str  # compiling, waiting, prefilling, sampling or ready
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    slot: int | None
    num_pages: int


# Of a timeline: the loop keeps no more plans, and of thousands that wait nobody reads more.
MAX_PLANS = 256
MAX_REQUESTS = 256


class Timeline(Message):
    """The latest plans, the requests that are alive now, and the pools."""

    query_id: int
    now: float  # monotonic seconds
    plans: tuple[PlanTrace, ...]  # oldest first, at most MAX_PLANS
    requests: tuple[RequestTrace, ...]  # the oldest, at most MAX_REQUESTS
    slot_states: bytes  # one byte a state slot: 0 free, 1 a request's, 2 a checkpoint's


class ProfileAnswer(Message):
    """A StartProfile or StopProfile was carried out by all workers; or why it was not."""

    query_id: int
    error: str | None = None
    is_refused: bool = False  # nothing was done: something is recorded already, or nothing is
    paths: tuple[str, ...] = ()  # files that were written, by rank


class RespawnWorkers(Message):
    """Start these workers anew, and kill what is left of them; to the owner."""

    ranks: tuple[int, ...]
    generation: int


class RecoveryBegan(Message):
    """Workers are lost; nothing is computed until RecoveryEnded, and requests wait."""

    reason: str


class RecoveryEnded(Message):
    """All workers are back, and requests go on."""

    seconds: float


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


class TokenMasks(Message):
    """Which tokens the constrained rows of a plan may take; behind its RunPlan, to the rank that
    samples.

    int32 [M, ceil(V / 32)], little-endian: bit t of row m is token t. Rows are those of the
    constrained segments, in the plan's order: 1 + num_draft_tokens of each.
    """

    step: int
    masks: bytes


class Part(Message):
    """Let go of links, memory and graphs, and keep the weights; the answer is WorkerApart."""

    generation: int


class Meet(Message):
    """Link with all others under this generation; the answer is WorkerReady, as after a load."""

    generation: int
    first_step: int  # number of the next plan


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
    arrived: float = 0.0  # monotonic seconds
    hop_seconds: float = 0.0  # waiting for the stage before
    differences: tuple[float, ...] = ()  # as in StepResult


class PlanDone(Message):
    """The sampling worker finished a plan."""

    worker: str
    result: StepResult


class WorkerApart(Message):
    """Weights are there, and nothing else: of a worker told to part, or one that was respawned."""

    worker: str
    generation: int  # of the Part or the RespawnWorkers


class LinkBroken(Message):
    """A neighbour is gone. The worker itself is well, has let go of its links and waits."""

    worker: str
    reason: str


class WorkerFailed(Message):
    """A worker raised an error of class `kind`; it ends after sending this."""

    worker: str
    kind: str
    reason: str
    generation: int = 0  # that its process was started for


ToEngine = (
    Hello
    | Submit
    | Abort
    | ForgetClient
    | GetStats
    | GetTimeline
    | ResetPrefixCache
    | StartProfile
    | StopProfile
    | WorkersEnded
    | Shutdown
)
ToClient = (
    LoadProgress
    | CaptureProgress
    | EngineReady
    | Outputs
    | RequestRefused
    | EngineStats
    | Timeline
    | ProfileAnswer
    | RespawnWorkers
    | RecoveryBegan
    | RecoveryEnded
    | EngineFailed
)
ToWorker = Allocate | RunPlan | TokenMasks | StartProfile | StopProfile | Part | Meet | Shutdown
FromWorker = (
    LoadProgress
    | CaptureProgress
    | WorkerReady
    | WorkerAllocated
    | StepEcho
    | PlanDone
    | ProfileAnswer
    | WorkerApart
    | LinkBroken
    | WorkerFailed
)

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
