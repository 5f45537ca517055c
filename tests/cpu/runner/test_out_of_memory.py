"""A GPU without enough memory refuses the configuration; other errors stay what they are."""

from typing import Any

import pytest
import torch

from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.errors import CapacityError
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology
from stagecoach.runner import stage_runner
from stagecoach.runner.out_of_memory import naming_options
from stagecoach.runner.stage_runner import Loaders, StageRunner
from tests.cpu.engine.fakes import resolved

pytestmark = pytest.mark.cpu

TORCH = (
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 2.00 GiB is free. Including non-PyTorch memory, this process has 137 GiB in use. "
    "\nCompile with more words"
)


@pytest.mark.parametrize(
    ("error", "numbers"),
    [
        (torch.OutOfMemoryError(TORCH), "of which 2.00 GiB is free."),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "Triton Error [CUDA]: out of memory"),
    ],
)
def test_memory_that_ends_names_what_and_the_options(error: RuntimeError, numbers: str) -> None:
    with pytest.raises(CapacityError) as refusal, naming_options("too big", "fewer --options"):
        raise error
    assert str(refusal.value).startswith("too big: ")
    assert str(refusal.value).endswith(f"{numbers} It takes fewer --options")


@pytest.mark.parametrize(
    "error", [RuntimeError("illegal address"), RuntimeError(), ValueError("x")]
)
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as passed, naming_options("too big", "fewer --options"):
        raise error
    assert passed.value is error


def end_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(TORCH)


def runner(loaders: Loaders | None = None) -> StageRunner:
    topology = Topology(num_stages=1, tp_size=1)
    worker = topology.worker(0)
    return StageRunner(
        resolved(load_format="dummy"), worker, ThreadMesh(topology).links(worker), loaders
    )


def test_weights_that_do_not_fit_ask_for_more_workers() -> None:
    with pytest.raises(CapacityError, match=r"weights of .* layers .*--pipeline-parallel-size"):
        runner(Loaders(end_memory, end_memory)).load(lambda done, in_all: None)


def test_pools_and_graphs_that_do_not_fit_name_their_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_runner, "DeviceMemory", end_memory)
    with pytest.raises(CapacityError, match=r"graphs do not fit: .*--gpu-memory-utilization"):
        runner().allocate(MemoryPlan(num_pages=6, num_slots=5))
