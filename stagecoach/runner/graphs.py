"""CUDA graphs of one stage: decode and verify steps, captured once and replayed.

Owns the capture, the memory that all graphs share, and the tensors at fixed addresses by which a
replay is fed and read. A bucket has a graph of the stage's layers and, on the last stage, one of
what follows; the second is left out where a plan asks for more than it does. Which steps there
are is `buckets.py`'s; what is captured, `stage_pass.py`'s and `last_stage.py`'s.

Dimensions: T tokens, B closed blocks, N taps, H hidden size.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from stagecoach.config.engine import ResolvedConfig
from stagecoach.kernels.ragged import StepTensors
from stagecoach.model.attn_residual import ResidualStream
from stagecoach.model.stage_memory import StageMemory
from stagecoach.pipeline.boundary import BoundaryField
from stagecoach.runner.buckets import Bucket, bounds_of
from stagecoach.runner.device_rows import DeviceRows
from stagecoach.runner.last_stage import LastStage
from stagecoach.runner.packed_inputs import PackedInputs, PackedStep, StepBounds
from stagecoach.runner.stage_pass import StagePass, StageStream

# Held while a graph is captured, and by whoever waits for a whole device: it must not be waited
# for while any thread of the process captures on it.
CAPTURING = threading.RLock()

# What `__cuda_array_interface__` calls integers of so many bytes.
_INTEGERS = {2: (torch.int16, "<i2"), 4: (torch.int32, "<i4")}


class LayerOutputs(NamedTuple):
    """What a stage's layers leave, by the names of the boundary's fields."""

    hidden_TH: Tensor
    bank_TBH: Tensor
    taps_TNH: Tensor | None  # None without a drafter

    def stream(self) -> ResidualStream:
        """As a stream that is read, and may be read again from the same tensors."""
        return ResidualStream(self.hidden_TH, self.bank_TBH, self.bank_TBH.shape[1])

    def lent(self) -> "LayerOutputs":
        """The same memory, without a claim on it: graphs captured later may use it meanwhile."""
        return LayerOutputs(
            _lent(self.hidden_TH),
            _lent(self.bank_TBH),
            None if self.taps_TNH is None else _lent(self.taps_TNH),
        )

    def real(self, name: str, num_tokens: int) -> Tensor:
        """The first tokens of the field of that name."""
        field = {
            "hidden_TH": self.hidden_TH,
            "bank_TBH": self.bank_TBH,
            "taps_TNH": self.taps_TNH,
        }[name]
        assert field is not None, "taps without a drafter"
        return field[:num_tokens]


class CapturedStep(NamedTuple):
    """The graphs of one bucket, and what they read and write."""

    bounds: StepBounds
    packed: PackedStep
    layers: torch.cuda.CUDAGraph
    outputs: LayerOutputs
    end: torch.cuda.CUDAGraph | None  # of the last stage
    rows: DeviceRows | None


class StepGraphs:
    """All graphs of one stage.

    Args:
        incoming: fields that the stage receives.
        last_stage: None on other stages.
        most_tokens: of any bucket.
        stream: where everything is captured and replayed; not the default stream.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        stage_pass: StagePass,
        last_stage: LastStage | None,
        incoming: Sequence[BoundaryField],
        inputs: PackedInputs,
        *,
        dtype: torch.dtype,
        most_tokens: int,
        stream: torch.cuda.Stream,
    ) -> None:
        self._config = config
        self._pass = stage_pass
        self._last_stage = last_stage
        self._inputs = inputs
        self._stream = stream
        self._fields = {
            field.name: torch.zeros(
                most_tokens, *field.row_shape, dtype=dtype, device=stream.device
            )
            for field in incoming
        }
        self._pool = torch.cuda.graph_pool_handle()
        self._steps: dict[Bucket, CapturedStep] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @torch.inference_mode()
    def capture(
        self,
        buckets: Sequence[Bucket],
        memory: StageMemory,
        on_progress: Callable[[int, int], None] = lambda done, in_all: None,
    ) -> float:
        """Capture every bucket, in that order: the largest first takes memory for all.

        Nothing is read or written in `memory`: the captured steps are empty.

        Args:
            on_progress: told how many are captured, and how many there are in all.

        Returns:
            Seconds.
        """
        began = time.perf_counter()
        torch.cuda.current_stream().synchronize()
        with CAPTURING, _no_collection(), torch.cuda.stream(self._stream):
            for number, bucket in enumerate(buckets, start=1):
                self._steps[bucket] = self._capture(bucket, memory)
                on_progress(number, len(buckets))
            self._stream.synchronize()
        return time.perf_counter() - began

    @torch.inference_mode()
    def launch(self, buckets: Sequence[Bucket], memory: StageMemory) -> None:
        """Launch once what the graphs of these buckets would hold."""
        with torch.cuda.stream(self._stream):
            for bucket in buckets:
                bounds = bounds_of(bucket, self._config)
                self._inputs.clear(bounds)
                self._launch(self._inputs.view(bounds), memory)
            self._stream.synchronize()

    def find(self, bucket: Bucket) -> CapturedStep | None:
        return self._steps.get(bucket)

    def replay_layers(
        self, step: CapturedStep, fields: dict[str, Tensor], num_tokens: int
    ) -> LayerOutputs:
        """Run the stage's layers on what was packed, and on the fields that came.

        Returns:
            Tensors that the next replay of any graph writes over. Rows from `num_tokens` on are
            nobody's.
        """
        for name, field in fields.items():
            self._fields[name][:num_tokens].copy_(field)
        step.layers.replay()
        return step.outputs

    def replay_end(self, step: CapturedStep) -> DeviceRows:
        """What follows the layers, on the last stage; the same holds for what it returns."""
        assert step.end is not None and step.rows is not None, "only the last stage has an end"
        step.end.replay()
        return step.rows

    def _capture(self, bucket: Bucket, memory: StageMemory) -> CapturedStep:
        bounds = bounds_of(bucket, self._config)
        self._inputs.clear(bounds)
        packed = self._inputs.view(bounds)
        # Kernels are compiled and libraries start up outside of a capture.
        self._launch(packed, memory)
        layers = torch.cuda.CUDAGraph()
        with self._recorded(layers):
            outputs = self._layers(packed.step, memory)
        end, rows = None, None
        if self._last_stage is not None:
            end = torch.cuda.CUDAGraph()
            with self._recorded(end):
                rows = self._end(packed, outputs, memory)
        return CapturedStep(
            bounds=bounds,
            packed=packed,
            layers=layers,
            outputs=outputs.lent(),
            end=end,
            rows=rows,
        )

    def _launch(self, packed: PackedStep, memory: StageMemory) -> None:
        self._end(packed, self._layers(packed.step, memory), memory)

    def _layers(self, step: StepTensors, memory: StageMemory) -> LayerOutputs:
        fields = {name: field[: step.num_tokens] for name, field in self._fields.items()}
        at = self._pass.run(self._pass.enter(step, fields), step, memory, sends=False)
        return outputs_of(self._pass, at)

    def _end(
        self, packed: PackedStep, outputs: LayerOutputs, memory: StageMemory
    ) -> DeviceRows | None:
        if self._last_stage is None:
            return None
        return self._last_stage.enqueue(
            packed, outputs.stream(), outputs.taps_TNH, memory.draft_rows_YRD
        )

    @contextmanager
    def _recorded(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        # Other threads of the process, such as a library's watchdog, go on meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        yield
        graph.capture_end()


def outputs_of(stage_pass: StagePass, at: StageStream) -> LayerOutputs:
    """What the stage's layers have left in the stream."""
    return LayerOutputs(at.stream.partial_TH, at.stream.bank_TBH, stage_pass.taps(at))


def _lent(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return tensor
    dtype, name = _INTEGERS[tensor.element_size()]
    return torch.as_tensor(_Loan(tensor.view(dtype), name), device=tensor.device).view(tensor.dtype)


class _Loan:
    """A tensor's address and shape, as other libraries take them."""

    def __init__(self, tensor: Tensor, type_name: str) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": type_name,
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


@contextmanager
def _no_collection() -> Iterator[None]:
    """What the collector frees during a capture might be of the device."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
