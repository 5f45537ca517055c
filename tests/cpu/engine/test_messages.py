"""Every message survives its own wire and no other."""

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest

from stagecoach.cache.cache_stats import PrefixCacheStats
from stagecoach.cache.memory_plan import MemoryNeeds, MemoryPlan
from stagecoach.engine import messages
from stagecoach.engine.messages import (
    Abort,
    Allocate,
    CaptureProgress,
    EngineFailed,
    EngineReady,
    ForgetClient,
    FromWorker,
    GetStats,
    GetTimeline,
    Hello,
    LinkBroken,
    LoadProgress,
    Meet,
    Message,
    Outputs,
    Part,
    PlanDone,
    PlanTrace,
    ProfileAnswer,
    RecoveryBegan,
    RecoveryEnded,
    RequestRefused,
    RequestTrace,
    ResetPrefixCache,
    RespawnWorkers,
    RunPlan,
    Shutdown,
    StageSpan,
    StartProfile,
    StepEcho,
    StopProfile,
    Submit,
    Timeline,
    ToClient,
    ToEngine,
    TokenMasks,
    ToWorker,
    WorkerAllocated,
    WorkerApart,
    WorkerFailed,
    WorkerReady,
    WorkersEnded,
)
from stagecoach.engine.ports import CLIENT_SHIFT
from stagecoach.observe.histogram import Histogram
from stagecoach.request import MAX_SEED, FinishReason, SamplingParams, TokenLogprobs
from stagecoach.schedule.commit import Progress
from stagecoach.schedule.speculation_stats import SpeculationStats
from stagecoach.schedule.step_plan import RowResult, StepResult
from tests.engine_stats import engine_stats

pytestmark = pytest.mark.cpu

LOGPROBS = TokenLogprobs(5, -0.25, 2, (3, 5), (-0.125, float("-inf")))
PARAMS = SamplingParams(
    n=3,
    temperature=0.7,
    top_p=0.9,
    top_k=-1,
    min_p=0.05,
    presence_penalty=-1.5,
    frequency_penalty=2.0,
    repetition_penalty=1.1,
    logit_bias={0: -100.0, 163839: 5.5},
    seed=MAX_SEED,
    max_tokens=None,
    min_tokens=2,
    stop=("\n\n", "ende"),
    stop_token_ids=(7, 8),
    ignore_eos=True,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    logprobs=0,
    prompt_logprobs=20,
)
REQUEST_ID = (5 << CLIENT_SHIFT) | 12

SAMPLES: list[Message] = [
    Hello(),
    Submit(request_id=REQUEST_ID, prompt_token_ids=(1, 2, 163839), params=PARAMS, seed=MAX_SEED),
    Submit(request_id=1, prompt_token_ids=(), params=SamplingParams(), seed=0),
    Submit(
        request_id=2,
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(skip_reading_prefix_cache=True),
        seed=0,
        cache_salt="Büro 7",
        checkpoint_position=2,
    ),
    Abort(request_ids=(1, REQUEST_ID)),
    Abort(request_ids=()),
    ForgetClient(client=3),
    GetStats(query_id=9),
    GetTimeline(query_id=10, first_step=10**9),
    ResetPrefixCache(),
    StartProfile(query_id=11, folder="Spuren/ä"),
    StopProfile(query_id=12),
    Shutdown(),
    LoadProgress(worker="worker[1,0]", done_bytes=2**40, total_bytes=2**41),
    CaptureProgress(worker="worker[1,0]", num_captured=3, num_graphs=20),
    EngineReady(num_pages=7, num_slots=5, load_seconds=1.5),
    Outputs(
        items=(
            Progress(
                request_id=REQUEST_ID,
                token_ids=(4, 5),
                logprobs=(LOGPROBS, LOGPROBS),
                prompt_logprobs=(LOGPROBS,),
                finish_reason=FinishReason.STOP,
                stop_reason=5,
                num_cached_tokens=8,
                steps=3,
                preemptions=1,
            ),
            *(Progress(request_id=2, finish_reason=reason) for reason in FinishReason),
            Progress(
                request_id=2, finish_reason=FinishReason.ERROR, error="NonFiniteError: a state"
            ),
            Progress(request_id=3),
        )
    ),
    RequestRefused(request_id=3, field="prompt", reason="must hold at least one token"),
    engine_stats(
        query_id=9,
        num_steps=1,
        loop_seconds=0.5,
        stage_busy_seconds=(0.25, 0.75),
        iteration_tokens=Histogram((1.0, 8.0), (3, 2, 1), 28.0),
        speculation=SpeculationStats(
            num_windows=1,
            num_proposed_tokens=14,
            num_draft_tokens=7,
            num_accepted_tokens=3,
            drafted_per_position=(1, 1, 1, 1, 1, 1, 1),
            accepted_per_position=(1, 1, 1, 0, 0, 0, 0),
            window_lengths=(2, 0, 0, 0, 0, 0, 0, 1),
            is_paused=True,
            num_pauses=2,
        ),
        prefix_cache=PrefixCacheStats(
            **{
                name: number
                for number, name in enumerate(PrefixCacheStats.__struct_fields__, start=1)
                if name != "evictions"
            },
            evictions={"page for a request": 3, "slot for a rung": 4},
        ),
    ),
    engine_stats(),
    Timeline(query_id=1, now=0.5, plans=(), requests=(), slot_states=b""),
    Timeline(
        query_id=2,
        now=1e9,
        plans=(
            PlanTrace(7, 1.0, 2.5, 3, 1, 40, 21, 9, (StageSpan(1.25, 1.5, 0.0), None)),
            PlanTrace(8, 3.0, None, 0, 1, 32, 0, 0, (None, None)),
        ),
        requests=(
            RequestTrace(REQUEST_ID, "sampling", 9, 8, 10, 1, 3, 2),
            RequestTrace(2, "waiting", 9, 0, 0, 0, None, 0),
        ),
        slot_states=bytes((0, 1, 2)),
    ),
    ProfileAnswer(query_id=11, paths=("traces/worker[0,0].json", "Spuren/ä.json")),
    ProfileAnswer(query_id=12, error="nothing is recorded", is_refused=True),
    EngineFailed(kind="WorkerDiedError", reason="worker[0,1] was killed – SIGKILL"),
    Allocate(memory=MemoryPlan(num_pages=3, num_slots=4)),
    Allocate(memory=MemoryPlan(num_pages=3, num_slots=9, num_host_pages=20, num_host_slots=5)),
    RunPlan(encoded_plan=bytes(range(256))),
    TokenMasks(step=10**9, masks=bytes(range(256))),
    WorkerReady(
        worker="worker[0,0]",
        needs=MemoryNeeds(bytes_per_page=0, bytes_per_slot=1, available_bytes=2**45),
    ),
    WorkerAllocated(worker="worker[0,0]"),
    StepEcho(worker="worker[0,0]", step=10**9, digest=b"\x00\xff" * 4, busy_seconds=0.5),
    StepEcho(
        worker="worker[0,0]",
        step=3,
        digest=b"12345678",
        busy_seconds=0.5,
        arrived=1e9 + 0.5,
        hop_seconds=0.25,
        differences=(0.0, 1e-12, float("inf")),
    ),
    PlanDone(
        worker="worker[3,0]",
        result=StepResult(
            step=4,
            digest=b"12345678",
            rows=(
                RowResult(request_id=REQUEST_ID, epoch=2, token_ids=()),
                RowResult(
                    request_id=2,
                    epoch=0,
                    token_ids=(1, 2),
                    draft_token_ids=(5, 6, 7),
                    confidences=(0.75, 0.5, 0.25),
                    logprobs=(LOGPROBS, LOGPROBS),
                    prompt_logprobs=(LOGPROBS,),
                ),
                RowResult(request_id=3, epoch=0, token_ids=(), is_finite=False),
                RowResult(
                    request_id=4, epoch=0, token_ids=(7,), logit_ids=(7, 9), logits=(3.5, -0.25)
                ),
            ),
            differences=(0.5,),
            forward_seconds=0.5,
            step_seconds=1.5,
            busy_seconds=1.0,
            arrived=1e9 + 0.25,
            hop_seconds=0.5,
        ),
    ),
    WorkersEnded(ranks=(0, 3), generations=(0, 7), reason="worker[0,0] was killed – SIGKILL"),
    RespawnWorkers(ranks=(1,), generation=7),
    RecoveryBegan(reason="worker[0,1] hangs"),
    RecoveryEnded(seconds=1.25),
    Part(generation=3),
    Meet(generation=4, first_step=10**9),
    WorkerApart(worker="worker[0,0]", generation=3),
    LinkBroken(worker="worker[0,0]", reason="Connection reset by peer"),
    WorkerFailed(worker="worker[0,0]", kind="CheckpointError", reason="no such tensor"),
]

WIRES: list[tuple[Any, Callable[[bytes], Message]]] = [
    (ToEngine, messages.decode_to_engine),
    (ToClient, messages.decode_to_client),
    (ToWorker, messages.decode_to_worker),
    (FromWorker, messages.decode_from_worker),
]


def test_every_message_has_a_sample_and_a_wire() -> None:
    on_wires = {kind for wire, _ in WIRES for kind in get_args(wire)}
    assert on_wires == set(Message.__subclasses__()) == {type(sample) for sample in SAMPLES}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_a_message_comes_back_equal_from_its_wires_and_is_refused_by_others(
    sample: Message,
) -> None:
    data = messages.encode(sample)
    for wire, decode in WIRES:
        if isinstance(sample, wire):
            decoded = decode(data)
            assert decoded == sample and type(decoded) is type(sample)
        else:
            with pytest.raises(msgspec.ValidationError):
                decode(data)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_a_message_is_frozen(sample: Message) -> None:
    for name in sample.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(sample, name, None)
