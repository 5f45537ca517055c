"""One plan on one rank: receive, run the stage's layers, send, and on the last stage sample.

Owns the stage's model, its memory and both ends of its boundary. Keeps no request: whatever
a step needs stands in its plan, except the sampling table of the last stage.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from stagecoach.cache.memory_plan import MemoryNeeds, MemoryPlan
from stagecoach.config.engine import ResolvedConfig
from stagecoach.draft.drafter import Drafter
from stagecoach.draft.load import load_drafter
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.weights import LoadProgress, Progress, load_stage
from stagecoach.observe.log import get_logger
from stagecoach.pipeline.boundary import incoming_fields, outgoing_fields
from stagecoach.pipeline.handoff import Handoff
from stagecoach.pipeline.links import Links
from stagecoach.pipeline.stage import Stage, make_stages
from stagecoach.pipeline.tap_relay import TapRelay
from stagecoach.pipeline.topology import Topology, WorkerId
from stagecoach.runner.device_budget import Rehearsal, available_bytes
from stagecoach.runner.device_memory import DeviceMemory, memory_needs, shapes_of
from stagecoach.runner.device_steps import DeviceSteps, StageParts
from stagecoach.runner.last_stage import LastStage, no_masks
from stagecoach.runner.memory_moves import moves_pages
from stagecoach.runner.newest_tokens import NewestTokens
from stagecoach.runner.out_of_memory import naming_options
from stagecoach.runner.stage_pass import StagePass
from stagecoach.runner.step_inputs import build_step_tensors
from stagecoach.runner.step_outcome import FinishedStep, StepInFlight, StepOutcome
from stagecoach.schedule.step_plan import StepPlan

_LOG = get_logger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class Loaders(NamedTuple):
    """Where the parts of a worker come from: called like `load_stage` and `load_drafter`."""

    stage: Callable[..., StageModel]
    drafter: Callable[..., Drafter]


class StageRunner:
    """The stage of one worker; `load`, then `allocate`, then `run` for every plan in order.

    Between two plans, or in the middle of one that failed, it may `part`: only its weights stay,
    until it meets others again, who have lost theirs.
    """

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
        self._incoming = incoming_fields(model, stage, self._taps)
        self._handoff = Handoff(
            links,
            worker,
            topology,
            incoming=self._incoming,
            outgoing=outgoing_fields(model, stage, self._taps),
            dtype=self._dtype,
        )
        self._is_sampler = worker.rank == topology.sampler_rank
        self._device = torch.device(config.device)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._model: StageModel | None = None
        self._drafter: Drafter | None = None
        self._pass: StagePass | None = None
        self._last_stage: LastStage | None = None
        self._newest: NewestTokens | None = None
        self._memory: DeviceMemory | None = None
        self._steps: DeviceSteps | None = None  # None on CPU, and before the load

    def load(self, on_progress: Callable[[int, int], None], *, is_apart: bool = False) -> None:
        """Read this worker's weights, on the last stage those of the drafter too.

        Args:
            on_progress: told the bytes done and the bytes in all.
            is_apart: there are no links yet: `meet` follows.

        Raises:
            CheckpointError: names the tensor or the file.
            ConfigError: the stage before declares another boundary.
            CapacityError: the weights do not fit the device.
        """

        def report_after(num_bytes: int) -> Progress:
            def report(progress: LoadProgress) -> None:
                on_progress(num_bytes + progress.num_bytes, num_bytes + progress.total_bytes)

            return report

        if not is_apart:
            self._handoff.agree()
        with naming_options(
            f"the weights of {self._stage.num_layers} layers do not fit",
            "more workers (--pipeline-parallel-size, --tensor-parallel-size)",
        ):
            self._load_weights(report_after)
        if not is_apart:
            self._prepare()

    def part(self) -> None:
        """Let go of all but the weights: pages, slots, and what steps have left. On CPU."""
        assert self._steps is None, "what runs on a device cannot be called back"
        self._pass = self._last_stage = self._newest = self._memory = None
        if self._drafter is not None:
            self._drafter.drop_context()
        self._handoff.drop()

    def meet(self, links: Links) -> None:
        """Be as after the load, with other links.

        Raises:
            ConfigError: the stage before declares another boundary.
            WorkerDiedError: a neighbour is gone.
        """
        self._handoff.renew(links)
        self._handoff.agree()
        self._prepare()

    def _prepare(self) -> None:
        """Make what runs steps with the weights."""
        assert self._model is not None, "load first"
        engine = self._config.engine
        if self._config.is_chaining:
            self._newest = NewestTokens(engine.max_num_seqs, self._device)
        if self._stage.is_last:
            self._last_stage = LastStage(
                self._model,
                self._tensor_parallel,
                max_num_seqs=engine.max_num_seqs,
                is_sampler=self._is_sampler,
                speculation=self._config.speculation,
                drafter=self._drafter,
                device=self._device,
                newest=self._newest,
            )
        self._pass = StagePass(self._model, self._stage, self._handoff, self._relay)
        if self._device.type == "cuda":
            self._steps = self._device_steps(self._pass)

    def _load_weights(self, report_after: Callable[[int], Progress]) -> None:
        """Of the stage, and of the drafter on the last one."""
        self._model = model = self._loaders.stage(
            self._config.checkpoint,
            self._config.model,
            self._stage,
            self._tensor_parallel,
            self._dtype,
            dummy_seed=self._config.dummy_seed,
            progress=report_after(0),
            taps=self._taps,
            device=self._config.device,
            quantization=self._config.quantization,
        )
        if self._stage.is_last and self._taps is not None:
            done_bytes = sum(slot.target.nbytes for slot in model.slots)
            self._drafter = self._loaders.drafter(
                self._config, model, self._tensor_parallel, self._dtype, report_after(done_bytes)
            )

    def _device_steps(self, stage_pass: StagePass) -> DeviceSteps:
        engine = self._config.engine
        are_ranks_threads = (
            engine.distributed_executor_backend == "uni" and engine.tensor_parallel_size > 1
        )
        if are_ranks_threads and not engine.enforce_eager:
            _LOG.info("no CUDA graphs: the ranks of a stage are threads, which meet on the host")
        # Steps run on a stream of their own.
        torch.cuda.current_stream().synchronize()
        parts = StageParts(
            stage_pass=stage_pass,
            last_stage=self._last_stage,
            handoff=self._handoff,
            incoming=self._incoming,
            dtype=self._dtype,
            is_sampler=self._is_sampler,
            newest=self._newest,
        )
        has_graphs = not engine.enforce_eager and not are_ranks_threads
        return DeviceSteps(self._config, parts, self._device, has_graphs=has_graphs)

    def memory_needs(self) -> MemoryNeeds:
        """What this worker's memory costs and may cost; on a device, once that was measured."""
        available: tuple[int, int] | tuple[()] = ()
        if self._steps is not None:
            num_sharing = 1
            if self._config.engine.distributed_executor_backend == "uni":
                num_sharing = -(-self._config.engine.num_workers // torch.cuda.device_count())
            shapes = shapes_of(self._config, self._stage, self._dtype)
            most_tokens = self._config.engine.max_num_batched_tokens
            rehearsal = Rehearsal(
                self._config,
                self._steps,
                shapes,
                self._device,
                bytes_in_flight=self._handoff.bytes_in_flight(most_tokens),
            )
            with naming_options(
                "the largest steps do not fit beside the weights",
                "less of --max-num-batched-tokens or --max-num-seqs, or more workers",
            ):
                measured = rehearsal.measure()
            available = available_bytes(self._config, self._device, measured, num_sharing)
        return memory_needs(self._config, self._stage, self._dtype, *available)

    def allocate(
        self, plan: MemoryPlan, on_progress: Callable[[int, int], None] = lambda done, in_all: None
    ) -> None:
        """Reserve pages and slots, in place of those that were reserved before.

        Args:
            on_progress: on a device, told how many graphs are captured, and how many there are.
        """
        if self._steps is not None and self._memory is not None and self._memory.plan == plan:
            # Captured graphs hold the addresses.
            self._memory.reset()
            torch.cuda.current_stream().synchronize()
            return
        # Two at once would be more than the worker may take.
        if self._steps is not None:
            self._steps.allocate(None, on_progress)
        self._memory = None
        with naming_options(
            "pages, state slots and graphs do not fit",
            "less of --kv-cache-memory-bytes, --gpu-memory-utilization or --kv-offloading-size, "
            "fewer --cudagraph-capture-sizes, or --enforce-eager",
        ):
            self._memory = DeviceMemory(self._config, self._stage, self._dtype, plan)
            if self._steps is not None:
                # Steps run on a stream of their own.
                torch.cuda.current_stream().synchronize()
                self._steps.allocate(self._memory, on_progress)

    def launch(
        self,
        plan: StepPlan,
        receive_masks: Callable[[], bytes] = no_masks,
        before_wait: Callable[[], None] = lambda: None,
    ) -> StepInFlight:
        """Begin with one plan; plans come in order. On CPU it has been executed on return.

        Args:
            receive_masks: as in `run`.
            before_wait: called on a device before the host may wait for what this plan computes;
                its layers run meanwhile.
        """
        if self._steps is None:
            return FinishedStep(self.run(plan, receive_masks))
        return self._steps.launch(plan, receive_masks, before_wait)

    @torch.inference_mode()
    def run(self, plan: StepPlan, receive_masks: Callable[[], bytes] = no_masks) -> StepOutcome:
        """Execute one plan; plans come in order.

        Args:
            receive_masks: waits for `TokenMasks.masks` of the plan, on the rank that samples, if
                the plan has constrained segments.
        """
        assert self._pass is not None and self._memory is not None, "load and allocate first"
        if self._steps is not None:
            return self._steps.launch(plan, receive_masks, lambda: None).outcome()
        self._handoff.begin_step(plan.step)
        if self._newest is not None:
            plan = self._newest.told(plan)
        if self._last_stage is not None and moves_pages(plan.moves):
            self._last_stage.finish_context()
        differences = self._memory.prepare(plan)
        step = build_step_tensors(plan, self._config.engine.block_size)
        began = received = time.perf_counter()
        fields = self._pass.receive(step.num_tokens)
        if not self._stage.is_first:
            received = time.perf_counter()
        memory = self._memory.stage_memory
        at = self._pass.run(self._pass.enter(step, fields), step, memory, sends=True)
        forward_seconds = time.perf_counter() - received
        rows = None
        if self._last_stage is not None:
            head_seconds = self._last_stage.head_seconds
            rows = self._last_stage.run(
                plan,
                step,
                at.stream,
                self._pass.taps(at),
                memory.draft_rows_YRD if self._relay is not None else None,
                receive_masks,
            )
            forward_seconds += self._last_stage.head_seconds - head_seconds
        return StepOutcome(rows, forward_seconds, received - began, differences)

    def finish(self) -> None:
        """Wait for what was launched and sent; called once when the worker ends in order."""
        if self._steps is not None:
            self._steps.finish()
        self._handoff.finish()
