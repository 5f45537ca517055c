"""One plan on one rank: receive, run the stage's layers, send, and on the last stage sample.

Owns the stage's model, its memory and both ends of its boundary. Keeps no request: whatever
a step needs stands in its plan, except the sampling table of the last stage.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from stagecoach.cache.memory_plan import MemoryNeeds, MemoryPlan
from stagecoach.config import ResolvedConfig
from stagecoach.model.attn_residual import ResidualStream
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.weights import LoadProgress, load_stage
from stagecoach.pipeline.boundary import boundary_fields
from stagecoach.pipeline.handoff import Handoff
from stagecoach.pipeline.links import Links
from stagecoach.pipeline.stage import Stage, make_stages
from stagecoach.pipeline.topology import Topology, WorkerId
from stagecoach.request import TokenLogprobs
from stagecoach.runner.device_memory import DeviceMemory, memory_needs
from stagecoach.runner.logprobs import prompt_logprobs
from stagecoach.runner.sampler import sample
from stagecoach.runner.sampling_table import SamplingTable
from stagecoach.runner.step_inputs import (
    build_sample_inputs,
    build_step_tensors,
    build_target_inputs,
)
from stagecoach.schedule.step_plan import RowResult, StepPlan

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class StepOutcome(NamedTuple):
    """What one rank knows after a step."""

    rows: tuple[RowResult, ...] | None  # only on the rank that samples
    forward_seconds: float  # from the stage's input to its output, sampling left out
    wait_seconds: float  # for the stage before


class StageRunner:
    """The stage of one worker; `load`, then `allocate`, then `run` for every plan in order."""

    def __init__(self, config: ResolvedConfig, worker: WorkerId, links: Links) -> None:
        self._config = config
        self._tensor_parallel = links.tensor_parallel
        self._dtype = DTYPES[config.dtype]
        self._stage: Stage = make_stages(config.partition)[worker.stage]
        topology = Topology(
            num_stages=config.engine.pipeline_parallel_size,
            tp_size=config.engine.tensor_parallel_size,
        )
        stage, model = self._stage, config.model
        self._handoff = Handoff(
            links,
            worker,
            topology,
            incoming=() if stage.is_first else boundary_fields(model, stage.start),
            outgoing=()
            if stage.is_last
            else tuple(
                # A field that was final before this stage passes on before its first layer.
                dataclasses.replace(field, final_after=max(field.final_after, stage.start - 1))
                for field in boundary_fields(model, stage.end)
            ),
            dtype=self._dtype,
        )
        # Only the rank that samples has one.
        self._table: SamplingTable | None = None
        if worker.rank == topology.sampler_rank:
            self._table = SamplingTable(config.engine.max_num_seqs, model.vocab_size, "cpu")
        self._model: StageModel | None = None
        self._memory: DeviceMemory | None = None

    def load(self, on_progress: Callable[[int, int], None]) -> None:
        """Read this worker's weights.

        Args:
            on_progress: told the bytes done and the bytes in all.

        Raises:
            CheckpointError: names the tensor or the file.
        """
        # A decaying state reaches subnormal numbers, which cost tens of cycles each; the flag
        # belongs to the thread that computes.
        torch.set_flush_denormal(True)

        def report(progress: LoadProgress) -> None:
            on_progress(progress.num_bytes, progress.total_bytes)

        self._model = load_stage(
            self._config.checkpoint,
            self._config.model,
            self._stage,
            self._tensor_parallel,
            self._dtype,
            load_format=self._config.engine.load_format,
            seed=self._config.engine.seed,
            progress=report,
        )

    def memory_needs(self) -> MemoryNeeds:
        return memory_needs(self._config, self._stage, self._dtype)

    def allocate(self, plan: MemoryPlan) -> None:
        self._memory = DeviceMemory(self._config, self._stage, self._dtype, plan)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutcome:
        """Execute one plan; plans come in order."""
        assert self._model is not None and self._memory is not None, "load and allocate first"
        handoff, model = self._handoff, self._model
        handoff.begin_step(plan.step)
        self._memory.poison(list(plan.poison_pages), list(plan.poison_slots))
        step = build_step_tensors(plan, self._config.engine.block_size)
        began = received = time.perf_counter()
        if self._stage.is_first:
            stream = model.embed(step.token_ids_T)
        else:
            fields = handoff.receive(step.num_tokens)
            received = time.perf_counter()
            stream = model.resume(**fields)

        def send_final(layer: int, stream: ResidualStream) -> None:
            tensors = {"hidden_TH": lambda: stream.partial_TH, "bank_TBH": lambda: stream.bank_TBH}
            handoff.send_final(layer, lambda name: tensors[name]())

        send_final(self._stage.start - 1, stream)
        stream = model.forward(stream, step, self._memory.stage_memory, send_final)
        forward_seconds = time.perf_counter() - received
        rows = None
        if self._stage.is_last:
            rows = self._sample(plan, stream)
        return StepOutcome(rows, forward_seconds, wait_seconds=received - began)

    def finish(self) -> None:
        self._handoff.finish()

    def _sample(self, plan: StepPlan, stream: ResidualStream) -> tuple[RowResult, ...] | None:
        """Logits on every rank, since the head is split; tokens on rank 0 only."""
        assert self._model is not None
        table = self._table
        if table is not None:
            table.admit(plan.admissions)
        tokens: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        if plan.num_samples:
            inputs = build_sample_inputs(plan)
            logits_RV = self._model.logits(stream, inputs.token_index_R)
            if table is not None:
                sampled = sample(logits_RV, inputs.sampling_rows, inputs.positions, table)
                table.append(inputs.sampling_rows, sampled.token_ids_R)
                host = sampled.to_host()
                tokens = dict(zip(inputs.segments, host.token_ids, strict=True))
                logprobs = {
                    index: entry
                    for index, entry in zip(inputs.segments, host.logprobs, strict=True)
                    if entry is not None
                }
        targets: dict[int, tuple[TokenLogprobs, ...]] = {}
        for wanted in build_target_inputs(plan):
            logits_PV = self._model.logits(stream, wanted.token_index_P)
            if table is not None:
                targets[wanted.segment] = tuple(
                    prompt_logprobs(logits_PV, wanted.target_ids_P, wanted.num_top)
                )
        if table is None:
            return None
        return tuple(
            RowResult(
                request_id=segment.request_id,
                epoch=segment.epoch,
                token_ids=(tokens[index],) if index in tokens else (),
                logprobs=(logprobs[index],) if index in logprobs else (),
                prompt_logprobs=targets.get(index, ()),
            )
            for index, segment in enumerate(plan.segments)
        )
