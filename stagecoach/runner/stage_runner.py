"""One plan on one rank: receive, run the stage's layers, send, and on the last stage sample.

Owns the stage's model, its memory and both ends of its boundary. Keeps no request: whatever
a step needs stands in its plan, except the sampling table of the last stage.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.cache.memory_plan import MemoryNeeds, MemoryPlan
from stagecoach.config import ResolvedConfig
from stagecoach.draft.drafter import Drafter
from stagecoach.draft.load import load_drafter
from stagecoach.model.attn_residual import ResidualStream
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.weights import LoadProgress, Progress, load_stage
from stagecoach.pipeline.boundary import incoming_fields, outgoing_fields
from stagecoach.pipeline.handoff import Handoff
from stagecoach.pipeline.links import Links
from stagecoach.pipeline.stage import Stage, make_stages
from stagecoach.pipeline.tap_relay import TapRelay
from stagecoach.pipeline.topology import Topology, WorkerId
from stagecoach.runner.device_memory import DeviceMemory, memory_needs
from stagecoach.runner.last_stage import LastStage, no_masks
from stagecoach.runner.memory_moves import moves_pages
from stagecoach.runner.step_inputs import build_step_tensors
from stagecoach.schedule.step_plan import RowResult, StepPlan

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class Loaders(NamedTuple):
    """Where the parts of a worker come from: called like `load_stage` and `load_drafter`."""

    stage: Callable[..., StageModel]
    drafter: Callable[..., Drafter]


class StepOutcome(NamedTuple):
    """What one rank knows after a step."""

    rows: tuple[RowResult, ...] | None  # only on the rank that samples
    forward_seconds: float  # inside the models: layers, head and drafter
    wait_seconds: float  # for the stage before
    differences: tuple[float, ...]  # one a comparison of the plan, as in StepResult


class StageRunner:
    """The stage of one worker; `load`, then `allocate`, then `run` for every plan in order."""

    def __init__(
        self,
        config: ResolvedConfig,
        worker: WorkerId,
        links: Links,
        loaders: Loaders | None = None,
    ) -> None:
        """`loaders` None: from the checkpoints."""
        self._config = config
        self._loaders = loaders or Loaders(load_stage, load_drafter)
        self._tensor_parallel = links.tensor_parallel
        self._dtype = DTYPES[config.dtype]
        self._stage: Stage = make_stages(config.partition)[worker.stage]
        topology = Topology.of(config.engine)
        stage, model = self._stage, config.model
        self._taps = config.speculation.draft.taps if config.speculation else None
        self._relay = TapRelay(self._taps, stage, model.hidden_size) if self._taps else None
        self._handoff = Handoff(
            links,
            worker,
            topology,
            incoming=incoming_fields(model, stage, self._taps),
            outgoing=outgoing_fields(model, stage, self._taps),
            dtype=self._dtype,
        )
        self._is_sampler = worker.rank == topology.sampler_rank
        self._model: StageModel | None = None
        self._last_stage: LastStage | None = None
        self._memory: DeviceMemory | None = None

    def load(self, on_progress: Callable[[int, int], None]) -> None:
        """Read this worker's weights, on the last stage those of the drafter too.

        Args:
            on_progress: told the bytes done and the bytes in all.

        Raises:
            CheckpointError: names the tensor or the file.
            ConfigError: the stage before declares another boundary.
        """

        def report_after(num_bytes: int) -> Progress:
            def report(progress: LoadProgress) -> None:
                on_progress(num_bytes + progress.num_bytes, num_bytes + progress.total_bytes)

            return report

        self._handoff.agree()
        engine = self._config.engine
        model = self._model = self._loaders.stage(
            self._config.checkpoint,
            self._config.model,
            self._stage,
            self._tensor_parallel,
            self._dtype,
            dummy_seed=self._config.dummy_seed,
            progress=report_after(0),
            taps=self._taps,
        )
        if not self._stage.is_last:
            return
        drafter = None
        if self._taps is not None:
            done_bytes = sum(slot.target.nbytes for slot in model.slots)
            drafter = self._loaders.drafter(
                self._config, model, self._tensor_parallel, self._dtype, report_after(done_bytes)
            )
        self._last_stage = LastStage(
            model,
            self._tensor_parallel,
            max_num_seqs=engine.max_num_seqs,
            is_sampler=self._is_sampler,
            speculation=self._config.speculation,
            drafter=drafter,
        )

    def memory_needs(self) -> MemoryNeeds:
        return memory_needs(self._config, self._stage, self._dtype)

    def allocate(self, plan: MemoryPlan) -> None:
        """Reserve pages and slots, in place of those that were reserved before."""
        # Two at once would be more than the worker may take.
        self._memory = None
        self._memory = DeviceMemory(self._config, self._stage, self._dtype, plan)

    @torch.inference_mode()
    def run(self, plan: StepPlan, receive_masks: Callable[[], bytes] = no_masks) -> StepOutcome:
        """Execute one plan; plans come in order.

        Args:
            receive_masks: waits for `TokenMasks.masks` of the plan, on the rank that samples, if
                the plan has constrained segments.
        """
        assert self._model is not None and self._memory is not None, "load and allocate first"
        handoff, model = self._handoff, self._model
        handoff.begin_step(plan.step)
        if self._last_stage is not None and moves_pages(plan.moves):
            self._last_stage.finish_context()
        differences = self._memory.prepare(plan)
        step = build_step_tensors(plan, self._config.engine.block_size)
        began = received = time.perf_counter()
        relayed_TNH: Tensor | None = None
        if self._stage.is_first:
            stream = model.embed(step.token_ids_T)
        else:
            fields = handoff.receive(step.num_tokens)
            received = time.perf_counter()
            relayed_TNH = fields.pop("taps_TNH", None)
            stream = model.resume(**fields)

        def send_final(layer: int, stream: ResidualStream) -> None:
            tensors = {
                "hidden_TH": lambda: stream.partial_TH,
                "bank_TBH": lambda: stream.bank_TBH,
                "taps_TNH": lambda: self._known_taps(relayed_TNH, stream),
            }
            handoff.send_final(layer, lambda name: tensors[name]())

        send_final(self._stage.start - 1, stream)
        stream = model.forward(stream, step, self._memory.stage_memory, send_final)
        forward_seconds = time.perf_counter() - received
        rows = None
        if self._last_stage is not None:
            head_seconds = self._last_stage.head_seconds
            taps_TNH = draft_rows_YRD = None
            if self._relay is not None:
                taps_TNH = self._known_taps(relayed_TNH, stream)
                draft_rows_YRD = self._memory.stage_memory.draft_rows_YRD
            rows = self._last_stage.run(plan, step, stream, taps_TNH, draft_rows_YRD, receive_masks)
            forward_seconds += self._last_stage.head_seconds - head_seconds
        return StepOutcome(rows, forward_seconds, received - began, differences)

    def finish(self) -> None:
        self._handoff.finish()

    def _known_taps(self, relayed_TNH: Tensor | None, stream: ResidualStream) -> Tensor:
        assert self._relay is not None, "taps without a drafter"
        return self._relay.join(relayed_TNH, stream.taps)
