"""Triton's kernels compiled side by side, before the first of them is launched.

Owns the forms that code would launch, found while it runs without launching any, and the process
that compiles them (`compile_server.py`). What it makes is found on disk by whoever launches. Knows
no kernel.
"""

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from stagecoach.kernels import nvrtc


class Form(NamedTuple):
    """What a kernel is compiled for, as another process can read it."""

    module: str
    name: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]


class Compiled(NamedTuple):
    """What the process that compiles has to say at the end."""

    seconds: float
    num_processes: int
    failures: tuple[str, ...]


@contextmanager
def found_forms() -> Iterator[list[Form]]:
    """Forms that this thread would launch and that are not compiled; their launches are left out.

    Meanwhile new integers of any content are zeros, so that what no kernel wrote can be an index.
    """
    forms: list[Form] = []
    places: list[tuple[dict[Any, Any], Any]] = []
    thread = threading.get_ident()

    def note(*, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if threading.get_ident() != thread:
            return False
        function, device = fn.jit_function, compile["device"]
        [attributes] = compile["configs"]
        options = json.loads(compile["specialization_data"])["options"]
        forms.append(
            Form(
                function.fn.__module__,
                function.fn.__qualname__,
                dict(compile["signature"]),
                dict(compile["constants"]),
                dict(attributes),
                options,
            )
        )
        # The next launch of the form finds it here, and asks no more.
        kernels = function.device_caches[device][0]
        kernels[key] = _NotLaunched()
        places.append((kernels, key))
        return True

    assert knobs.runtime.jit_cache_hook is None, "somebody else looks for forms"
    knobs.runtime.jit_cache_hook = note
    try:
        with nvrtc.nothing_launched(), _zeroed_integers():
            yield forms
    finally:
        knobs.runtime.jit_cache_hook = None
        for kernels, key in places:
            kernels.pop(key, None)


class _NotLaunched:
    """In the place of a compiled kernel."""

    function = None
    packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        return


@contextmanager
def _zeroed_integers() -> Iterator[None]:
    # Not a mode of torch's, which would look at every question that is asked of a tensor.
    makers: tuple[tuple[Any, str], ...] = (
        (torch, "empty"),
        (torch, "empty_like"),
        (Tensor, "new_empty"),
    )
    given = [getattr(owner, name) for owner, name in makers]
    for (owner, name), make in zip(makers, given, strict=True):
        setattr(owner, name, _zeroing(make))
    try:
        yield
    finally:
        for (owner, name), make in zip(makers, given, strict=True):
            setattr(owner, name, make)


def _zeroing(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*arguments: Any, **options: Any) -> Tensor:
        tensor = make(*arguments, **options)
        return tensor if tensor.is_floating_point() else tensor.zero_()

    return made


class CompileServer:
    """A process that compiles forms; started early, since it has much to import.

    Args:
        num_processes: that compile at once.
    """

    def __init__(self, num_processes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stagecoach.kernels.compile_server", str(num_processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # An interrupt at a terminal is this process's to answer.
            start_new_session=True,
        )

    def compile(self, forms: Sequence[Form]) -> Compiled:
        """Waits until all forms are on disk; one that cannot be compiled is told in the answer.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        target = driver.active.get_current_target()
        try:
            pickle.dump(
                ((target.backend, target.arch, target.warp_size), list(forms)),
                self._process.stdin,
            )
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise RuntimeError("the process that compiles kernels has ended") from error
        assert isinstance(answer, Compiled), f"not an answer: {answer!r}"
        return answer

    def close(self) -> None:
        """End the process, whatever it is doing."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
