"""Steps as a GPU runs them, on the CPU: Triton interpreted, and streams that do everything at once.

Packed inputs, buckets, both kinds of ends, and two stages: in float32 the same tokens and drafts as
the padded tensors give. A captured graph is replayed by running again what was captured.
"""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from stagecoach.config.engine import ResolvedConfig, SpeculativeConfig
from stagecoach.draft.tiny import TinyDraftShape, mla_draft_config, write_tiny_draft
from stagecoach.kernels.mla import reference as mla_reference
from stagecoach.model import tiny
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology
from stagecoach.request import SamplingParams
from stagecoach.runner import device_budget, device_steps, graphs
from stagecoach.runner.buckets import Buckets
from stagecoach.runner.device_steps import DeviceSteps
from stagecoach.runner.graphs import CapturedStep, LayerOutputs, StepGraphs
from stagecoach.runner.stage_runner import StageRunner
from stagecoach.runner.step_outcome import StepOutcome
from stagecoach.schedule.step_plan import StepPlan
from tests.cpu.runner.stage_runs import MEMORY, config_of, mixed_plans

# Logits of rates far below 0: the interpreter's exp says so.
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]

NUM_DRAFTS = 2
SHAPE = tiny.TinyShape(
    num_layers=3,
    mla_layers=(1,),
    hidden_size=32,
    head_dim=16,
    num_heads=1,
    dense_size=48,
    num_experts=2,
    num_experts_per_token=1,
    num_shared_experts=1,
    q_lora_rank=16,
    rope_dim=16,
    block_size=2,
)


class Stream:
    """Everything has run when the call returns."""

    cuda_stream = 0

    def __init__(self, *_: Any) -> None:
        self.device = torch.device("cpu")

    def synchronize(self) -> None: ...


class Event:
    def __init__(self, **_: Any) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: "Event") -> float:
        return 1000 * (later.time - self.time)


class Graph:
    def capture_begin(self, **_: Any) -> None: ...

    def capture_end(self) -> None: ...


class Replays:
    """Runs again what was captured, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_layers = self.num_ends = 0
        self._memory: dict[int, Any] = {}
        self._outputs: dict[int, LayerOutputs] = {}
        self._capture = StepGraphs.capture
        replays = self

        def capture(self: StepGraphs, buckets: Any, memory: Any, *rest: Any) -> float:
            replays._memory[id(self)] = memory
            return replays._capture(self, buckets, memory, *rest)

        def replay_layers(
            self: StepGraphs, step: CapturedStep, fields: dict[str, Tensor], num_tokens: int
        ) -> LayerOutputs:
            replays.num_layers += 1
            for name, field in fields.items():
                # What an older step left is no number here.
                self._fields[name].fill_(torch.nan)
                self._fields[name][:num_tokens].copy_(field)
            memory = replays._memory[id(self)]
            replays._outputs[id(self)] = self._layers(step.packed.step, memory)
            return replays._outputs[id(self)]

        def replay_end(self: StepGraphs, step: CapturedStep) -> Any:
            replays.num_ends += 1
            memory = replays._memory[id(self)]
            return self._end(step.packed, replays._outputs[id(self)], memory)

        for replacement in (capture, replay_layers, replay_end):
            monkeypatch.setattr(StepGraphs, replacement.__name__, replacement)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    """The host stands in for a GPU."""
    for name, stand_in in {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": Stream,
        "graph_pool_handle": lambda: 0,
        "mem_get_info": lambda device: (0, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    # The one that all plans of windows fall into.
    monkeypatch.setattr(
        device_steps, "make_buckets", lambda config: Buckets([4], [1 + config.num_draft_tokens])
    )
    monkeypatch.setattr(graphs, "_lent", lambda tensor: tensor)
    write_rows = mla_reference.write_rows

    def write_real_rows(
        cache_RD: Tensor, latent_TC: Tensor, k_pe_TP: Tensor, *weights: Any
    ) -> None:
        *norm, cache_rows_T = weights
        is_real_T = cache_rows_T >= 0
        write_rows(
            cache_RD,
            latent_TC[is_real_T],
            k_pe_TP[is_real_T],
            *norm,
            cache_rows_T[is_real_T].long(),
        )

    monkeypatch.setattr(mla_reference, "write_rows", write_real_rows)
    return Replays(monkeypatch)


def checkpoint(folder: Path, model: str) -> Path:
    config = {"kimi_k3": tiny.kimi_k3_config, "kimi_linear": tiny.kimi_linear_config}[model]
    tiny.write_tiny_model(folder / model, config(SHAPE), seed=3)
    return folder / model


def draft(folder: Path) -> SpeculativeConfig:
    shape = TinyDraftShape(taps=(2, -1, 0), hidden_size=SHAPE.hidden_size, num_layers=1)
    write_tiny_draft(folder / "draft", mla_draft_config(shape), seed=6)
    return SpeculativeConfig(model=str(folder / "draft"), num_speculative_tokens=NUM_DRAFTS)


def in_float32(config: ResolvedConfig) -> ResolvedConfig:
    engine = dataclasses.replace(config.engine, dtype="float32", distributed_executor_backend="uni")
    return dataclasses.replace(config, engine=engine, dtype="float32")


def grid(config: ResolvedConfig, *, is_device: bool) -> list[StageRunner]:
    """One a stage, which run one after the other."""
    topology = Topology.of(config.engine)
    mesh = ThreadMesh(topology)
    runners = [StageRunner(config, worker, mesh.links(worker)) for worker in topology.workers]
    for runner in runners:
        runner.load(lambda done_bytes, total_bytes: None)
        if is_device:
            assert runner._pass is not None
            runner._steps = runner._device_steps(runner._pass)
        runner.allocate(MEMORY)
    return runners


def simple(plan: StepPlan) -> StepPlan:
    """Nothing is asked for that a graph's end does not do."""
    return msgspec.structs.replace(
        plan,
        segments=tuple(
            msgspec.structs.replace(item, prompt_logprob_targets=(), num_prompt_logprobs=0)
            for item in plan.segments
        ),
        admissions=tuple(
            msgspec.structs.replace(
                item, params=SamplingParams(temperature=0.8 if item.request_id % 2 else 0.0)
            )
            for item in plan.admissions
        ),
    )


def assert_same_steps(config: ResolvedConfig, plans: list[StepPlan]) -> list[int]:
    """Steps of which the host was told that it may have to wait for them."""
    waited: list[int] = []

    def launch(runner: StageRunner, plan: StepPlan) -> StepOutcome:
        return runner.launch(plan, before_wait=lambda: waited.append(plan.step)).outcome()

    reference, runners = (grid(config, is_device=is_device) for is_device in (False, True))
    for plan in plans:
        *_, expected = [runner.run(plan) for runner in reference]
        *echoes, outcome = [launch(runner, plan) for runner in runners]
        assert all(echo.rows is None for echo in echoes)
        assert outcome.device_seconds is not None and outcome.rows and expected.rows
        assert outcome.device_seconds >= outcome.forward_seconds + outcome.wait_seconds > 0
        for ours, theirs in zip(outcome.rows, expected.rows, strict=True):
            assert (ours.token_ids, ours.is_finite) == (theirs.token_ids, theirs.is_finite)
            assert ours.draft_token_ids == theirs.draft_token_ids
            assert ours.confidences == pytest.approx(theirs.confidences, abs=1e-4)
            entries = (
                ours.logprobs + ours.prompt_logprobs,
                theirs.logprobs + theirs.prompt_logprobs,
            )
            for one, other in zip(*entries, strict=True):
                assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
    for runner in runners:
        runner.finish()
    return waited


def test_chunks_and_windows_over_two_stages(tmp_path: Path, replays: Replays) -> None:
    """With log-probabilities of every token: behind a graph of layers the end runs by itself."""
    config = config_of(checkpoint(tmp_path, "kimi_linear"), (2, 1))
    plans = mixed_plans()
    # Once each, by the rank that samples.
    assert assert_same_steps(in_float32(config), plans) == [plan.step for plan in plans]
    num_decodes = sum(plan.segments[-1].is_window for plan in plans)
    assert replays.num_layers == 2 * num_decodes > 0
    assert replays.num_ends == 0


def chained(plans: list[StepPlan]) -> list[StepPlan]:
    """Windows behind a sample are told nothing of it, and nothing of what it follows."""
    sampled: set[int] = set()
    result = []
    for plan in plans:
        segments = tuple(
            msgspec.structs.replace(
                item,
                token_ids=(),
                is_chained=True,
                saves=(),
                read_digest=b"",
                prompt_logprob_targets=(),
            )
            if item.num_tokens == 1 and item.request_id in sampled
            else msgspec.structs.replace(item, read_digest=b"")
            for item in plan.segments
        )
        sampled |= {item.request_id for item in segments if item.sampling_row is not None}
        result.append(msgspec.structs.replace(plan, segments=segments))
    return result


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_chained_windows(tmp_path: Path, replays: Replays, *, has_logprobs: bool) -> None:
    """Behind either end, and behind chunks, they go on from what was chosen."""
    config = config_of(checkpoint(tmp_path, "kimi_linear"), (3,))
    engine = dataclasses.replace(config.engine, async_scheduling=True)
    config = dataclasses.replace(config, engine=engine)
    plans = chained([plan if has_logprobs else simple(plan) for plan in mixed_plans()])
    assert sum(segment.is_chained for plan in plans for segment in plan.segments) > 5
    assert_same_steps(in_float32(config), plans)
    num_decodes = sum(plan.segments[-1].is_window for plan in plans)
    assert replays.num_layers == num_decodes > 0
    assert replays.num_ends == (0 if has_logprobs else num_decodes)


def test_every_stage_rehearses_both_kinds_of_steps_before_it_says_what_memory_is_left(
    tmp_path: Path, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = in_float32(config_of(checkpoint(tmp_path, "kimi_k3"), (2, 1)))
    engine = dataclasses.replace(
        config.engine, max_num_batched_tokens=4, gpu_memory_utilization=0.5
    )
    config = dataclasses.replace(config, engine=engine)
    for name, stand_in in {
        "mem_get_info": lambda device: (9_000, 10_000),
        "device_count": lambda: 1,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 200,
        "max_memory_allocated": lambda device: 700,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(device_budget, "form_plans", lambda config, has_graphs: ())
    rehearsed: list[tuple[int, bool]] = []
    rehearse = DeviceSteps.rehearse

    def noted(self: DeviceSteps, plan: StepPlan, memory: Any, *, is_computed: bool) -> Any:
        left = rehearse(self, plan, memory, is_computed=is_computed)
        assert len(left.hidden_TH) == plan.num_tokens
        rehearsed.append((len(plan.segments), is_computed))
        return left

    monkeypatch.setattr(DeviceSteps, "rehearse", noted)
    for runner in grid(config, is_device=True):
        rehearsed.clear()
        needs = runner.memory_needs()
        # A chunk, short and long; and as many windows as there may be, which are nobody's.
        assert rehearsed == [(1, True), *2 * [(1, True), (4, False)]]
        # Two stages share the device. One more step is between them: the running sum and one
        # block of four tokens.
        num_bytes = 4 * (1 + 1) * SHAPE.hidden_size * 4
        assert needs.available_bytes == (9_000 - 5_000) // 2 - (700 - 200) - num_bytes
        assert (needs.gpu_bytes, needs.gpu_share) == (5_000, 0.5)


def test_windows_with_drafts_in_graphs(tmp_path: Path, replays: Replays) -> None:
    config = config_of(checkpoint(tmp_path, "kimi_k3"), (3,), speculative_config=draft(tmp_path))
    plans = [simple(plan) for plan in mixed_plans(speculates=True)]
    waited = assert_same_steps(in_float32(config), plans)
    assert waited == [plan.step for plan in plans if not plan.segments[-1].is_window]
    num_decodes = sum(plan.segments[-1].is_window for plan in plans)
    assert replays.num_layers == replays.num_ends == num_decodes > 1
