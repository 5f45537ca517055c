"""A process that compiles forms of kernels: it reads them from its input, and answers once.

It imports what compiling needs while its owner does something else, and forks a process for each
core then; none of them has ever had a GPU. All end when its input does.

    python -m stagecoach.kernels.compile_server NUM_PROCESSES
"""

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from functools import partial
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource, make_backend

from stagecoach.kernels.compile_ahead import Compiled, Form


def options_of(form: Form, target: GPUTarget) -> Any:
    """What the backend is told of warps and the like; a text made lists of tuples."""
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in form.options.items()
    }
    return make_backend(target).parse_options(options)


def compile_form(form: Form, target: GPUTarget) -> str:
    """Leave the form in the cache on disk; returns why that could not be, or nothing."""
    try:
        function = getattr(importlib.import_module(form.module), form.name)
        source = ASTSource(function, form.signature, form.constants, form.attributes)
        options = options_of(form, target).__dict__
        compiled = triton.compile(source, target=target, options=options)
        if hasattr(nvidia, "make_launcher"):
            # In Triton 3.6 what launches a kernel is C code, compiled for its arguments.
            nvidia.CudaLauncher(source, compiled.metadata)
    except Exception as error:  # noqa: BLE001 - told in the answer; the owner compiles it again
        lines = str(error).strip().splitlines() or [""]
        return f"{form.module}.{form.name}: {type(error).__name__}: {lines[-1]}"
    return ""


def compile_all(forms: list[Form], target: GPUTarget, num_processes: int) -> Compiled:
    """Each form once, in as many processes at a time."""
    began = time.perf_counter()
    num_processes = max(1, min(num_processes, len(forms)))
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        reasons = pool.map(partial(compile_form, target=target), forms, chunksize=1)
    failures = tuple(reason for reason in reasons if reason)
    return Compiled(time.perf_counter() - began, num_processes, failures)


def main() -> None:
    # What others print on the standard output must not stand in the answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        backend_and_forms = pickle.load(sys.stdin.buffer)
    except EOFError:
        return
    (backend, arch, warp_size), forms = backend_and_forms
    threading.Thread(target=_end_with_owner, daemon=True).start()
    answer = compile_all(forms, GPUTarget(backend, arch, warp_size), int(sys.argv[1]))
    pickle.dump(answer, answers)
    answers.flush()


def _end_with_owner() -> None:
    # Not through the file: a process that is forked meanwhile would find its lock taken.
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
