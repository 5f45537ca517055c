"""How many bytes of a GPU are left for pages and state slots.

Owns the rehearsal behind that number: the largest step that single launches run, and the largest
that is captured, each with little memory of its own. What they took is taken off what the
options allow, before the pools are made. It goes over the same steps twice where kernels may be
new: first without a launch, so that all are compiled side by side.
"""

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from stagecoach.cache.page_pool import NUM_RESERVED_PAGES
from stagecoach.cache.state_slots import NUM_RESERVED_SLOTS, ZERO_SLOT
from stagecoach.config.engine import ResolvedConfig
from stagecoach.model.stage_memory import MemoryShapes, StageMemory
from stagecoach.observe.log import get_logger
from stagecoach.request import SamplingParams
from stagecoach.runner.device_steps import DeviceSteps
from stagecoach.runner.graphs import CAPTURING
from stagecoach.runner.kernel_forms import chunk_lengths, form_plans
from stagecoach.schedule.step_plan import SamplingEntry, Segment, StepPlan, pack_page_table

_LOG = get_logger(__name__)

# No plan of an engine has these numbers.
_CHUNK_STEP, _WINDOWS_STEP = -1, -2
_SLOT = NUM_RESERVED_SLOTS
_CONTEXT_PAGE = NUM_RESERVED_PAGES
_MAX_COMPILERS = 24


class Measured(NamedTuple):
    """Bytes beside weights and pools."""

    activations: int  # most of a step, while it runs and others are between stages
    graphs: int  # all of them together


class Available(NamedTuple):
    """What one worker may take of a GPU."""

    num_bytes: int  # for pages and slots; below 0 where all else is more than the options allow
    gpu_bytes: int  # the worker's part of all there are


def available_bytes(
    config: ResolvedConfig, device: torch.device, measured: Measured, num_sharing: int
) -> Available:
    """What pages and slots may take of what is free now.

    Args:
        num_sharing: workers on this device, each of which takes an equal part.
    """
    free, total = torch.cuda.mem_get_info(device)
    spared = int((1 - config.engine.gpu_memory_utilization) * total)
    available = (free - spared) // num_sharing - measured.activations - measured.graphs
    _LOG.info(
        "memory of the device: %.2f GiB free, %.2f spared, activations %.2f, graphs %.2f; "
        "%.2f for pages and state slots",
        *(
            number / 2**30
            for number in (free, spared, measured.activations, measured.graphs, available)
        ),
    )
    return Available(available, total // num_sharing)


class Rehearsal:
    """Runs the largest steps of one worker, without its neighbours.

    Args:
        bytes_in_flight: what those take beside it that are on their way from or to neighbours.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        steps: DeviceSteps,
        shapes: MemoryShapes,
        device: torch.device,
        *,
        bytes_in_flight: int,
    ) -> None:
        self._config = config
        self._steps = steps
        self._shapes = shapes
        self._device = device
        self._bytes_in_flight = bytes_in_flight

    def measure(self) -> Measured:
        """Ends with nothing allocated. All kernels are compiled then, and libraries started."""
        _LOG.info("rehearsing the largest steps; kernels that are new here are compiled")
        # Threads meet nowhere in between where they capture.
        with CAPTURING if self._steps.buckets else contextlib.nullcontext():
            began = time.perf_counter()
            measured = self._measure()
        _LOG.info("rehearsed in %.1f s", time.perf_counter() - began)
        return measured

    def _measure(self) -> Measured:
        block_size = self._config.engine.block_size
        chunk, windows = chunk_plan(self._config), windows_plan(self._config)
        num_pages = 1 + max(
            max(segment.page_ids) for plan in (chunk, windows) for segment in plan.segments
        )
        memory = self._shapes.allocate(_SLOT + 1, num_pages * block_size, str(self._device))
        torch.cuda.current_stream().synchronize()
        if self._device.type == "cuda" and not self._has_other_threads():
            self._compile(chunk, windows, memory)
        # What is set up once, at the first step, is no activation.
        self._meet_forms(chunk, windows, memory)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self._run(chunk, windows, memory)
        activations = torch.cuda.max_memory_allocated(self._device) - before
        activations += self._bytes_in_flight
        graphs = self._measure_graphs(memory)
        del memory
        _collect(self._device)
        return Measured(activations, graphs)

    def _has_other_threads(self) -> bool:
        """Whether other workers of this process launch kernels meanwhile."""
        engine = self._config.engine
        return engine.distributed_executor_backend == "uni" and engine.num_workers > 1

    def _compile(self, chunk: StepPlan, windows: StepPlan, memory: StageMemory) -> None:
        """Compile, in many processes, what the rehearsal and the graphs are going to launch."""
        # Not before: an engine on a CPU needs no Triton.
        from stagecoach.kernels import kernel_cache
        from stagecoach.kernels.compile_ahead import CompileServer, found_forms

        name = kernel_cache.digest(self._what_decides_forms(kernel_cache.source_digest()))
        if kernel_cache.find(name) is not None:
            _LOG.debug("an earlier start has compiled all kernels")
            return
        num_workers = self._config.engine.num_workers
        num_cores = len(os.sched_getaffinity(0))
        server = CompileServer(max(1, min(_MAX_COMPILERS, num_cores // num_workers)))
        try:
            began = time.perf_counter()
            with found_forms() as forms:
                self._meet_forms(chunk, windows, memory)
                if self._steps.buckets:
                    self._steps.new_graphs().launch(self._steps.buckets, memory)
            _LOG.info(
                "found %d forms of kernels in %.1f s", len(forms), time.perf_counter() - began
            )
            # Ranks need nearly the same: each begins elsewhere, and finds what others have made.
            first = len(forms) * (self._device.index or 0) // num_workers
            compiled = server.compile(forms[first:] + forms[:first])
            _LOG.info(
                "compiled them, or found them on disk, in %.1f s with %d processes",
                compiled.seconds,
                compiled.num_processes,
            )
            for failure in compiled.failures:
                _LOG.warning("could not be compiled beforehand: %s", failure)
            kernel_cache.store(name, b"compiled")
        except RuntimeError as error:
            _LOG.warning("%s: kernels are compiled one by one", error)
        finally:
            server.close()
            _collect(self._device)

    def _what_decides_forms(self, sources: str) -> Iterator[bytes]:
        """What was compiled for the same of all this needs no looking for forms."""
        config, engine = self._config, self._config.engine
        speculation = config.speculation
        properties = torch.cuda.get_device_properties(self._device)
        for part in (
            (sources, torch.__version__, properties.name, self._device.index),
            (config.model, self._shapes, config.quantization, config.draft_quantization),
            (config.max_model_len, config.num_draft_tokens, config.is_chaining),
            (speculation.draft, speculation.acceptance) if speculation else None,
            (engine.max_num_seqs, engine.max_num_batched_tokens, engine.block_size),
            (engine.num_workers, tuple(self._steps.buckets)),
        ):
            yield repr(part).encode()

    def _meet_forms(self, chunk: StepPlan, windows: StepPlan, memory: StageMemory) -> None:
        """Kernels have forms for few tokens and for many: a first request should wait for none."""
        for length in chunk_lengths(self._config)[:-1]:
            self._steps.rehearse(chunk_plan(self._config, length), memory, is_computed=True)
        for plan in form_plans(self._config, has_graphs=bool(self._steps.buckets)):
            self._steps.rehearse(plan, memory, is_computed=False)
        self._run(chunk, windows, memory)

    def _run(self, chunk: StepPlan, windows: StepPlan, memory: StageMemory) -> None:
        # A step may hold both: what the chunk leaves is there while windows are sampled.
        left = self._steps.rehearse(chunk, memory, is_computed=True)
        self._steps.rehearse(windows, memory, is_computed=False)
        del left

    def _measure_graphs(self, memory: StageMemory) -> int:
        """The largest bucket takes what all share; each further one costs about the same."""
        buckets = self._steps.buckets
        if not buckets:
            return 0
        free = [_collect(self._device)]
        graphs = self._steps.new_graphs()
        for bucket in buckets[:2]:
            graphs.capture([bucket], memory)
            free.append(_collect(self._device))
        costs = [before - after for before, after in pairwise(free)]
        del graphs
        _collect(self._device)
        return costs[0] + sum(costs[1:]) * (len(buckets) - 1)


def chunk_plan(config: ResolvedConfig, most_tokens: int | None = None) -> StepPlan:
    """The longest chunk behind the longest context.

    Args:
        most_tokens: of the chunk, if it may not be as long as any.
    """
    engine, block_size = config.engine, config.engine.block_size
    length = min(engine.max_num_batched_tokens, config.max_model_len - 1)
    if most_tokens is not None:
        length = min(length, most_tokens)
    start = (config.max_model_len - 1 - length) // block_size * block_size
    num_own = -(-length // block_size)
    own_pages = range(_CONTEXT_PAGE + 1, _CONTEXT_PAGE + 1 + num_own)
    segment = Segment(
        request_id=0,
        epoch=0,
        start=start,
        token_ids=_tokens(config, 0, length),
        read_slot=_SLOT if start else ZERO_SLOT,
        write_slot=_SLOT,
        page_table=pack_page_table((*[_CONTEXT_PAGE] * (start // block_size), *own_pages)),
        sampling_row=0,
        proposes=bool(config.num_draft_tokens),
    )
    return StepPlan(step=_CHUNK_STEP, segments=(segment,), admissions=(_admission(0),))


def windows_plan(config: ResolvedConfig) -> StepPlan:
    """As many windows of as many drafts as fit, sampled with parameters that take most."""
    engine = config.engine
    width = min(1 + config.num_draft_tokens, engine.max_num_batched_tokens, config.max_model_len)
    count = min(engine.max_num_seqs, engine.max_num_batched_tokens // width)
    num_pages = -(-width // engine.block_size)
    segments = tuple(
        Segment(
            request_id=number,
            epoch=0,
            start=0,
            token_ids=_tokens(config, number, width),
            num_draft_tokens=width - 1,
            read_slot=ZERO_SLOT,
            write_slot=_SLOT + number,
            page_table=pack_page_table(
                [_CONTEXT_PAGE + 1 + number * num_pages + page for page in range(num_pages)]
            ),
            sampling_row=number,
            proposes=bool(config.num_draft_tokens),
        )
        for number in range(count)
    )
    admissions = tuple(map(_admission, range(count)))
    return StepPlan(step=_WINDOWS_STEP, segments=segments, admissions=admissions)


def _tokens(config: ResolvedConfig, first: int, count: int) -> tuple[int, ...]:
    """Of all kinds, so that routed experts are those of real traffic."""
    return tuple(7919 * token % config.model.vocab_size for token in range(first, first + count))


def _admission(row: int) -> SamplingEntry:
    return SamplingEntry(
        row=row,
        # Nobody's, so that no count that a rule keeps goes on for a client's.
        request_id=-1 - row,
        params=SamplingParams(temperature=1.0, top_p=0.9),
        seed=row,
        stop_token_ids=(),
        num_prompt_tokens=1,
    )


def _collect(device: torch.device) -> int:
    """Give back what nobody holds; bytes that are free then."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
