"""Steps of one stage on a CUDA device: enqueued, and read when they have run.

Owns the stream that everything runs on, the packed inputs, and the choice between graphs and
single launches. Between the arrival of a plan and the reading of its rows the host waits for
nothing, unless the last stage's sampling parameters make it.
"""

import gc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.config.engine import ResolvedConfig
from stagecoach.model.stage_memory import StageMemory
from stagecoach.observe.log import get_logger
from stagecoach.pipeline.boundary import BoundaryField
from stagecoach.pipeline.handoff import Handoff
from stagecoach.runner.buckets import Bucket, bounds_of, make_buckets, pages_of
from stagecoach.runner.device_memory import DeviceMemory
from stagecoach.runner.graphs import CapturedStep, LayerOutputs, StepGraphs, outputs_of
from stagecoach.runner.last_stage import LastStage, no_masks
from stagecoach.runner.newest_tokens import NewestTokens
from stagecoach.runner.packed_inputs import (
    GroupBounds,
    PackedInputs,
    PackedStep,
    StepBounds,
    exact_bounds,
    num_values,
)
from stagecoach.runner.stage_pass import StagePass
from stagecoach.runner.step_outcome import DeviceStep
from stagecoach.runner.transfer import Download
from stagecoach.schedule.step_plan import RowResult, StepPlan

_LOG = get_logger(__name__)

ReceiveMasks = Callable[[], bytes]
ReadRows = Callable[[], tuple[RowResult, ...]]
OnProgress = Callable[[int, int], None]


class StageParts(NamedTuple):
    """A stage, loaded."""

    stage_pass: StagePass
    last_stage: LastStage | None
    handoff: Handoff
    incoming: tuple[BoundaryField, ...]
    dtype: torch.dtype
    is_sampler: bool
    newest: NewestTokens | None = None  # None: no window is chained


class DeviceSteps:
    """Runs the plans of one worker on its device.

    Args:
        has_graphs: decode steps are captured once memory is allocated.
    """

    def __init__(
        self, config: ResolvedConfig, parts: StageParts, device: torch.device, *, has_graphs: bool
    ) -> None:
        self._config = config
        self._parts = parts
        self._device = device
        self._buckets = make_buckets(config)
        self._has_graphs = has_graphs and bool(self._buckets.all)
        if has_graphs and not self._has_graphs:
            _LOG.warning(
                "no CUDA graphs: all --cudagraph-capture-sizes are above --max-num-seqs=%d or "
                "--max-num-batched-tokens=%d",
                config.engine.max_num_seqs,
                config.engine.max_num_batched_tokens,
            )
        self._inputs = PackedInputs(
            config.engine.block_size,
            device,
            num_values=_most_values(config, self._buckets.all),
            num_buffers=config.engine.pipeline_parallel_size + 2,
        )
        self.stream = torch.cuda.Stream(device)
        self._graphs: StepGraphs | None = None
        self._memory: DeviceMemory | None = None
        # The block was cleared on another stream.
        torch.cuda.current_stream().synchronize()

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Those that are captured, the largest first."""
        return self._buckets.all if self._has_graphs else ()

    def allocate(self, memory: DeviceMemory | None, on_progress: OnProgress) -> None:
        """Run in `memory` from now on; None: let go of what there was.

        Args:
            on_progress: told the graphs captured and the graphs in all.
        """
        self._graphs = None
        self._memory = memory
        if memory is None:
            return
        if self._has_graphs:
            self._capture(memory, on_progress)
        # Not before: an engine on a CPU needs no Triton.
        from stagecoach.kernels import late_compiles

        late_compiles.report_from_now_on()
        if self._config.engine.distributed_executor_backend != "uni":
            # The process is this worker's: what is there stays, and the collector need not look
            # through it between two steps.
            gc.collect()
            gc.freeze()

    def _capture(self, memory: DeviceMemory, on_progress: OnProgress) -> None:
        before = torch.cuda.mem_get_info(self._device)[0]
        self._graphs = self.new_graphs()
        seconds = self._graphs.capture(self.buckets, memory.stage_memory, on_progress)
        taken = before - torch.cuda.mem_get_info(self._device)[0]
        _LOG.info(
            "captured %d graphs in %.1f s; they take %.2f GiB",
            len(self._graphs) * (1 if self._parts.last_stage is None else 2),
            seconds,
            taken / 2**30,
        )

    def new_graphs(self) -> StepGraphs:
        """An empty set, to be captured."""
        return StepGraphs(
            self._config,
            self._parts.stage_pass,
            self._parts.last_stage,
            self._parts.incoming,
            self._inputs,
            dtype=self._parts.dtype,
            most_tokens=self._buckets.all[0].num_tokens,
            stream=self.stream,
        )

    @torch.inference_mode()
    def launch(
        self, plan: StepPlan, receive_masks: ReceiveMasks, before_wait: Callable[[], None]
    ) -> DeviceStep:
        """Enqueue one plan; plans come in order.

        Args:
            receive_masks: as in `StageRunner.run`.
            before_wait: as in `StageRunner.launch`.
        """
        assert self._memory is not None, "load and allocate first"
        memory, last_stage = self._memory, self._parts.last_stage
        with torch.cuda.stream(self.stream):
            self._parts.handoff.begin_step(plan.step)
            step = DeviceStep()
            step.differences = memory.prepare(plan, self._parts.newest)
            forced_accepts = None
            if last_stage is not None:
                last_stage.admit(plan)
                forced_accepts = last_stage.forced_accepts(plan)
            captured = self._captured(plan)
            if captured is None:
                packed = self._inputs.pack(plan, None, forced_accepts)
            else:
                packed = self._inputs.pack(plan, captured.bounds, forced_accepts, captured.packed)
            self._fill_in(packed)
            step.note_prepared()
            fields = self._parts.stage_pass.receive(plan.num_tokens)
            step.note_received()
            if captured is None or self._graphs is None:
                outputs = self._run_layers(packed, fields, memory.stage_memory, sends=True)
            else:
                outputs = self._graphs.replay_layers(captured, fields, plan.num_tokens)
                self._parts.handoff.send_all(lambda name: outputs.real(name, plan.num_tokens))
            if last_stage is not None:
                step.read_rows = self._run_end(
                    plan,
                    packed,
                    outputs,
                    memory.stage_memory,
                    receive_masks,
                    captured,
                    before_wait=before_wait,
                )
            step.note_enqueued()
        return step

    @torch.inference_mode()
    def rehearse(self, plan: StepPlan, memory: StageMemory, *, is_computed: bool) -> LayerOutputs:
        """Run a plan without graphs and neighbours, as if zeros had come; returns when it has run.

        Args:
            is_computed: otherwise the layers run as many tokens that are nobody's.

        Returns:
            What a step's end reads; there until it is let go of.
        """
        with torch.cuda.stream(self.stream):
            if self._parts.last_stage is not None:
                self._parts.last_stage.admit(plan)
            packed = self._inputs.pack(plan)
            self._fill_in(packed)
            fields = {
                field.name: torch.zeros(
                    plan.num_tokens,
                    *field.row_shape,
                    dtype=self._parts.dtype,
                    device=self._device,
                )
                for field in self._parts.incoming
            }
            if is_computed:
                outputs = self._run_layers(packed, fields, memory, sends=False)
            else:
                bounds = exact_bounds(plan)
                self._inputs.clear(bounds)
                nobodys = self._inputs.view(bounds)
                outputs = self._run_layers(nobodys, fields, memory, sends=False)
                packed = self._inputs.pack(plan)
            if self._parts.last_stage is not None:
                self._run_end(plan, packed, outputs, memory, no_masks)
            self.stream.synchronize()
        return outputs

    def _fill_in(self, packed: PackedStep) -> None:
        # In the order of the stream, the step before has chosen by then.
        if self._parts.newest is not None:
            self._parts.newest.fill_in(packed)

    def _run_layers(
        self, packed: PackedStep, fields: dict[str, Tensor], memory: StageMemory, *, sends: bool
    ) -> LayerOutputs:
        """Launch the stage's layers one kernel after the other."""
        stage_pass = self._parts.stage_pass
        at = stage_pass.enter(packed.step, fields)
        return outputs_of(stage_pass, stage_pass.run(at, packed.step, memory, sends=sends))

    def _run_end(
        self,
        plan: StepPlan,
        packed: PackedStep,
        outputs: LayerOutputs,
        memory: StageMemory,
        receive_masks: ReceiveMasks,
        captured: CapturedStep | None = None,
        *,
        before_wait: Callable[[], None] = lambda: None,
    ) -> ReadRows | None:
        """What follows the layers on the last stage.

        Returns:
            Gives the rows once all has run; None on ranks that do not sample.
        """
        last_stage = self._parts.last_stage
        assert last_stage is not None, "only the last stage has an end"
        taps_TNH, draft_rows_YRD = outputs.taps_TNH, memory.draft_rows_YRD
        if last_stage.can_capture(plan):
            if captured is not None and self._graphs is not None:
                rows = self._graphs.replay_end(captured)
            else:
                rows = last_stage.enqueue(packed, outputs.stream(), taps_TNH, draft_rows_YRD)
            if not self._parts.is_sampler:
                return None
            download = Download(rows.packed)
            return lambda: last_stage.rows_of(plan, download.read().numpy())
        if self._parts.is_sampler:
            # Some parameters make the host wait for this step, and so would older answers.
            before_wait()
        unread = last_stage.enqueue_general(
            plan, packed, outputs.stream(), taps_TNH, draft_rows_YRD, receive_masks
        )
        return None if unread is None else unread.read

    def finish(self) -> None:
        """Wait for the device, and let go of the graphs before anyone's links are cut."""
        self.stream.synchronize()
        self._graphs = None

    def _captured(self, plan: StepPlan) -> CapturedStep | None:
        """The graphs that run the plan's layers, if any do."""
        if self._graphs is None or not plan.segments[-1].is_window:
            return None
        width = max([segment.num_tokens for segment in plan.segments])
        bucket = self._buckets.choose(len(plan.segments), width)
        captured = None if bucket is None else self._graphs.find(bucket)
        if captured is None or not self._inputs.fits(plan, captured.bounds):
            return None
        return captured


def _most_values(config: ResolvedConfig, buckets: Sequence[Bucket]) -> int:
    """Size of a block that every captured step fits into, and nearly every other."""
    engine = config.engine
    prefill = GroupBounds(
        num_tokens=engine.max_num_batched_tokens,
        num_segments=engine.max_num_seqs,
        max_length=engine.max_num_batched_tokens,
        max_context=config.max_model_len,
        max_replay=config.num_draft_tokens,
        max_drafts=0,
        num_saves=engine.max_num_seqs,
    )
    sizes = [
        num_values(bounds_of(bucket, config), pages_of(bucket.num_segments, config))
        for bucket in buckets
    ]
    mixed = StepBounds(prefill, prefill)
    return max(num_values(mixed, pages_of(engine.max_num_seqs, config)), *sizes)
