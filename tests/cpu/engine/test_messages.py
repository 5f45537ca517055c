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
    EngineFailed,
    EngineReady,
    EngineStats,
    FromWorker,
    GetStats,
    Hello,
    LoadProgress,
    Message,
    Outputs,
    PlanDone,
    RequestRefused,
    ResetPrefixCache,
    RunPlan,
    Shutdown,
    StepEcho,
    Submit,
    ToClient,
    ToEngine,
    ToWorker,
    WorkerAllocated,
    WorkerFailed,
    WorkerReady,
)
from stagecoach.engine.ports import CLIENT_SHIFT
from stagecoach.request import MAX_SEED, FinishReason, SamplingParams, TokenLogprobs
from stagecoach.schedule.commit import Progress
from stagecoach.schedule.speculation_stats import SpeculationStats
from stagecoach.schedule.step_plan import RowResult, StepResult

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
    GetStats(query_id=9),
    ResetPrefixCache(),
    Shutdown(),
    LoadProgress(worker="worker[1,0]", done_bytes=2**40, total_bytes=2**41),
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
    EngineStats(
        query_id=9,
        num_steps=1,
        num_waiting=2,
        num_running=3,
        num_preemptions=4,
        num_prompt_tokens=5,
        num_generated_tokens=6,
        num_pages=7,
        num_free_pages=8,
        num_slots=9,
        num_free_slots=10,
        loop_seconds=0.5,
        forward_seconds=1.5,
        step_seconds=2.5,
        stage_busy_seconds=(0.25, 0.75),
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
    EngineStats(
        query_id=0,
        num_steps=0,
        num_waiting=0,
        num_running=0,
        num_preemptions=0,
        num_prompt_tokens=0,
        num_generated_tokens=0,
        num_pages=1,
        num_free_pages=1,
        num_slots=1,
        num_free_slots=1,
        loop_seconds=0.0,
        forward_seconds=0.0,
        step_seconds=0.0,
        stage_busy_seconds=(0.0,),
        speculation=None,
    ),
    EngineFailed(kind="WorkerDiedError", reason="worker[0,1] was killed – SIGKILL"),
    Allocate(memory=MemoryPlan(num_pages=3, num_slots=4)),
    Allocate(memory=MemoryPlan(num_pages=3, num_slots=9, num_host_pages=20, num_host_slots=5)),
    RunPlan(encoded_plan=bytes(range(256))),
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
        ),
    ),
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
