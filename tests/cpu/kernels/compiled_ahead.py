"""Kernels launched on a GPU that is not there: found, compiled elsewhere, and found on disk.

A script, since Triton of the tests' own process interprets.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from stagecoach.kernels.compile_ahead import CompileServer, found_forms
from stagecoach.kernels.peer.peer_kernel import exchange_kernel

SIZE = 64


def launch(*, warmup: bool) -> None:
    """Two forms of one kernel, the first of them twice."""
    flags = torch.zeros(SIZE, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        x = torch.zeros(SIZE, dtype=dtype)
        distances = torch.zeros(2, dtype=torch.int64)
        arguments = (x, x, flags, flags, x, distances, SIZE, 1)
        constants = {"MAX_PROGRAMS": 4, "PROGRAM_VALUES": SIZE, "TILE": SIZE, "SUMS": True}
        exchange_kernel.run(
            *arguments,
            RANK=0,
            SIZE=2,
            VALUE_BYTES=x.element_size(),
            IS_DEPENDENT=False,
            **constants,
            num_warps=2,
            grid=(1,),
            warmup=warmup,
        )


def main() -> None:
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )  # type: ignore[arg-type]
    )
    hits: list[bool] = []

    def note(*, cache_hit: bool, **_: Any) -> None:
        hits.append(cache_hit)

    server = CompileServer(2)
    with found_forms() as forms:
        launch(warmup=False)
        assert not torch.empty(1 << 16, dtype=torch.int32).any()
    assert [form.name for form in forms] == ["exchange_kernel"] * 2, forms
    # One that cannot be compiled is told, and holds up no other.
    compiled = server.compile([forms[0]._replace(signature={}), *forms])
    server.close()
    assert len(compiled.failures) == 1 and "exchange_kernel" in compiled.failures[0], compiled
    knobs.compilation.listener = note
    launch(warmup=True)
    assert hits == [True, True], hits
    sys.stdout.write(f"found {len(forms)}, {compiled.num_processes} processes\n")


if __name__ == "__main__":
    main()
