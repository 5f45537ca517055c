"""Which variants of Triton's kernels steps of a small model launch; as a script, it checks them.

Nothing is compiled and nothing runs: a launch only leaves the key that Triton would look a variant
up by. Everything else is the code that a GPU runs, on tensors of the CPU.
"""

import contextlib
import dataclasses
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from stagecoach.config.engine import ResolvedConfig
from stagecoach.kernels import dependent_launch, nvrtc, tensor_map
from stagecoach.model.weight_slots import WeightKind, WeightScope
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology
from stagecoach.runner import kernel_forms
from stagecoach.runner.device_budget import chunk_plan, windows_plan
from stagecoach.runner.device_memory import shapes_of
from stagecoach.runner.device_steps import DeviceSteps
from stagecoach.runner.stage_runner import StageRunner
from stagecoach.schedule.step_plan import StepPlan
from tests.cpu.runner import test_device_steps as stand_ins

NUM_STEPS = 60
SHAPE = dataclasses.replace(stand_ins.SHAPE, num_experts=8, num_experts_per_token=4)
_BACKEND = make_backend(GPUTarget("cuda", 90, 32))
_bind: dict[JITFunction, Any] = {}
met: dict[str, set[str]] = defaultdict(set)


def record(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    assert not warmup and grid
    if kernel not in _bind:
        _bind[kernel] = create_function_from_signature(kernel.signature, kernel.params, _BACKEND)
    _, specialization, rest = _bind[kernel](*arguments, **options)
    met[kernel.fn.__name__].add(f"{specialization} {sorted(rest.items())}")


def zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Where a kernel would have written, numbers stand that may be indices."""

    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return make(*arguments, **options).zero_()

    return made


def product(
    x: Tensor, y: Tensor, *, out_dtype: torch.dtype | None = None, mm: Any = torch.mm, **out: Tensor
) -> Tensor:
    """What a CPU lacks: sums wider than their factors."""
    xy: Tensor = mm(x, y, **out)
    return xy if out_dtype is None else xy.to(out_dtype)


def scaled_product(
    x: Tensor, y: Tensor, *, out_dtype: torch.dtype, **_: Tensor | bool | None
) -> Tensor:
    """Of E4M3, which a CPU has no product of; of the right shape."""
    return x.new_empty((x.shape[0], y.shape[1]), dtype=out_dtype)


class CudaKernel:
    """One of CUDA C++."""

    def __init__(self, source: Path, name: str, device: object, definitions: object) -> None:
        self._name = name
        self._key = f"{source.name} {definitions}"

    def launch(self, *_: object, **__: object) -> None:
        met[self._name].add(self._key)


def row_major(weights: WeightScope, *shape: int, kind: WeightKind = WeightKind.MATRIX) -> Tensor:
    """As on a GPU, where the drafter's head is no wider than the rest."""
    if kind is WeightKind.DRAFT_HEAD:
        kind = WeightKind.MATRIX
    return weights.parameter(*shape, kind=kind)


def pretend() -> None:
    """The host's tensors are taken for a GPU's, and nothing is launched."""
    for name, stand_in in {
        "Stream": stand_ins.Stream,
        "Event": stand_ins.Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": stand_ins.Stream,
    }.items():
        setattr(torch.cuda, name, stand_in)
    JITFunction.run = record
    torch.mm = product
    torch._scaled_mm = scaled_product
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    nvrtc.is_available = lambda: True
    nvrtc.load_kernel = CudaKernel
    tensor_map._encode = lambda *_: tensor_map.TensorMap()
    WeightScope.matrix = row_major
    dependent_launch.is_enabled = False
    torch.Tensor.is_cuda = property(lambda tensor: True)
    for module, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        setattr(module, name, zeroed(getattr(module, name)))


def runner_of(
    folder: Path, dtype: str, *, is_quantised: bool = False
) -> tuple[ResolvedConfig, StageRunner]:
    stand_ins.SHAPE = SHAPE
    config = stand_ins.config_of(
        stand_ins.checkpoint(folder, "kimi_k3"),
        (3,),
        speculative_config=stand_ins.draft(folder),
    )
    engine = dataclasses.replace(
        config.engine,
        dtype=dtype,
        distributed_executor_backend="uni",
        max_num_batched_tokens=96,
        max_num_seqs=18,
        enforce_eager=True,
    )
    if is_quantised:
        assert engine.speculative_config is not None
        engine = dataclasses.replace(
            engine,
            mxfp4_experts="packed",
            online_quantization="ptpc_fp8",
            kv_cache_dtype="fp8",
            speculative_config=dataclasses.replace(
                engine.speculative_config, online_quantization="follow", kv_cache_dtype="fp8"
            ),
        )
    config = dataclasses.replace(config, engine=engine, dtype=dtype)
    topology = Topology.of(config.engine)
    [worker] = topology.workers
    pretend()
    runner = StageRunner(config, worker, ThreadMesh(topology).links(worker))
    runner.load(lambda done_bytes, total_bytes: None)
    return config, runner


def rehearse(config: ResolvedConfig, steps: DeviceSteps, memory: Any, *, has_graphs: bool) -> None:
    for length in kernel_forms.chunk_lengths(config):
        steps.rehearse(chunk_plan(config, length), memory, is_computed=True)
    for plan in kernel_forms.form_plans(config, has_graphs=has_graphs):
        steps.rehearse(plan, memory, is_computed=False)
    steps.rehearse(windows_plan(config), memory, is_computed=False)


def served(config: ResolvedConfig) -> Iterator[StepPlan]:
    """Steps of any lengths, as a scheduler makes them."""
    draw = random.Random(5)
    most_tokens, most_segments = config.engine.max_num_batched_tokens, config.engine.max_num_seqs
    for _ in range(NUM_STEPS):
        num_chunks = draw.randrange(0, most_segments + 1)
        num_windows = draw.randrange(0 if num_chunks else 1, most_segments + 1 - num_chunks or 1)
        widths = [draw.randrange(1, 2 + config.num_draft_tokens) for _ in range(num_windows)]
        lengths: list[int] = []
        for place in range(num_chunks):
            spare = most_tokens - sum(widths) - sum(lengths) - 2 * (num_chunks - place - 1)
            if spare >= 2:
                lengths.append(draw.randrange(2, min(spare, 30) + 1))
        form = kernel_forms._Form(config, has_saves=draw.random() < 0.5, replay=draw.randrange(2))
        plan = form.plan(widths, lengths)
        segments = [
            # Chunks inside a prompt sample nothing.
            msgspec.structs.replace(item, sampling_row=None, proposes=False)
            if not item.is_window and draw.random() < 0.5
            else item
            for item in plan.segments
        ]
        yield msgspec.structs.replace(plan, segments=tuple(segments))


def main(dtype: str, *, has_graphs: bool, is_quantised: bool) -> None:
    """With graphs, windows alone are captured, and only steps with chunks are served here."""
    with tempfile.TemporaryDirectory() as folder:
        config, runner = runner_of(Path(folder), dtype, is_quantised=is_quantised)
    with torch.inference_mode():
        assert runner._pass is not None
        steps = runner._device_steps(runner._pass)
        shapes = shapes_of(config, runner._stage, runner._dtype)
        memory = shapes.allocate(8, 64 * config.engine.block_size, "cpu")
        rehearse(config, steps, memory, has_graphs=has_graphs)
        rehearsed = {name: set(keys) for name, keys in met.items()}
        for plan in served(config):
            if has_graphs and plan.segments[-1].is_window:
                continue
            steps.rehearse(plan, memory, is_computed=False)
            for name, keys in met.items():
                new = keys - rehearsed.get(name, set())
                assert not new, f"{name} is compiled for\n{plan}\n{new}\nnot {rehearsed.get(name)}"
        for name, keys in sorted(met.items()):
            sys.stdout.write(f"{name} {len(keys)}\n")


if __name__ == "__main__":
    main(
        sys.argv[1],
        has_graphs=sys.argv[2] == "graphs",
        is_quantised=sys.argv[3:] == ["quantised"],
    )
